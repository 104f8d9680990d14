"""Everything that happens passes here on its way to the invariants; counts what was reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libs.controller import router_events as rx
from libs.controller import worker_events as wx
from libs.controller.discovery import DiscoveryEffect
from libs.controller.protocol import AssignmentId, Delivery, Heartbeat, Submission, TokensDelivery
from libs.controller.router_effects import Deliver, PlanRequested, RouterEffect, SendOffer
from libs.controller.router_table import Phase
from libs.controller.worker_effects import WorkerEffect
from libs.simulation.ingress import Call
from libs.simulation.invariants import (
    DeclaredTokens,
    DurableFacts,
    FleetSurvives,
    NewestWord,
    OneEnd,
    OnlyTheActive,
    PageAccounts,
    PagesInUse,
    PagesPromised,
)
from libs.simulation.links import Tunnel
from libs.simulation.pages import State
from libs.simulation.shadow import Shadow, Weight
from libs.simulation.violations import ViolationError
from libs.simulation.worker_shadow import WorkerShadow

if TYPE_CHECKING:
    from libs.simulation.router_node import RouterNode
    from libs.simulation.worker_node import WorkerNode
    from libs.simulation.world import World


class Watch:
    """Of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.one_end, self.tokens, self.active = OneEnd(), DeclaredTokens(), OnlyTheActive()
        self.accounts, self.in_use, self.durable = PageAccounts(), PagesInUse(), DurableFacts()
        self.promised, self.newest, self.fleet = PagesPromised(), NewestWord(), FleetSurvives()
        self.shadows: dict[str, Shadow] = {}
        self.worker_shadows: dict[str, WorkerShadow] = {}
        self._weights: dict[str, Weight] = {}
        self._moved: dict[str, None] = {}  # workers whose pages have changed in this step
        self._phase = Phase.DONE  # of the request whose plan is being answered
        self._events, self._effects = world.coverage.events, world.coverage.effects

    # --- routers ---

    def router_started(self, node: RouterNode) -> None:
        """A new process."""
        self.shadows[node.name] = Shadow()

    def router_gone(self, node: RouterNode) -> None:
        """A process died."""
        self.shadows[node.name] = Shadow()

    def submitted(self, node: RouterNode, origin: int, submission: Submission) -> None:
        """Ingress sends a submission; `before_router` will see it arrive."""

    def before_router(self, node: RouterNode, event: rx.RouterEvent) -> None:
        """It is about to be handled."""
        self._events[type(event)] += 1
        self._weights[node.name] = self.shadows[node.name].weigh(event)
        if isinstance(event, rx.Planned):
            self._phase = node.machine.phase(event.request_id)

    def after_router(self, node: RouterNode, event: rx.RouterEvent, effects: list[RouterEffect]) -> None:
        """It was handled; the effects are about to be obeyed."""
        shadow, weight = self.shadows[node.name], self._weights[node.name]
        self.active.handled(shadow, weight, event, effects)
        before = [active.assignment for active in shadow.concerned(event)] if weight is Weight.COUNTS else []
        if weight is Weight.COUNTS and isinstance(event, rx.ResultReceived):
            before.append(event.result.assignment)
        if weight is Weight.COUNTS and isinstance(event, rx.ReplyReceived) and not event.reply.accepted:
            before.append(event.reply.assignment)
        shadow.note(event)
        touched: dict[str, None] = {}
        for effect in effects:
            self._effects[type(effect)] += 1
            if isinstance(effect, Deliver):
                self.one_end.delivered(node, effect)
                self.tokens.router(shadow, self.world.asks, effect)
            elif isinstance(effect, PlanRequested):
                touched[effect.request_id] = None
            elif isinstance(effect, SendOffer):
                touched[effect.offer.assignment.request_id] = None
            wrong = shadow.apply(effect)
            if wrong:
                raise self.active.broken(wrong)
        self.active.over(shadow, event, before)
        match event:
            case rx.RequestCancelled() | rx.DeadlineReached():
                if weight is Weight.COUNTS and event.request_id in shadow.live:
                    raise self.one_end.broken(f"{event} did not end its request")
                touched[event.request_id] = None
            case rx.Planned():
                touched[event.request_id] = None
                if weight is Weight.NOTHING and node.machine.phase(event.request_id) is not self._phase:
                    raise self.active.broken(f"{event} moved its request")
            case rx.ReplyReceived():
                key = event.reply.assignment
                if weight is Weight.COUNTS and event.reply.accepted:
                    active = shadow.active.get(key.request_id)
                    if active is None or not active.answered:
                        raise self.active.broken(f"{event} was ignored")
                touched[key.request_id] = None
            case rx.ResultReceived():
                touched[event.result.assignment.request_id] = None
            case rx.DeltaReceived():
                if weight is Weight.COUNTS and not any(isinstance(effect, Deliver) for effect in effects):
                    raise self.active.broken(f"{event} was not delivered")
            case rx.WorkerUnavailable():
                for request_id in shadow.led_by((event.worker, event.epoch)):
                    raise self.one_end.broken(f"{request_id} is held for what {event.worker} computed, which is gone")
            case rx.HoldExpired():
                touched[event.request_id] = None
            case rx.OfferTimedOut() | rx.RouteDropped():
                touched[event.assignment.request_id] = None
            case rx.Submitted():
                touched[event.submission.request.request_id] = None
            case _:
                pass
        for request_id in touched:
            self.one_end.going(shadow, node, request_id)

    def heard(self, node: RouterNode, tunnel: Tunnel, beat: Heartbeat, effects: list[DiscoveryEffect]) -> None:
        """A heartbeat was handled by the registry."""
        self.newest.heard(node, tunnel, beat, effects)

    # --- clients ---

    def client_tokens(self, call: Call, delivery: TokensDelivery) -> None:
        """Tokens arrive."""
        self.tokens.client(call, delivery)

    def client_ended(self, call: Call, delivery: Delivery | None) -> None:
        """An end arrives."""
        self.tokens.ended(call, delivery)

    def given_up(self, call: Call) -> None:
        """None has, past the bound."""
        self.one_end.given_up(call)

    # --- workers ---

    def worker_started(self, name: str) -> None:
        """A new process, or one that is told that it is."""
        pool = self.world.workers[name].pool
        pool.journal.clear()
        self.accounts.states[name] = list(pool.state)
        self.in_use.started(name, pool.count)
        self.worker_shadows[name] = WorkerShadow(self.world.workers[name].spec)

    def worker_gone(self, name: str) -> None:
        """A process died with its pages."""
        self.in_use.started(name, self.world.workers[name].pool.count)

    def before_worker(self, node: WorkerNode, event: wx.WorkerEvent) -> None:
        """It is about to be handled."""
        self._events[type(event)] += 1

    def after_worker(self, node: WorkerNode, event: wx.WorkerEvent, effects: list[WorkerEffect]) -> None:
        """It was handled; the effects are about to be obeyed."""
        for effect in effects:
            self._effects[type(effect)] += 1
        self.worker_shadows[node.name].handled(node.name, event, effects)

    def op_holds(self, worker: str, operation: AssignmentId, pages: tuple[int, ...]) -> None:
        """An operation touches exactly these pages from now on."""
        self.in_use.holds(worker, operation, pages)

    def op_ends(self, worker: str, operation: AssignmentId) -> None:
        """An operation has quiesced."""
        self.in_use.ends(worker, operation)

    def releases(self, worker: str, assignment: AssignmentId) -> None:
        """An assignment's pages are about to be released."""
        self.in_use.releases(worker, assignment)

    def short_of_pages(self, worker: str, assignment: AssignmentId, detail: str) -> None:
        """A run found no page."""
        self.promised.short(worker, assignment, detail)

    def killed(self, worker: str, ask: str) -> None:
        """A request killed its worker."""
        self.fleet.kill(self.world.ingress.calls[ask])

    # --- every step ---

    def pages_move(self, name: str) -> None:
        """In this step some of a worker's pages will have changed."""
        self._moved[name] = None

    def after_step(self) -> None:
        """What changed in this step."""
        if self._moved:
            for name in self._moved:
                pool = self.world.workers[name].pool
                self.in_use.moved(name, pool)
                self.accounts.moved(name, pool)
                pool.journal.clear()
            self._moved.clear()
        if self.durable.version != self.world.catalog.version:
            self.durable.check(self.world.catalog, self.world.store)

    def at_rest(self) -> None:
        """Nothing is under way any more."""
        for call in self.world.ingress.calls.values():
            if not call.outcome:
                raise self.one_end.broken(f"{call.ask.name} never ended")
        for name, router in self.world.routers.items():
            machine = router.machine
            left = (len(machine), machine.waiting, machine.held, router.timers, len(router.routes))
            if any(left) or self.shadows[name].active:
                raise self.one_end.broken(f"{name} at rest has requests, waiters, held, timers, routes: {left}")
            booked = {view.worker: sorted(view.bookings) for view in router.fleet.views().values() if view.bookings}
            if booked:
                raise self.active.broken(f"{name} at rest has booked {booked}")
        for name, worker in self.world.workers.items():
            if len(worker.machine) or self.worker_shadows[name].known:
                raise self.active.broken(f"{name} at rest has {worker.machine.assignments()}")
            self.accounts.at_rest(name, worker.pool)
            if worker.alive and any(key[0] == name for key in self.in_use.operations):
                raise self.in_use.broken(f"{name} at rest has operations under way")


def bug(error: Exception) -> ViolationError:
    """A machine or the simulator contradicted itself."""
    return ViolationError("0 no contradiction", f"{type(error).__name__}: {error}")


__all__ = ["State", "Watch", "bug"]
