"""Whether the catalog's word could matter to a plan. Pure.

It could not where a worker that may begin at once has the request in its device pages up to less than a chunk: all that
could be learnt is another place to bring the same from, or a tail that spares the computation of a part of one chunk.
So a conversation that goes on where it was waits for nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from libs.continuation.chain import CHUNK_TOKENS, TAIL_TOKENS, Chain, node_hash
from libs.controller.candidates import Variant
from libs.controller.fleet import Fleet
from libs.controller.knobs import FACT_KNOBS, FactKnobs, PolicyKnobs
from libs.controller.policy import rank
from libs.controller.protocol import GenerationRequest, Tier
from libs.controller.router_events import Plan


def covered(
    request: GenerationRequest,
    entry: Variant,
    fleet: Fleet,
    now_ms: float,
    avoid: Collection[str] = (),
    knobs: FactKnobs = FACT_KNOBS,
) -> bool:
    """Whether such a worker is known, those in `avoid` left out."""
    least = max(TAIL_TOKENS, request.processed - CHUNK_TOKENS + 1)
    return any(
        _may_begin(fleet, worker, now_ms, knobs)
        for name in _ends(request, entry.chain, fleet.index.tail_ends, least)
        for worker, tiers in fleet.index.holders(name).items()
        if Tier.GPU in tiers and worker not in avoid
    )


def _ends(request: GenerationRequest, chain: Chain, tail_ends: Collection[int], least: int) -> Iterator[str]:
    """The boundaries from `least` tokens on with less than a chunk behind them; of tails, those that anybody has."""
    start = chain.full_end
    for end in range(start + TAIL_TOKENS, chain.end + 1, TAIL_TOKENS):
        if end >= least and end in tail_ends:
            yield node_hash(chain.head, request.tokens[start:end])
    if chain.chunks and start >= least:
        yield chain.head


def from_residency(request: GenerationRequest, plan: Plan, avoid: Sequence[str], knobs: PolicyKnobs) -> Plan | None:
    """A covered request's plan cut down to what is resident; None where that would change its choice."""
    resident = [option for option in plan.ranked if option.candidate.tier is Tier.GPU]
    # Ranked among themselves: without the others the band of near ties may reach farther.
    ranked = rank(request.request_id, resident, avoid, knobs, plan.draw)
    if plan.hold is not None or not ranked or ranked[0] != plan.ranked[0]:
        return None
    return Plan(ranked, plan.pruned, partial=True, draw=plan.draw)


def _may_begin(fleet: Fleet, worker: str, now_ms: float, knobs: FactKnobs) -> bool:
    view = fleet.view(worker)
    return view is not None and not view.draining and view.queue_ms(now_ms) <= knobs.idle_queue_ms
