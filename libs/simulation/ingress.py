"""The ingress: submits asks, follows what is delivered, and submits again through another router when one is lost.

As the live one: the request's id stays, what was delivered goes along with the variant that produced it, the deadline
is what remains. It gives a request up by itself only when its deadline passed and no router was there to say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from libs.controller.protocol import (
    CancelledDelivery,
    CompletedDelivery,
    Delivery,
    ErrorDelivery,
    Submission,
    TokensDelivery,
)
from libs.simulation import declared
from libs.simulation.schedule import Ask

if TYPE_CHECKING:
    from libs.simulation.world import World

_RETRY_MS = 50.0
SLACK_MS = 1_500.0  # past its deadline: the way from the router, with the delays that are on it


@dataclass(slots=True, eq=False)
class Call:
    """One ask and what came of it."""

    ask: Ask
    delivered: list[int] = field(default_factory=list)
    origin: int = 0  # of the current submission; 0 = none
    router: str = ""
    boot: int = 0
    submissions: int = 0
    fingerprint: str = ""
    cancelled: bool = False
    outcome: str = ""  # completed, cancelled, an error's code, or nobody
    terminal: Delivery | None = None
    first_ms: float | None = None
    ended_ms: float | None = None


class Ingress:
    """The only one; `calls` by ask."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls = {ask.name: Call(ask) for ask in world.schedule.asks}
        self.open = len(self.calls)
        self._origins = 0
        self._by_origin: dict[int, Call] = {}
        self.extra: set[int] = set()  # origins of submissions made by mistake

    def start(self) -> None:
        """Plans every ask's arrival."""
        for call in self.calls.values():
            self.world.agenda.at(call.ask.at_ms, self._arrive, call)

    def waits(self) -> tuple[float, ...]:
        """Times to first token, ms, of the asks that got one."""
        return tuple([call.first_ms - call.ask.at_ms for call in self.calls.values() if call.first_ms is not None])

    def _arrive(self, call: Call) -> None:
        self._submit(call)
        self.world.agenda.after(call.ask.deadline_ms + SLACK_MS, self._give_up, call)

    def _submit(self, call: Call) -> None:
        if call.outcome:
            return
        if call.cancelled:
            self._ended(call, "cancelled", None)
            return
        left = call.ask.at_ms + call.ask.deadline_ms - self.world.agenda.now
        routers = self.world.routers
        names = [f"r{(call.ask.router + call.submissions + step) % len(routers)}" for step in range(len(routers))]
        alive = [name for name in names if routers[name].alive]
        if left < 1.0:
            return  # `_give_up` will say so
        if not alive:
            self.world.agenda.after(_RETRY_MS, self._submit, call)
            return
        self._origins += 1
        call.origin, call.router, call.submissions = self._origins, alive[0], call.submissions + 1
        call.boot = routers[alive[0]].boot
        self._by_origin[call.origin] = call
        self._send(call, call.origin, left)

    def again(self, name: str) -> None:
        """The same once more, by mistake, on the same stream."""
        call = self.calls[name]
        if call.origin and not call.outcome:
            self._origins += 1
            self._by_origin[self._origins] = call
            self.extra.add(self._origins)
            self._send(call, self._origins, call.ask.at_ms + call.ask.deadline_ms - self.world.agenda.now)

    def _send(self, call: Call, origin: int, left_ms: float) -> None:
        request = declared.request(call.ask, tuple(call.delivered), int(left_ms))
        submission = Submission(request, len(call.delivered), call.fingerprint)
        router = self.world.routers[call.router]
        self.world.watch.submitted(router, origin, submission)
        self.world.links.of("ingress", call.router).send(router.submit, submission, origin, call.boot, once=True)

    def cancel(self, name: str) -> None:
        """The client leaves."""
        call = self.calls[name]
        if call.outcome or call.cancelled:
            return
        call.cancelled = True
        if call.origin:
            router = self.world.routers[call.router]
            self.world.links.of("ingress", call.router).send(router.cancel, name, call.origin, call.boot, once=True)

    def router_gone(self, name: str) -> None:
        """A router process died: noticed a little later."""
        self.world.agenda.after(
            self.world.schedule.settings.latency_ms, self._resubmit, name, self.world.routers[name].boot
        )

    def attach_lost(self, name: str) -> None:
        """The stream to a router broke; both live, and each notices."""
        router = self.world.routers[name]
        for call in self.calls.values():
            if call.router == name and call.origin and not call.outcome:
                self.world.agenda.after(1.0, router.cancel, call.ask.name, call.origin, call.boot)
        self._resubmit(name, router.boot)

    def _resubmit(self, name: str, boot: int) -> None:
        for call in self.calls.values():
            if call.router == name and call.boot == boot and call.origin and not call.outcome:
                call.origin = 0
                self._submit(call)

    def take(self, origin: int, delivery: Delivery) -> None:
        """A delivery arrived."""
        call = self._by_origin[origin]
        if call.origin != origin or call.outcome:
            return  # of a stream that is broken, or of a submission made by mistake
        if isinstance(delivery, TokensDelivery):
            self.world.watch.client_tokens(call, delivery)
            call.delivered.extend(delivery.tokens)
            call.fingerprint = delivery.fingerprint
            if call.first_ms is None:
                call.first_ms = self.world.agenda.now
            return
        match delivery:
            case CompletedDelivery():
                outcome = "completed"
            case CancelledDelivery():
                outcome = "cancelled"
            case ErrorDelivery():
                outcome = delivery.code.name
        self._ended(call, outcome, delivery)

    def _give_up(self, call: Call) -> None:
        if not call.outcome:
            self.world.watch.given_up(call)
            self._ended(call, "nobody", None)

    def _ended(self, call: Call, outcome: str, delivery: Delivery | None) -> None:
        call.outcome, call.terminal, call.ended_ms = outcome, delivery, self.world.agenda.now
        self.open -= 1
        self.world.watch.client_ended(call, delivery)
