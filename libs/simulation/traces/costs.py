"""What simulated workers cost: declared, the same for every policy.

An iteration takes `decode_ms` if any lane decodes, and `prefill_ms` per prompt token in it, `budget_tokens` of them at
most; what is restored to the device in it takes `restore_ms` per token. Loading from a lower tier runs beside the
device. Capacities are in blocks of 512 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TierSet(Enum):
    """From where a worker restores."""

    LOCAL = "local"  # device, RAM, SSD
    PEER = "+peer"  # and other workers' RAM and SSD
    OBJECT = "+object"  # and the shared object store

    @property
    def peers(self) -> bool:
        """Whether other workers' tiers count."""
        return self is not TierSet.LOCAL

    @property
    def store(self) -> bool:
        """Whether the object store does."""
        return self is TierSet.OBJECT


class Error(Enum):
    """How the costs that a policy hears are off, by up to `Costs.error`."""

    NONE = "none"
    REDRAWN = "redrawn"  # anew with each heartbeat
    PERSISTENT = "persistent"  # each worker its own, for ever


@dataclass(frozen=True, slots=True)
class Transfer:
    """Time to move tokens: per token and to begin, ms."""

    per_token_ms: float
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Costs:
    """See the module."""

    lanes: int = 16
    decode_ms: float = 12.0
    prefill_ms: float = 0.15
    restore_ms: float = 0.01
    budget_tokens: int = 2_048
    ram: Transfer = Transfer(0.005, 0.1)
    ssd: Transfer = Transfer(0.03, 0.5)
    peer: Transfer = Transfer(0.06, 2.0)  # on top of the source's
    store: Transfer = Transfer(0.08, 60.0)
    device_blocks: int = 400
    ram_blocks: int = 2_000
    ssd_blocks: int = 8_000
    store_after_ms: float = 5_000.0
    hop_ms: float = 0.5
    heartbeat_ms: float = 500.0  # how often a worker says what is so
    stale_ms: float = 500.0  # how late a policy hears it
    error: float = 0.3

    def work_ms(self, prefilled: float, restored: float, generated: float) -> float:
        """What so many tokens cost a worker whose lanes are all in use: the unit of load."""
        return self.prefill_ms * prefilled + self.restore_ms * restored + self.decode_ms * generated / self.lanes


DECLARED = Costs()
