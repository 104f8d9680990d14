"""Scoring: predicted time to first token, its corrections by experience, and the order of near ties.

    ttft = max(queue, load) + restore + compute · prefill per token + first token            (controller.md)

Loading a lower tier runs off the device loop and overlaps the queue, hence the maximum. Every cost is what the worker
itself has measured, and what it measures wrong persistently is corrected (`corrections`).

Candidates within 1 % or 2 ms of the best are ordered by rendezvous hash of (request id, worker): deterministic and
replayable, and two routers with one snapshot do not herd. Who would compute a long prefix that nobody has draws by the
prefix instead, so that routers that do not talk choose one worker for it; who was held for such a prefix is dealt a
seat (`Draw`, and see `holding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from blake3 import blake3

from libs.controller.corrections import Correction
from libs.controller.knobs import POLICY_KNOBS, PolicyKnobs
from libs.controller.protocol import Candidate, DecodeCost, PrefillCost, RankedCandidate

_WORD = 2**64 - 1
MIX_ADD, MIX_FIRST, MIX_SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def predicted_ms(queue_ms: float, load_ms: float, restore_ms: float, prefill_ms: float, first_token_ms: float) -> float:
    """The formula."""
    return max(queue_ms, load_ms) + restore_ms + prefill_ms + first_token_ms


def ttft_ms(candidate: Candidate) -> float:
    """The formula, over a candidate's terms (already corrected)."""
    prefill_ms = candidate.compute_tokens * candidate.prefill_ms_per_token
    return predicted_ms(
        candidate.queue_ms, candidate.load_ms, candidate.restore_ms, prefill_ms, candidate.first_token_ms
    )


def scored(candidate: Candidate, correction: Correction) -> Candidate:
    """The candidate with its raw terms corrected and its prediction filled in."""
    raw = ttft_ms(candidate)
    corrected = replace(
        candidate,
        queue_ms=candidate.queue_ms * correction.queue,
        load_ms=candidate.load_ms * correction.restore,
        restore_ms=candidate.restore_ms * correction.restore,
        prefill_ms_per_token=candidate.prefill_ms_per_token * correction.prefill,
        first_token_ms=candidate.first_token_ms * correction.first,
    )
    total = ttft_ms(corrected)
    return replace(corrected, ttft_ms=total, correction=total / raw if raw > 0 else 1.0)


def work_ms(candidate: Candidate) -> float:
    """How long the candidate occupies its worker's device for itself alone before its first token: what a router adds
    to its queue. (The step that draws the first token is everybody's: a worker's lanes share it.)
    """
    return candidate.restore_ms + candidate.compute_tokens * candidate.prefill_ms_per_token


@lru_cache(maxsize=65_536)
def name_hash(name: str) -> int:
    """64 bits of a request's or worker's name, equal in every process."""
    return int.from_bytes(blake3(name.encode()).digest(8), "little")


def mixed(value: int) -> int:
    """A bijection of 64 bits in which every bit hangs on every other (the finalizer of SplitMix64, Steele et al. 2014).
    `candidates` does the same to whole columns.
    """
    value = (value + MIX_ADD) & _WORD
    value = ((value ^ (value >> 30)) * MIX_FIRST) & _WORD
    value = ((value ^ (value >> 27)) * MIX_SECOND) & _WORD
    return value ^ (value >> 31)


def rendezvous(request_id: str, worker: str) -> int:
    """Orders workers differently for each request, equally in every process."""
    return mixed(name_hash(request_id) ^ name_hash(worker))


Score = tuple[bool, float, str, int, int, str]
"""What a candidate is ranked by: to be avoided, ttft_ms, worker, tier, cached tokens, fingerprint."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How near ties are drawn. `name`: hashed with each worker, "" = the request's id; `seat`: the workers' order is
    turned by so many places; `band_ms`: how far beyond the best near ties reach at least, of those that begin behind
    `tokens` or more.
    """

    name: str = ""
    seat: int = 0
    band_ms: float = 0.0
    tokens: int = 0


BY_REQUEST = Draw()


def order(
    request_id: str, scores: Sequence[Score], knobs: PolicyKnobs = POLICY_KNOBS, draw: Draw = BY_REQUEST
) -> list[int]:
    """Indices of the scores, best first. Total and deterministic, whatever the order of `scores`."""
    band, others = _parted(request_id, scores, knobs, draw)
    if draw.seat:
        workers = _workers(band, scores)
        places = {worker: (place - draw.seat) % len(workers) for place, worker in enumerate(workers)}
        band.sort(key=lambda index: places[scores[index][2]])
    return band + others


def seated(scores: Sequence[Score], knobs: PolicyKnobs, draw: Draw, served: Mapping[str, int]) -> Draw:
    """The draw at the seat of the worker among near ties that has been given the fewest, by `served`."""
    workers = _workers(_parted("", scores, knobs, draw)[0], scores)
    least = min(range(len(workers)), key=lambda place: (served.get(workers[place], 0), place), default=0)
    return replace(draw, seat=least)


def _parted(request_id: str, scores: Sequence[Score], knobs: PolicyKnobs, draw: Draw) -> tuple[list[int], list[int]]:
    """Near ties in the order of their workers' hashes, and the others, best first."""
    ordered = sorted(range(len(scores)), key=scores.__getitem__)
    if not ordered:
        return [], []
    shunned, best_ms, *_ = scores[ordered[0]]
    limit = max(band_ms(best_ms, knobs), best_ms + draw.band_ms)
    near = 1
    while near < len(ordered) and scores[ordered[near]][1] <= limit and scores[ordered[near]][0] == shunned:
        near += 1
    if draw.tokens:
        able = [index for index in ordered[:near] if scores[index][4] >= draw.tokens]
        near, ordered = len(able), [*able, *[index for index in ordered if index not in able]]
    band, others = ordered[:near], ordered[near:]
    if near > 1:
        # Within the band the worker is drawn by hash; of one worker's own candidates the quickest stays first.
        name = draw.name or request_id
        band.sort(key=lambda index: rendezvous(name, scores[index][2]))
    return band, others


def _workers(band: Sequence[int], scores: Sequence[Score]) -> list[str]:
    return list(dict.fromkeys([scores[index][2] for index in band]))


def band_ms(best_ms: float, knobs: PolicyKnobs) -> float:
    """Up to where a prediction is as good as the best."""
    return best_ms + max(best_ms * knobs.near_tie_ratio, knobs.near_tie_ms)


def rank(
    request_id: str,
    options: Sequence[RankedCandidate],
    avoid: Sequence[str],
    knobs: PolicyKnobs = POLICY_KNOBS,
    draw: Draw = BY_REQUEST,
) -> tuple[RankedCandidate, ...]:
    """Best first. Workers in `avoid` come behind all others. Total and deterministic, whatever the input's order."""
    shunned = frozenset(avoid)
    scores = [score_of(option.candidate, shunned) for option in options]
    return tuple(options[index] for index in order(request_id, scores, knobs, draw))


def score_of(candidate: Candidate, shunned: frozenset[str]) -> Score:
    """A candidate's place before near ties are drawn."""
    return (
        candidate.worker in shunned,
        candidate.ttft_ms,
        candidate.worker,
        candidate.tier,
        candidate.cached_tokens,
        candidate.fingerprint,
    )


def prefill_cost(table: Sequence[PrefillCost], context: int, knobs: PolicyKnobs = POLICY_KNOBS) -> float:
    """Measured ms per token at a context of this many tokens (tables ascend; beyond the last bucket, its value)."""
    for bucket in table:
        if context <= bucket.up_to_tokens:
            return bucket.ms_per_token
    return table[-1].ms_per_token if table else knobs.default_prefill_ms_per_token


def decode_cost(table: Sequence[DecodeCost], lanes: int, knobs: PolicyKnobs = POLICY_KNOBS) -> float:
    """Measured ms of a decode step over this many lanes."""
    for bucket in table:
        if lanes <= bucket.lanes:
            return bucket.step_ms
    return table[-1].step_ms if table else knobs.default_first_token_ms
