"""What a router machine asks of its shell. The shell obeys, in order, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from libs.controller.policy import BY_REQUEST, Draw
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    Candidate,
    DeclineReason,
    Delivery,
    GenerationRequest,
    Offer,
    Pruned,
    RankedCandidate,
    Timings,
    Usage,
)
from libs.controller.router_events import Herd


class TimerKind(Enum):
    """Which event a timer turns into."""

    OFFER = "offer"  # OfferTimedOut(AssignmentId(request_id, number))
    DEADLINE = "deadline"  # DeadlineReached(request_id, origin=number)
    HOLD = "hold"  # HoldExpired(request_id, plan_id=number)


@dataclass(frozen=True, slots=True)
class TimerId:
    """Names a timer: OFFER's `number` is the attempt, DEADLINE's the origin, HOLD's the plan."""

    kind: TimerKind
    request_id: str
    number: int


class Outcome(Enum):
    """How one attempt ended, in a decision record."""

    COMPLETED = "completed"
    DECLINED = "declined"
    TIMED_OUT = "timed-out"
    WORKER_LOST = "worker-lost"
    WORKER_RETIRED = "worker-retired"
    ROUTE_DROPPED = "route-dropped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt in a decision: which candidate (index into `ranked`), how it ended, predicted and measured TTFT (ms).

    `measured_ttft_ms` is from the offer to the first delta as this router saw it; None if there was no delta.
    """

    attempt: int
    choice: int
    outcome: Outcome
    decline: DeclineReason
    detail: str
    predicted_ttft_ms: float
    measured_ttft_ms: float | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Decision:
    """One plan and what came of it: the fact `segue decisions` reads. No tokens, no salt."""

    request_id: str
    plan_id: int
    tenant: str
    model: str
    prompt_tokens: int
    resumed_at: int  # generated tokens delivered before this plan
    decided_ms: float  # the router's own clock
    ranked: tuple[RankedCandidate, ...]
    pruned: tuple[Pruned, ...]
    attempts: tuple[AttemptRecord, ...]
    avoid: tuple[str, ...] = ()  # workers that were ranked behind all others
    revision: int = 0  # of the catalog's facts it was made from; 0 = from memory
    draw: Draw = BY_REQUEST  # of near ties
    held_ms: float = 0.0  # how long the request had been held for a prefix before


@dataclass(frozen=True, slots=True)
class PlanRequested:
    """Plan this attempt and answer with `Planned`, always. `request` is as the attempt would run it (resume included).

    `fingerprint` pins the variant ("" = any of the name's); workers in `avoid` failed this request lately: rank them
    behind all others. `fresh` = ask the catalog for what is not known; False for a waiter that was planned before.
    `whole` = a partial plan led nowhere: none is wanted this time. `herd`: it was held for a prefix.
    """

    request_id: str
    plan_id: int
    request: GenerationRequest
    fingerprint: str
    avoid: tuple[str, ...]
    fresh: bool
    whole: bool = False
    herd: Herd | None = None


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Open a route to the worker and send the offer. If that cannot be done, feed `RouteDropped`."""

    worker: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Send on the assignment's route, or on any tunnel to that process; drop it if there is none."""

    worker: str
    cancel: Cancel


@dataclass(frozen=True, slots=True)
class CloseRoute:
    """The assignment is over for this router: nothing more is wanted from its route."""

    worker: str
    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Fire the timer's event after `after_ms`; setting it again replaces it."""

    timer: TimerId
    after_ms: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Drop the timer if it has not fired."""

    timer: TimerId


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand to the requester. Terminal deliveries (all but tokens) come exactly once per `Submitted`."""

    origin: int
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Append to the recorded facts."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Booked:
    """An offer occupies its worker from now on: the load ledger adds the candidate's work."""

    assignment: AssignmentId
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker took it: its next heartbeats contain it."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class Unbooked:
    """The assignment no longer occupies its worker."""

    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class Measured:
    """An attempt completed: prediction against measurement, for the corrections. `way_ms`: how much later than its
    worker measured it the first token was here (the offer's way, the answer's, both ends' delays): part of `timings`'
    first token.
    """

    candidate: Candidate
    usage: Usage
    timings: Timings
    way_ms: float = 0.0
    assignment: AssignmentId | None = None


RouterEffect = (
    PlanRequested
    | SendOffer
    | SendCancel
    | CloseRoute
    | SetTimer
    | CancelTimer
    | Deliver
    | RecordDecision
    | Booked
    | Accepted
    | Unbooked
    | Measured
)
