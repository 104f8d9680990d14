"""Recorded decisions as plain values, and the words a person filters them by. Pure."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import common_pb2

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def _words(enum: Any, prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix).lower().replace("_", "-"): number for name, number in enum.items()}


OUTCOMES = {word: n for word, n in _words(pb.AttemptOutcome, "ATTEMPT_OUTCOME_").items() if n}
DECLINES = {word: n for word, n in _words(common_pb2.DeclineReason, "DECLINE_REASON_").items() if n}
_OUTCOME_WORDS = {number: word for word, number in OUTCOMES.items()}
_DECLINE_WORDS = {number: word for word, number in DECLINES.items()}
_TIER_WORDS = {number: word for word, number in _words(common_pb2.Tier, "TIER_").items()}


def outcome_word(attempt: pb.DecisionAttempt) -> str:
    """completed, timed-out, declined …"""
    return _OUTCOME_WORDS.get(attempt.outcome, "unknown")


def decline_word(attempt: pb.DecisionAttempt) -> str:
    """queue-full …; empty if the worker did not decline."""
    return _DECLINE_WORDS.get(attempt.decline, "unknown") if attempt.decline else ""


def tier_word(candidate: common_pb2.Candidate) -> str:
    """gpu, ram, …; none = recompute."""
    return _TIER_WORDS.get(candidate.tier, "unknown")


def reason_of(word: str) -> tuple[int, int]:
    """(outcome, decline reason), one of them 0. Raises ValueError, which lists the words."""
    wanted = word.lower().replace("_", "-")
    if not wanted:
        return 0, 0
    if wanted in OUTCOMES:
        return OUTCOMES[wanted], 0
    if wanted in DECLINES:
        return 0, DECLINES[wanted]
    raise ValueError(f"{word!r} is no reason: give one of {', '.join([*OUTCOMES, *DECLINES])}")


def moment_of(text: str, now_ms: int) -> int:
    """Unix ms of `15m` (ago; s, m, h, d) or of an ISO 8601 time (local, unless it says otherwise); 0 of nothing.

    Raises ValueError.
    """
    if not text:
        return 0
    span = _SPAN.fullmatch(text)
    if span:
        return max(1, now_ms - round(float(span[1]) * _UNITS[span[2]] * 1_000))
    try:
        return round(dt.datetime.fromisoformat(text).timestamp() * 1_000)
    except ValueError:
        raise ValueError(f"{text!r} is no time: give a span such as 90s, 15m, 2h, 3d, or an ISO 8601 time") from None


def time_text(unix_ms: int) -> str:
    """Local time to the millisecond."""
    return dt.datetime.fromtimestamp(unix_ms / 1_000).isoformat(" ", "milliseconds")


def plain(record: pb.DecisionRecord) -> dict[str, Any]:
    """Everything in it. Times in ms; a term as recorded in full precision where it was."""
    return {
        "request_id": record.request_id,
        "plan_id": record.plan_id,
        "decided_ms": record.decided_ms,
        "router": record.router,
        "model": record.model,
        "fingerprint": record.fingerprint,
        "worker": record.worker,
        "prompt_tokens": record.prompt_tokens,
        "resumed_at": record.resumed_at,
        "facts_revision": record.facts_revision,
        "avoid": list(record.avoid),
        "drawn_by": record.drawn_by,
        "seat": record.seat,
        "band_ms": record.band_ms,
        "draw_tokens": record.draw_tokens,
        "held_ms": record.held_ms,
        "attempts": [_attempt(attempt) for attempt in record.attempts],
        "ranked": [_candidate(record, place) for place in range(len(record.ranked))],
        "pruned": {one.reason: one.count for one in record.pruned},
    }


def _attempt(attempt: pb.DecisionAttempt) -> dict[str, Any]:
    usage, timings = attempt.usage, attempt.timings
    return {
        "attempt": attempt.attempt,
        "choice": attempt.choice,
        "outcome": outcome_word(attempt),
        "decline": decline_word(attempt),
        "detail": attempt.detail,
        "predicted_ttft_ms": attempt.predicted_ttft_ms,
        "measured_ttft_ms": attempt.measured_ttft_ms if attempt.HasField("measured_ttft_ms") else None,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "restored_tokens": usage.restored_tokens,
            "computed_tokens": usage.computed_tokens,
            "generated_tokens": usage.generated_tokens,
        },
        "timings": {field.name: getattr(timings, field.name) for field in timings.DESCRIPTOR.fields},
    }


def _candidate(record: pb.DecisionRecord, place: int) -> dict[str, Any]:
    candidate = record.ranked[place]
    row = {field.name: getattr(candidate, field.name) for field in candidate.DESCRIPTOR.fields}
    row["tier"] = tier_word(candidate)
    if place < len(record.terms):
        terms = record.terms[place]
        row |= {field.name: getattr(terms, field.name) for field in terms.DESCRIPTOR.fields}
    return row
