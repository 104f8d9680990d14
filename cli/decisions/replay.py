"""Runs the policy again on a recorded snapshot. Pure.

The snapshot is every ranked candidate with the terms its score was made of. Each is scored anew with today's formula
and the lot ranked with today's policy, from an order that has nothing of the recorded one; then choice, order and
scores must be those recorded. Candidates cut off behind the 64th cannot change the order of those that stayed: the
band of near ties only grows with a slower best, and within it the order is each worker's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from cli.decisions.records import tier_word
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.controller.knobs import POLICY_KNOBS
from libs.controller.policy import Draw, rank, ttft_ms
from libs.controller.protocol import Candidate, RankedCandidate
from libs.controller.wire_fields import from_proto

_SAME = 1e-9  # relative difference of scores that float arithmetic in another order may make


class NotReplayableError(ValueError):
    """The record lacks what the policy needs."""


class Kind(Enum):
    """What differs, gravest first."""

    CHOICE = "choice"  # another candidate comes first
    ORDER = "order"  # the same first, but others would be tried next
    SCORE = "score"  # the same order, from other scores


@dataclass(frozen=True, slots=True)
class Difference:
    """`detail`: what was recorded and what comes out now, in words."""

    kind: Kind
    detail: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """`order`: today's ranking as places in the record's `ranked`; `scores`: today's ttft, ms, by those places."""

    order: tuple[int, ...]
    scores: tuple[float, ...]
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def replay(record: pb.DecisionRecord) -> Replayed:
    """Raises NotReplayableError."""
    options = _snapshot(record)
    places = {id(option): place for place, option in enumerate(options)}
    # Neither the recorded order nor its reverse: what the policy does not decide must not look decided.
    shuffled = sorted(options, key=lambda option: (option.candidate.cached_tokens, -option.candidate.epoch))
    draw = Draw(record.drawn_by, record.seat, record.band_ms, record.draw_tokens)
    ranked = rank(record.request_id, shuffled, tuple(record.avoid), POLICY_KNOBS, draw)
    order = tuple(places[id(option)] for option in ranked)
    scores = tuple(option.candidate.ttft_ms for option in options)
    return Replayed(order, scores, tuple(_differences(record, order, scores)))


def _snapshot(record: pb.DecisionRecord) -> list[RankedCandidate]:
    if not record.ranked or not record.attempts:
        raise NotReplayableError("nothing was ranked, or nothing chosen")
    if len(record.terms) != len(record.ranked):
        raise NotReplayableError("its terms were not recorded in full precision: an older router's")
    options = []
    for shown, terms in zip(record.ranked, record.terms, strict=True):
        candidate = replace(
            from_proto(Candidate, shown),
            queue_ms=terms.queue_ms,
            load_ms=terms.load_ms,
            restore_ms=terms.restore_ms,
            prefill_ms_per_token=terms.prefill_ms_per_token,
            first_token_ms=terms.first_token_ms,
        )
        scored = replace(candidate, ttft_ms=ttft_ms(candidate))
        options.append(RankedCandidate(scored, (), terms.uncorrected_queue_ms))
    return options


def _differences(record: pb.DecisionRecord, order: tuple[int, ...], scores: tuple[float, ...]) -> list[Difference]:
    found: list[Difference] = []
    chosen = record.attempts[0].choice

    def name(place: int) -> str:
        candidate = record.ranked[place]
        was, now = record.terms[place].ttft_ms, scores[place]
        change = f"{was:.3f} ms" if was == now else f"{was:.3f} ms then, {now:.3f} ms now"
        return f"{candidate.worker} by {tier_word(candidate)} ({change})"

    if order[0] != chosen:
        found.append(Difference(Kind.CHOICE, f"chose {name(chosen)}, would choose {name(order[0])}"))
    else:
        first = next((i for i, place in enumerate(order) if place != i), None)
        if first is not None:
            detail = f"at place {first + 1} stood {name(first)}, would stand {name(order[first])}"
            found.append(Difference(Kind.ORDER, detail))
    for place, now in enumerate(scores):
        was = record.terms[place].ttft_ms
        if abs(was - now) > _SAME * max(abs(was), abs(now)):
            found.append(Difference(Kind.SCORE, f"{name(place)}"))
            break
    return found
