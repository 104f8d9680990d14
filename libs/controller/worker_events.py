"""What can happen to a worker's controller: the only input of `worker.WorkerMachine`, besides the time.

Offers, cancels and lost tunnels come from outside and may be late or repeated: fenced and counted. The others come from
the worker's own page pool, restore and runtime; one that is impossible in the assignment's phase is a bug of ours and
raises `errors.ControllerBugError`, unless the assignment is fenced or gone, when late local events are normal.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    DeclineReason,
    FinishReason,
    Offer,
    Pages,
    TierTokens,
    TokenLogprobs,
)

NO_PAGES = Pages()


@dataclass(frozen=True, slots=True)
class OfferReceived:
    """An offer arrived on `tunnel` (opaque number of the shell; direct calls have their own).

    `queue_ms`: the wait for a lane predicted now. `pages`: as they are now.
    """

    offer: Offer
    tunnel: int
    queue_ms: float = 0.0
    pages: Pages = NO_PAGES


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """A cancel arrived."""

    cancel: Cancel


@dataclass(frozen=True, slots=True)
class ReservationMade:
    """The pool reserved the whole demand. `resident_tokens` of the prefix are in device pages already, protected."""

    assignment: AssignmentId
    resident_tokens: int
    queue_ms: float = 0.0
    pages: Pages = NO_PAGES


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """The pool reserved nothing; `reason` is INSUFFICIENT_PAGES or PREFIX_GONE."""

    assignment: AssignmentId
    reason: DeclineReason
    detail: str = ""
    queue_ms: float = 0.0
    pages: Pages = NO_PAGES


@dataclass(frozen=True, slots=True)
class FetchStarted:
    """A fetch slot was free: the restore runs (its wait ends here). Optional."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """The restore's last upload event completed. `cached_tokens` are now in device pages, resident ones included."""

    assignment: AssignmentId
    cached_tokens: int
    restored: tuple[TierTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The restore gave up (a chunk gone, corrupt or late). What it did bring counts; the rest will be prefilled."""

    assignment: AssignmentId
    cached_tokens: int
    restored: tuple[TierTokens, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LaneGranted:
    """The run has a lane: its first prompt rows are submitted. Optional; `PrefillDone` implies it."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The whole input but the first drawn token is computed. `computed_tokens`: pending token included. `drawing_ms`:
    how much of the time since the lane was granted counts as the first token's, where one step did both. `behind_ms`:
    how much of it went to prompts that were there before, whose last rows shared a step with this one's first: a wait.
    """

    assignment: AssignmentId
    computed_tokens: int
    drawing_ms: float = 0.0
    behind_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokensDrawn:
    """The tokens one iteration drew for this assignment, in order."""

    assignment: AssignmentId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The run ended regularly; `Quiesced` follows."""

    assignment: AssignmentId
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RunFailed:
    """The run could not go on; `Quiesced` follows."""

    assignment: AssignmentId
    error: str


@dataclass(frozen=True, slots=True)
class Quiesced:
    """No local operation touches the assignment's pages any more (iteration or current chunk is over)."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class TunnelLost:
    """A tunnel broke: its assignments are cancelled at their next boundary."""

    tunnel: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Stop admission; `Drained` comes when the last assignment is gone."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """The grace period is over: what still runs is cancelled."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The process is another one (simulator) or learned its epoch: everything before is void."""

    epoch: int


WorkerEvent = (
    OfferReceived
    | CancelReceived
    | ReservationMade
    | ReservationRefused
    | FetchStarted
    | RestoreDone
    | RestoreFailed
    | LaneGranted
    | PrefillDone
    | TokensDrawn
    | Finished
    | RunFailed
    | Quiesced
    | TunnelLost
    | DrainRequested
    | DrainExpired
    | Restarted
)
