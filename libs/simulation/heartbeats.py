"""What a worker tells a router of itself: one pair per router process, numbered without gaps, on the elected tunnel.

As the live worker does it: a snapshot first and whenever one is asked for, then changes; a pair whose elected tunnel is
gone is silent until another is elected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.controller.protocol import (
    DecodeCost,
    Gone,
    Heartbeat,
    Load,
    PrefillCost,
    Resident,
    Tier,
    TierCost,
)
from libs.controller.worker import WorkerMachine
from libs.simulation.declared import BYTES_PER_TOKEN, FINGERPRINT
from libs.simulation.schedule import WorkerSpec

Held = dict[tuple[str, Tier], tuple[int, float]]  # (name, tier) -> (end, ms until it arrives)


@dataclass(slots=True)
class Pair:
    """This worker process and one router process."""

    sequence: int = 0
    term: int = 0
    elected: int | None = None  # tunnel
    told: dict[tuple[str, Tier], None] | None = None  # None: the next one is a snapshot
    tunnels: list[int] = field(default_factory=list)

    def elect(self, tunnel: int, term: int) -> bool:
        """The router elected a tunnel; whether that is news."""
        if term <= self.term or tunnel not in self.tunnels:
            return False
        self.term, self.elected, self.told = term, tunnel, None
        return True


def costs(spec: WorkerSpec) -> tuple[TierCost, ...]:
    """The declared restore costs, as if measured."""
    by_tier = (
        (Tier.RAM, spec.ram_ms),
        (Tier.SSD, spec.ssd_ms),
        (Tier.PEER, spec.peer_ms),
        (Tier.OBJECT, spec.object_ms),
    )
    measured = [TierCost(tier, 1.0, BYTES_PER_TOKEN / max(1e-6, ms)) for tier, ms in by_tier]
    return (TierCost(Tier.GPU, 0.0, BYTES_PER_TOKEN * 1_000.0), *measured)


def build(
    spec: WorkerSpec, tiers: tuple[TierCost, ...], machine: WorkerMachine, load: Load, pair: Pair, held: Held
) -> Heartbeat:
    """The next heartbeat of a pair, which it then counts as told."""
    told = pair.told
    came = [(key, value) for key, value in held.items() if told is None or key not in told or key[1] is Tier.INFLIGHT]
    went = [key for key in told if key not in held] if told is not None else []
    pair.sequence += 1
    pair.told = dict.fromkeys(held)
    return Heartbeat(
        worker=spec.name,
        epoch=machine.epoch,
        sequence=pair.sequence,
        node=spec.name,
        draining=machine.draining,
        load=load,
        lanes=spec.lanes,
        page_tokens=spec.page_tokens,
        max_context=spec.claims_context or spec.context,
        models=(FINGERPRINT,),
        prefill=(PrefillCost(1 << 20, spec.prefill_ms),),
        decode=(DecodeCost(64, spec.decode_ms),),
        tiers=tiers,
        resident=tuple(Resident(name, end, tier, FINGERPRINT, arrival) for (name, tier), (end, arrival) in came),
        gone=tuple(Gone(name, tier) for name, tier in went),
        snapshot=told is None,
        bytes_per_token=BYTES_PER_TOKEN,
    )
