"""Interprets the router machine, the discovery registry and the fleet of one simulated router, under logical time.

Like the live shell: an event that arises while effects are being obeyed waits behind them. A router that dies comes
back as another process that knows nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from libs.controller import discovery
from libs.controller import router_events as rx
from libs.controller.errors import WireError
from libs.controller.fleet import Fleet
from libs.controller.inbox import Inbox
from libs.controller.knobs import DiscoveryKnobs, PolicyKnobs, RouterKnobs
from libs.controller.prefix_holds import news
from libs.controller.protocol import (
    AssignmentId,
    Candidate,
    DeclineReason,
    Delta,
    ElectTunnel,
    Heartbeat,
    OfferReply,
    Result,
    ResultStatus,
    SnapshotRequest,
    Submission,
    TunnelValue,
)
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
from libs.simulation import declared
from libs.simulation.links import Tunnel
from libs.simulation.planning import Planner

if TYPE_CHECKING:
    from libs.simulation.world import World


class RouterNode:
    """See the module."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = False
        self.boot = 0
        self.decisions = 0
        self.modest = False  # the next completion is made to claim nothing
        self.last_plan: rx.Planned | None = None
        self.stray: list[TimerId] = []  # timers that were cancelled
        self._inbox = Inbox(self._handle)
        self._timers: dict[TimerId, int] = {}
        self._ticket = 0
        self.routes: dict[AssignmentId, tuple[int, Candidate]] = {}  # open ones: tunnel, candidate
        self._carried: dict[AssignmentId, int] = {}  # routes that still carry a cancel: tunnel
        self.tunnels: dict[int, Tunnel] = {}
        self.machine, self.registry, self.fleet, self.planner = self._fresh()

    # --- process ---

    def _fresh(self) -> tuple[RouterMachine, discovery.Registry, Fleet, Planner]:
        settings, coverage = self.world.schedule.settings, self.world.coverage
        knobs = RouterKnobs(
            offer_timeout_ms=settings.offer_timeout_ms,
            offers_unanswered=settings.offers_unanswered,
            attempts=settings.attempts,
            queue=settings.queue,
            queue_per_tenant=settings.queue_per_tenant,
            prompt_rest_ms=settings.prompt_rest_ms,
        )
        machine = RouterMachine(knobs, fence=self.world.router_fence)
        machine.reached = coverage.router_reached
        registry = discovery.Registry(DiscoveryKnobs(settings.heartbeat_ms, settings.expiry_ms))
        registry.rejected = coverage.rejected
        fleet = Fleet(PolicyKnobs(prefix_copies=settings.prefix_copies, hold_least_ms=settings.hold_least_ms))
        return machine, registry, fleet, Planner(self.world, fleet)

    def start(self) -> None:
        """A new process; it dials every worker."""
        self.boot += 1
        self.alive = True
        self.machine, self.registry, self.fleet, self.planner = self._fresh()
        self._timers, self.routes, self._carried, self.tunnels, self.stray = {}, {}, {}, {}, []
        self.last_plan = None
        self.world.watch.router_started(self)
        self.world.agenda.after(self.world.schedule.settings.expiry_ms / 10, self._tick, self.boot)
        for worker in self.world.workers:
            self.world.dial(worker, self.name)

    def crash(self, down_ms: float) -> None:
        """The process is gone, at once."""
        if not self.alive:
            return
        self.alive = False
        self._inbox.clear()
        for tunnel in self.tunnels.values():
            tunnel.router_up = False
            self.world.break_for_worker(tunnel)
        self.world.watch.router_gone(self)
        self.world.agenda.after(down_ms, self._restart, self.boot)
        self.world.ingress.router_gone(self.name)

    def _restart(self, boot: int) -> None:
        if boot == self.boot and not self.alive:
            self.start()

    def _tick(self, boot: int) -> None:
        if boot == self.boot and self.alive:
            self.obey_discovery(self.registry.tick(self.world.agenda.now))
            self.world.agenda.after(self.world.schedule.settings.expiry_ms / 10, self._tick, boot)

    # --- tunnels ---

    def opened(self, tunnel: Tunnel, epoch: int) -> None:
        """A tunnel to a worker is up."""
        self.tunnels[tunnel.number] = tunnel
        self.obey_discovery(self.registry.opened(tunnel.number, tunnel.worker, self.world.agenda.now, epoch))

    def lost(self, tunnel: Tunnel, orderly: bool = False) -> None:
        """This end notices that a tunnel is gone."""
        if self.tunnels.pop(tunnel.number, None) is None or not self.alive:
            return
        tunnel.router_up = False
        self.obey_discovery(self.registry.closed(tunnel.number, self.world.agenda.now, orderly))

    def receive(self, tunnel: Tunnel, data: bytes) -> None:
        """Bytes arrived on a tunnel."""
        if not self.alive or tunnel.number not in self.tunnels:
            return
        try:
            value = self.world.codec.decode(data)
        except WireError:
            return
        self.take(value, tunnel)

    def take(self, value: TunnelValue, tunnel: Tunnel) -> None:
        """A message a worker sent, as it was meant."""
        worker, now = tunnel.worker, self.world.agenda.now
        match value:
            case Delta():
                self.feed(rx.DeltaReceived(worker, value))
            case OfferReply():
                self.fleet.replied(worker, value, now)
                route = self.routes.get(value.assignment)
                if value.reason is DeclineReason.PREFIX_GONE and route is not None:
                    self.fleet.missed(route[1])
                self.feed(rx.ReplyReceived(worker, value))
            case Result():
                self._carried.pop(value.assignment, None)
                if self.modest and value.status is ResultStatus.COMPLETED and self._all_came(value):
                    self.modest = False
                    value = replace(value, usage=replace(value.usage, generated_tokens=0))
                self.feed(rx.ResultReceived(worker, value))
            case Heartbeat():
                effects = self.registry.heard(tunnel.number, value, now)
                self.world.watch.heard(self, tunnel, value, effects)
                self.obey_discovery(effects)
            case _:
                self.world.coverage.add("wire", "out-of-place")

    def _all_came(self, result: Result) -> bool:
        """Whether every token its usage claims has been delivered: to claim less of fewer would be another lie."""
        name = result.assignment.request_id
        shadow = self.world.watch.shadows[self.name]
        origin = shadow.live.get(name)
        if origin is None or name not in shadow.active or not result.usage.generated_tokens:
            return False
        sent = shadow.submitted[origin].delivered + shadow.delivered.get(origin, 0)
        return sent == declared.length(self.world.asks[name])

    def obey_discovery(self, effects: list[discovery.DiscoveryEffect]) -> None:
        """What the registry concluded is carried out."""
        for effect in effects:
            self.world.coverage.add("discovery effect", type(effect).__name__)
            match effect:
                case discovery.Elect():
                    self._tell(effect.tunnel, ElectTunnel(effect.term))
                case discovery.AskSnapshot():
                    self._tell(effect.tunnel, SnapshotRequest())
                case discovery.Observed():
                    self.fleet.observe(effect, self.world.agenda.now)
                    beat = effect.heartbeat
                    told = news(beat, self.machine.awaited)
                    if told:
                        self.feed(rx.PrefixesReported(beat.worker, beat.epoch, told))
                    if self.machine.waiting and not beat.draining:
                        self.feed(rx.CapacityFreed(max(1, beat.lanes - beat.load.active)))
                case discovery.Forgotten():
                    self.fleet.forget(effect)
                case discovery.RoutesEnded():
                    for assignment, (tunnel, candidate) in tuple(self.routes.items()):
                        if tunnel == effect.tunnel:
                            del self.routes[assignment]
                            dropped = rx.RouteDropped(
                                assignment, candidate.worker, candidate.epoch, "its tunnel was lost"
                            )
                            self.feed(dropped)
                case rx.WorkerUnavailable():
                    self.feed(effect)

    def _tell(self, number: int, value: TunnelValue) -> None:
        tunnel = self.tunnels.get(number)
        if tunnel is not None:
            self.world.to_worker(tunnel, value)

    # --- ingress ---

    def submit(self, submission: Submission, origin: int, boot: int) -> None:
        """A submission arrived."""
        if self.alive and boot == self.boot:
            self.feed(rx.Submitted(submission, origin))

    def cancel(self, request_id: str, origin: int | None, boot: int) -> None:
        """A cancel arrived, or its stream broke."""
        if self.alive and boot == self.boot:
            self.feed(rx.RequestCancelled(request_id, origin))

    # --- the machine ---

    def feed(self, event: rx.RouterEvent) -> None:
        """The machine handles an event and is obeyed, in order; from within an effect, afterwards."""
        self._inbox.feed(event)

    def _handle(self, event: rx.RouterEvent) -> None:
        watch, now = self.world.watch, self.world.agenda.now
        watch.before_router(self, event)
        effects = self.machine.handle(event, now)
        self.world.trace.append((now, self.name, event, effects))
        watch.after_router(self, event, effects)
        for effect in effects:
            self._obey(effect)

    def _obey(self, effect: RouterEffect) -> None:
        match effect:
            case Deliver():
                self.world.to_ingress(self, effect)
            case Booked() | Accepted() | Unbooked() | Measured():
                if isinstance(effect, Accepted):
                    self.world.accepted[effect.assignment.request_id] = self.world.agenda.now
                self.fleet.account(effect, self.world.agenda.now)
            case SetTimer():
                self._ticket += 1
                self._timers[effect.timer] = self._ticket
                self.world.agenda.after(effect.after_ms, self._fire, effect.timer, self._ticket, self.boot)
            case CancelTimer():
                if self._timers.pop(effect.timer, None) is not None:
                    self.stray = [*self.stray[-7:], effect.timer]
            case PlanRequested():
                self.world.agenda.after(self.planner.duration(effect), self._answer, effect, self.boot)
            case SendOffer():
                self._offer(effect)
            case SendCancel():
                number = self._carried.get(effect.cancel.assignment)
                tunnel = self.tunnels.get(number) if number is not None else None
                if tunnel is not None:
                    self.world.to_worker(tunnel, effect.cancel)
            case CloseRoute():
                self.routes.pop(effect.assignment, None)
            case RecordDecision():
                self.decisions += 1

    def _offer(self, effect: SendOffer) -> None:
        offer = effect.offer
        number = self.registry.tunnel_to(effect.worker, offer.epoch)
        tunnel = self.tunnels.get(number) if number is not None else None
        if tunnel is None:
            self.feed(rx.RouteDropped(offer.assignment, effect.worker, offer.epoch, "no tunnel to this process"))
            return
        self.routes[offer.assignment] = (tunnel.number, offer.candidate)
        self._carried[offer.assignment] = tunnel.number
        self.world.to_worker(tunnel, offer)

    def _answer(self, effect: PlanRequested, boot: int) -> None:
        if self.alive and boot == self.boot:
            self.last_plan = rx.Planned(effect.request_id, effect.plan_id, self.planner.plan(effect))
            self.feed(self.last_plan)

    def _fire(self, timer: TimerId, ticket: int, boot: int) -> None:
        if self.alive and boot == self.boot and self._timers.get(timer) == ticket:
            del self._timers[timer]
            self.fire(timer)

    def fire(self, timer: TimerId) -> None:
        """A timer's event."""
        if timer.kind is TimerKind.OFFER:
            self.feed(rx.OfferTimedOut(AssignmentId(timer.request_id, timer.number)))
        elif timer.kind is TimerKind.HOLD:
            self.feed(rx.HoldExpired(timer.request_id, timer.number))
        else:
            self.feed(rx.DeadlineReached(timer.request_id, timer.number))

    @property
    def timers(self) -> int:
        """Timers that run."""
        return len(self._timers)
