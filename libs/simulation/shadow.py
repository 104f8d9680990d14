"""What a router's own effects have said so far: an account beside the machine, kept by other rules than its own.

From it follows for every event whether it concerns the active attempt of a live request, hence whether it must change
something or may change nothing (invariant 3), and what must be under way for a request that has not ended
(invariant 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from libs.controller import router_events as rx
from libs.controller.protocol import AssignmentId, Submission, TokensDelivery
from libs.controller.router import RouterMachine
from libs.controller.router_effects import (
    Accepted,
    CancelTimer,
    Deliver,
    PlanRequested,
    RouterEffect,
    SendCancel,
    SendOffer,
    SetTimer,
    TimerId,
    TimerKind,
    Unbooked,
)
from libs.controller.router_table import Phase


class Weight(Enum):
    """What an event may do."""

    ANY = "any"
    COUNTS = "counts"  # it must change something
    CANCELS = "cancels"  # exactly one cancel may follow: somebody runs for nobody
    NOTHING = "nothing"
    REFUSED = "refused"  # a terminal delivery for its own origin, and no more


@dataclass(slots=True)
class Active:
    """The active attempt."""

    assignment: AssignmentId
    worker: str
    epoch: int
    answered: bool = False


@dataclass(slots=True)
class Shadow:
    """Of one router process."""

    live: dict[str, int] = field(default_factory=dict)  # request -> origin
    submitted: dict[int, Submission] = field(default_factory=dict)
    active: dict[str, Active] = field(default_factory=dict)
    attempts: dict[tuple[str, int], int] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)  # request -> plan under way
    planned: dict[str, int] = field(default_factory=dict)  # request -> its newest plan
    delivered: dict[int, int] = field(default_factory=dict)  # tokens, by origin
    timers: dict[TimerId, None] = field(default_factory=dict)
    holds: dict[str, rx.Hold] = field(default_factory=dict)  # request -> why its newest plan would hold it
    alone_ms: dict[str, float] = field(default_factory=dict)  # request -> as it was said when it was held first
    led: dict[TimerId, rx.Hold] = field(default_factory=dict)  # timers of those that are held for a prefix
    dropped: dict[tuple[str, int], None] = field(default_factory=dict)  # processes that lost a route in use

    def weigh(self, event: rx.RouterEvent) -> Weight:
        """What the event, not yet handled, may do."""
        match event:
            case rx.DeltaReceived():
                delta = event.delta
                if not self._own(event.worker, delta.assignment, delta.epoch):
                    return Weight.NOTHING
                origin = self.live[delta.assignment.request_id]
                submission = self.submitted[origin]
                count, sent = len(delta.tokens), self.delivered.get(origin, 0)
                due = submission.delivered + sent
                fits = 0 < count <= submission.request.max_new_tokens - sent
                good = delta.index == due and fits and len(delta.logprobs) in (0, count)
                return Weight.COUNTS if good else Weight.NOTHING
            case rx.ReplyReceived():
                reply = event.reply
                active = self._own(event.worker, reply.assignment, reply.epoch)
                if active is not None:
                    return Weight.NOTHING if active.answered else Weight.COUNTS
                return Weight.CANCELS if reply.accepted and not self._is_active(reply.assignment) else Weight.NOTHING
            case rx.ResultReceived():
                own = self._own(event.worker, event.result.assignment, event.result.epoch)
                return Weight.COUNTS if own else Weight.NOTHING
            case rx.RouteDropped():
                return Weight.COUNTS if self._own(event.worker, event.assignment, event.epoch) else Weight.NOTHING
            case rx.OfferTimedOut():
                active = self.active.get(event.assignment.request_id)
                mine = active is not None and active.assignment == event.assignment and not active.answered
                return Weight.COUNTS if mine else Weight.NOTHING
            case rx.HoldExpired():
                timer = TimerId(TimerKind.HOLD, event.request_id, event.plan_id)
                return Weight.COUNTS if timer in self.timers else Weight.NOTHING
            case rx.Planned():
                return Weight.COUNTS if self.wanted.get(event.request_id) == event.plan_id else Weight.NOTHING
            case rx.RequestCancelled():
                origin_of = self.live.get(event.request_id)
                mine = origin_of is not None and event.origin in (None, origin_of)
                return Weight.COUNTS if mine else Weight.NOTHING
            case rx.DeadlineReached():
                return Weight.COUNTS if self.live.get(event.request_id) == event.origin else Weight.NOTHING
            case rx.Submitted():
                taken = event.submission.request.request_id in self.live
                return Weight.REFUSED if taken else Weight.COUNTS
            case rx.WorkerUnavailable():
                if self.at(event.worker, event.epoch):
                    return Weight.COUNTS
                process = (event.worker, event.epoch)
                return Weight.ANY if process in self.dropped or self.led_by(process) else Weight.NOTHING
        return Weight.ANY

    def at(self, worker: str, epoch: int) -> list[Active]:
        """Active attempts at one process."""
        return [one for one in self.active.values() if one.worker == worker and one.epoch == epoch]

    def led_by(self, process: tuple[str, int]) -> list[str]:
        """Requests that are held for what this process computes."""
        return [timer.request_id for timer, hold in self.led.items() if process in hold.leaders]

    def _own(self, worker: str, assignment: AssignmentId, epoch: int) -> Active | None:
        active = self.active.get(assignment.request_id)
        if active is None or active.assignment != assignment or active.worker != worker or active.epoch != epoch:
            return None
        return active

    def _is_active(self, assignment: AssignmentId) -> bool:
        active = self.active.get(assignment.request_id)
        return active is not None and active.assignment == assignment

    def concerned(self, event: rx.RouterEvent) -> list[Active]:
        """Active attempts that the event, if it counts, ends without their worker saying so."""
        match event:
            case rx.OfferTimedOut() | rx.RouteDropped():
                active = self.active.get(event.assignment.request_id)
            case rx.RequestCancelled() | rx.DeadlineReached():
                active = self.active.get(event.request_id)
            case rx.WorkerUnavailable():
                return self.at(event.worker, event.epoch)
            case _:
                return []
        return [active] if active is not None else []

    def note(self, event: rx.RouterEvent) -> None:
        """The event is being handled."""
        match event:
            case rx.Submitted():
                origin = event.origin
                self.submitted[origin] = event.submission
                self.live.setdefault(event.submission.request.request_id, origin)
            case rx.Planned():
                if self.wanted.get(event.request_id) == event.plan_id:
                    del self.wanted[event.request_id]
                    if event.plan.hold is not None:
                        self.holds[event.request_id] = event.plan.hold
            case rx.OfferTimedOut():
                timer = TimerId(TimerKind.OFFER, event.assignment.request_id, event.assignment.attempt)
                self.timers.pop(timer, None)
            case rx.RouteDropped():
                self.dropped[event.worker, event.epoch] = None
            case rx.HoldExpired():
                timer = TimerId(TimerKind.HOLD, event.request_id, event.plan_id)
                self.timers.pop(timer, None)
                self.led.pop(timer, None)
            case rx.DeadlineReached():
                self.timers.pop(TimerId(TimerKind.DEADLINE, event.request_id, event.origin), None)

    def apply(self, effect: RouterEffect) -> str:
        """An effect was asked for; what is wrong with that, if anything."""
        match effect:
            case SetTimer():
                self.timers[effect.timer] = None
                if effect.timer.kind is TimerKind.HOLD:
                    hold = self.holds.pop(effect.timer.request_id, None)
                    if hold is None:
                        return f"{effect.timer} is set and no plan says that it is to be held"
                    alone_ms = self.alone_ms.setdefault(effect.timer.request_id, hold.alone_ms)
                    if effect.after_ms > alone_ms:
                        return f"{effect.timer} is set to {effect.after_ms} ms, computing alone took {alone_ms}"
                    self.led[effect.timer] = hold
            case CancelTimer():
                self.timers.pop(effect.timer, None)
                self.led.pop(effect.timer, None)
            case PlanRequested():
                self.wanted[effect.request_id] = self.planned[effect.request_id] = effect.plan_id
            case SendOffer():
                offer = effect.offer
                key = offer.assignment
                if key.request_id in self.active:
                    return f"{key} is offered while {self.active[key.request_id].assignment} is active"
                life = (key.request_id, self.live.get(key.request_id, -1))
                if key.attempt <= self.attempts.get(life, 0):
                    return f"{key} does not grow"
                self.attempts[life] = key.attempt
                self.active[key.request_id] = Active(key, effect.worker, offer.epoch)
            case Accepted():
                active = self.active.get(effect.assignment.request_id)
                if active is None or active.assignment != effect.assignment:
                    return f"{effect.assignment} counts as accepted and is not active"
                active.answered = True
            case Unbooked():
                if not self._is_active(effect.assignment):
                    return f"{effect.assignment} ends and is not active"
                del self.active[effect.assignment.request_id]
            case Deliver():
                if not isinstance(effect.delivery, TokensDelivery):
                    name = effect.delivery.request_id
                    if self.live.get(name) == effect.origin:
                        del self.live[name]
                        self.wanted.pop(name, None)
                        self.planned.pop(name, None)
                        self.holds.pop(name, None)
                        self.alone_ms.pop(name, None)
            case _:
                pass
        return ""

    def stalled(self, machine: RouterMachine, request_id: str) -> str:
        """Why nothing will ever happen to a live request, if so."""
        origin = self.live.get(request_id)
        if origin is None:
            return ""
        phase = machine.phase(request_id)
        active = self.active.get(request_id)
        if TimerId(TimerKind.DEADLINE, request_id, origin) not in self.timers:
            return f"{request_id} has no deadline timer"
        if phase is Phase.DONE:
            return f"{request_id} is forgotten without an end"
        if (phase is Phase.PLANNING) != (request_id in self.wanted):
            return f"{request_id} is {phase.value}, its plan is{'' if request_id in self.wanted else ' not'} under way"
        if (phase in (Phase.OFFERED, Phase.ACCEPTED, Phase.STREAMING)) != (active is not None):
            return f"{request_id} is {phase.value} with {'an' if active else 'no'} active attempt"
        if phase is Phase.HELD:
            # A prefix is waited for by a timer; a window opens by somebody's answer or plan.
            timed = any(timer.kind is TimerKind.HOLD and timer.request_id == request_id for timer in self.timers)
            asked = any(not one.answered for one in self.active.values())
            if not timed and not asked and not self.wanted:
                return f"{request_id} is held, no timer runs, and nobody is asked or planned"
        if phase is Phase.OFFERED and active is not None:
            timer = TimerId(TimerKind.OFFER, request_id, active.assignment.attempt)
            if timer not in self.timers:
                return f"{active.assignment} is offered and no timer runs"
        return ""


def cancels(effects: list[RouterEffect], assignment: AssignmentId) -> bool:
    """Whether the effects tell the worker."""
    return any(isinstance(effect, SendCancel) and effect.cancel.assignment == assignment for effect in effects)
