"""Fences: named guards that turn what is late, repeated or foreign into a counted no-op.

A machine asks `stops(name, condition)` at every such place and does nothing more if the answer is yes. The names are
enums, so that all of them can be listed, their counts exported, and each of them be taken away in a mutation run (by a
subclass of `Fence`) to see that a checker notices.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum


class RouterFence(Enum):
    """Why an event changed nothing at the router."""

    DUPLICATE_SUBMISSION = "duplicate-submission"
    UNKNOWN_REQUEST = "unknown-request"  # over, or never here
    OTHER_ORIGIN = "other-origin"  # about an earlier submission of the id
    STALE_PLAN = "stale-plan"
    STALE_ATTEMPT = "stale-attempt"  # not the active assignment
    WRONG_WORKER = "wrong-worker"  # the active assignment, from a worker that does not have it
    WRONG_EPOCH = "wrong-epoch"
    WRONG_PHASE = "wrong-phase"  # the table has no such transition
    MALFORMED_DELTA = "malformed-delta"  # no tokens, or another number of logprobs than of tokens
    DUPLICATE_DELTA = "duplicate-delta"
    OVERLAPPING_DELTA = "overlapping-delta"
    DELTA_GAP = "delta-gap"
    OVER_BUDGET = "over-budget"
    USAGE_MISMATCH = "usage-mismatch"  # counted only: a result that claims fewer tokens than were delivered


class WorkerFence(Enum):
    """Why an event changed nothing at the worker."""

    UNKNOWN_ASSIGNMENT = "unknown-assignment"
    WRONG_EPOCH = "wrong-epoch"
    FENCED = "fenced"  # a local event about an assignment that was cancelled or has ended
    NO_TUNNEL = "no-tunnel"  # a lost tunnel without assignments
    ALREADY_DRAINING = "already-draining"
    NOT_DRAINING = "not-draining"


FenceName = RouterFence | WorkerFence


class Fence:
    """Counts by (event, fence)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, FenceName]] = Counter()

    def stops(self, name: FenceName, condition: bool, event: object) -> bool:
        """Whether `event` must be ignored; counts it if so."""
        if condition:
            self.count(name, event)
        return condition

    def count(self, name: FenceName, event: object) -> None:
        """Counts without asking."""
        self.counts[type(event).__name__, name] += 1
