"""The interpreter of the router machine: events in, effects obeyed in order, nothing awaited.

Everything happens in plain synchronous calls on the event loop: `feed` hands an event to the machine and obeys its
effects before it returns. An event that arises while effects are being obeyed (an offer that could not be sent) waits
its turn behind them, so that the order the machine asked for is the order things happen in. What takes time is started
here and reports back as another event: a plan, an offer's route, a timer.

An exception in here means that shell or machine broke the contract; the process ends (and is restarted) rather than
going on with a state nobody has thought through.

An offer's timer measures its worker. If this loop is late when it fires, answers may lie unread: what the loop was late
by is given to the worker on top, in all as much again as it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from libs.controller.inbox import Inbox
from libs.controller.protocol import AssignmentId
from libs.controller.router import RouterMachine
from libs.controller.router_effects import (
    Accepted,
    Booked,
    CancelTimer,
    CloseRoute,
    Deliver,
    Measured,
    PlanRequested,
    RecordDecision,
    RouterEffect,
    SendCancel,
    SendOffer,
    SetTimer,
    TimerId,
    TimerKind,
    Unbooked,
)
from libs.controller.router_events import DeadlineReached, HoldExpired, OfferTimedOut, RouterEvent
from services.router.clock import now_ms

_LATE_S = 0.02
"""By which a loop that is not busy may be late."""


@dataclass(frozen=True)
class Ports:
    """Who obeys which effect. None of them awaits or raises what the outside could cause."""

    plan: Callable[[PlanRequested], None]
    offer: Callable[[SendOffer], None]
    cancel: Callable[[SendCancel], None]
    close: Callable[[CloseRoute], None]
    deliver: Callable[[Deliver], None]
    record: Callable[[RecordDecision], None]
    account: Callable[[Booked | Accepted | Unbooked | Measured], None]


class Shell:
    """See the module. `crashed` is told of a broken contract, once."""

    def __init__(self, machine: RouterMachine, crashed: Callable[[BaseException], None]) -> None:
        self.machine = machine
        self.ports: Ports | None = None
        self._crashed = crashed
        self._inbox = Inbox(self._handle)
        self._timers: dict[TimerId, asyncio.TimerHandle] = {}
        self._stopped = False

    @property
    def timers(self) -> int:
        """Timers that run."""
        return len(self._timers)

    @property
    def stopped(self) -> bool:
        """Whether nothing is handled any more."""
        return self._stopped

    def feed(self, event: RouterEvent) -> None:
        """Lets the machine handle the event and obeys it; from within an effect, afterwards."""
        if self._stopped:
            return
        self._inbox.feed(event)

    def _handle(self, event: RouterEvent) -> None:
        try:
            for effect in self.machine.handle(event, now_ms()):
                self._obey(effect)
        except BaseException as error:
            self.stop()
            self._crashed(error)
            raise

    def stop(self) -> None:
        """The end: no event changes anything any more, no timer fires."""
        self._stopped = True
        self._inbox.clear()
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()

    def _obey(self, effect: RouterEffect) -> None:
        ports = self.ports
        assert ports is not None, "the shell is fed before it is connected"
        match effect:
            case PlanRequested():
                ports.plan(effect)
            case SendOffer():
                ports.offer(effect)
            case SendCancel():
                ports.cancel(effect)
            case CloseRoute():
                ports.close(effect)
            case Deliver():
                ports.deliver(effect)
            case RecordDecision():
                ports.record(effect)
            case SetTimer():
                self._set(effect)
            case CancelTimer():
                self._unset(effect.timer)
            case Booked() | Accepted() | Unbooked() | Measured():
                ports.account(effect)

    def _set(self, effect: SetTimer) -> None:
        self._unset(effect.timer)
        after_s = effect.after_ms / 1_000
        self._start(effect.timer, after_s, after_s)

    def _start(self, timer: TimerId, after_s: float, more_s: float) -> None:
        """`more_s`: by which it may be prolonged."""
        loop = asyncio.get_running_loop()
        due = loop.time() + after_s
        self._timers[timer] = loop.call_at(due, self._fire, timer, due, more_s)

    def _unset(self, timer: TimerId) -> None:
        handle = self._timers.pop(timer, None)
        if handle is not None:
            handle.cancel()

    def _fire(self, timer: TimerId, due: float, more_s: float) -> None:
        del self._timers[timer]
        if timer.kind is TimerKind.OFFER:
            late_s = min(more_s, asyncio.get_running_loop().time() - due)
            if late_s > _LATE_S:
                self._start(timer, late_s, more_s - late_s)
                return
            self.feed(OfferTimedOut(AssignmentId(timer.request_id, timer.number)))
        elif timer.kind is TimerKind.HOLD:
            self.feed(HoldExpired(timer.request_id, timer.number))
        else:
            self.feed(DeadlineReached(timer.request_id, timer.number))
