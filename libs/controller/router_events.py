"""What can happen to a router: the only input of `router.RouterMachine`, besides the time.

The shell turns frames, timers, plans and lost connections into these. Events from outside (replies, deltas, results,
losses) may be late, repeated or about things long over: the machine fences and counts them. Events the shell makes
itself (`Planned`, timers) are fenced by the numbers they carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from libs.controller.policy import BY_REQUEST, Draw
from libs.controller.protocol import (
    AssignmentId,
    Delta,
    OfferReply,
    Pruned,
    RankedCandidate,
    Result,
    StatusCode,
    Submission,
)


class Loss(Enum):
    """How a worker process became unavailable. The first two are losses against its requests."""

    PROCESS = "process"  # the epoch's last tunnel broke
    SILENCE = "silence"  # its heartbeats expired
    RETIRED = "retired"  # it left in order: drained, replaced, or unlisted beyond the grace period


class ObstacleKind(Enum):
    """Why a plan has no candidate. `code` is the status if nothing can change it; None = waiting may help."""

    UNKNOWN_MODEL = "unknown-model"
    TOO_LONG = "too-long"
    NO_WORKER = "no-worker"
    NO_COVERAGE = "no-coverage"  # as NO_WORKER, where waiting (longer) is not wanted
    NO_CAPACITY = "no-capacity"
    CATALOG_AWAY = "catalog-away"

    @property
    def code(self) -> StatusCode | None:
        """NOT_FOUND or INVALID_ARGUMENT for the two that never become feasible, UNAVAILABLE for one given up."""
        return _ENDS.get(self)


_ENDS = {
    ObstacleKind.UNKNOWN_MODEL: StatusCode.NOT_FOUND,
    ObstacleKind.TOO_LONG: StatusCode.INVALID_ARGUMENT,
    ObstacleKind.NO_COVERAGE: StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why nothing is feasible, for a human in `detail` (values and remedy, no tenant data)."""

    kind: ObstacleKind
    detail: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Others compute a prefix that this request would compute anew: it had better wait and fetch it (`holding`).

    `prefix`: its name, of `tokens` tokens; `leaders`: the processes (worker, epoch) that compute it, or have it where
    nobody can fetch it yet; `wait_ms`: how long this is worth waiting for now, `alone_ms`: for a request in all.
    """

    prefix: str
    tokens: int
    leaders: tuple[tuple[str, int], ...]
    wait_ms: float
    alone_ms: float


@dataclass(frozen=True, slots=True)
class Herd:
    """What is known of a request that was held when it is planned anew: for which prefix, the seat it was dealt among
    those held for it here, and how much longer it may be held (0 = no longer).
    """

    prefix: str
    tokens: int
    seat: int
    patience_ms: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of planning one attempt: candidates best first, or the obstacle. Exactly one of the two is empty.

    `partial`: the catalog was not asked, and only who has the prefix in its pages is ranked. When they are used up, a
    whole plan is made before anything else. `revision`: of the catalog's facts it is made from; 0 = from memory.
    `hold`: why none of the candidates should be asked yet; `leads`: the best of them computes a long prefix that others
    may come to wait for; `draw`: how near ties were drawn.
    """

    ranked: tuple[RankedCandidate, ...] = ()
    pruned: tuple[Pruned, ...] = ()
    obstacle: Obstacle | None = None
    partial: bool = False
    revision: int = 0
    hold: Hold | None = None
    leads: bool = False
    draw: Draw = BY_REQUEST


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request arrived. `origin` is an opaque number of the shell (its route), echoed in every `Deliver`."""

    submission: Submission
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to `PlanRequested` with the same numbers."""

    request_id: str
    plan_id: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    """An offer was answered."""

    worker: str
    reply: OfferReply


@dataclass(frozen=True, slots=True)
class DeltaReceived:
    """Tokens arrived."""

    worker: str
    delta: Delta


@dataclass(frozen=True, slots=True)
class ResultReceived:
    """An assignment ended, as its worker says."""

    worker: str
    result: Result


@dataclass(frozen=True, slots=True)
class WorkerUnavailable:
    """A worker process is gone for this router (raised by the discovery registry)."""

    worker: str
    epoch: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class RouteDropped:
    """The assignment's route ended without a result (its tunnel was lost or retired, or it was too slow): no loss."""

    assignment: AssignmentId
    worker: str
    epoch: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OfferTimedOut:
    """The timer of one offer fired."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class HoldExpired:
    """The timer of a request that is held for a prefix fired. `plan_id`: of the plan that held it."""

    request_id: str
    plan_id: int


@dataclass(frozen=True, slots=True)
class PrefixesReported:
    """A worker process told news of prefixes that requests are held for: they are in its memory, or are not coming."""

    worker: str
    epoch: int
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The request's deadline timer fired. `origin` names the submission."""

    request_id: str
    origin: int


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The requester gave up or its tunnel was lost. `origin` None = whoever submitted it (the Cancel call)."""

    request_id: str
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class CapacityFreed:
    """A worker has room for up to `slots` more assignments. Level-triggered: fed at every heartbeat that shows room."""

    slots: int = 1


RouterEvent = (
    Submitted
    | Planned
    | ReplyReceived
    | DeltaReceived
    | ResultReceived
    | WorkerUnavailable
    | RouteDropped
    | OfferTimedOut
    | HoldExpired
    | PrefixesReported
    | DeadlineReached
    | RequestCancelled
    | CapacityFreed
)
