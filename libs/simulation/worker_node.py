"""Interprets the worker machine: its page pool, runtime, checkpoints, heartbeats and tunnels, under logical time.

A process dies and comes back under a new epoch (`Restarted`); its disk stays, its pages and memory do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from libs.continuation import chain as chains
from libs.controller import worker_events as wx
from libs.controller.errors import WireError
from libs.controller.inbox import Inbox
from libs.controller.knobs import WorkerKnobs
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    DeclineReason,
    ElectTunnel,
    Load,
    Offer,
    SnapshotRequest,
    Tier,
    TunnelValue,
)
from libs.controller.worker import WorkerMachine
from libs.controller.worker_effects import (
    Drained,
    EmitDelta,
    EmitResult,
    Release,
    Reply,
    Reserve,
    StartRestore,
    StartRun,
    Stop,
    WorkerEffect,
)
from libs.simulation import declared, heartbeats
from libs.simulation.heartbeats import Pair
from libs.simulation.links import Tunnel
from libs.simulation.pages import PagePool
from libs.simulation.runtime import Runtime, Span
from libs.simulation.schedule import WorkerSpec

if TYPE_CHECKING:
    from libs.simulation.world import World

_HURRY_MS = 20.0
_CHECKPOINTS = 4  # under way; more are dropped
_PUBLISH_TRIES = 3


class WorkerNode:
    """See the module."""

    def __init__(self, world: World, spec: WorkerSpec) -> None:
        self.world, self.spec, self.name = world, spec, spec.name
        self.costs = heartbeats.costs(spec)
        knobs = WorkerKnobs(max_control_tasks=spec.control_tasks, queue_margin_ms=spec.queue_margin_ms)
        self.machine = WorkerMachine(0, {declared.FINGERPRINT: spec.context}, knobs, world.worker_fence)
        self.machine.reached, self.machine.declines = world.coverage.worker_reached, world.coverage.declines
        self.alive = False
        self.boot = 0  # counts processes: what was planned for an earlier one is void
        self.tunnels: dict[int, Tunnel] = {}
        self.pairs: dict[str, Pair] = {}
        self.offers: dict[AssignmentId, Offer] = {}
        self.ram: dict[str, None] = {}
        self.spans: list[Span] = []  # of lanes, by when they ended
        self.prefills: Counter[str] = Counter()  # of each shared prefix that had to compute some of it
        self._inbox = Inbox(self._handle)
        self._hurried = False
        self._copied_names: dict[str, None] = {}
        self._checkpoints = 0
        self.pool = self._empty()
        self.runtime = Runtime(world, spec, self.pool, self.ram, self.feed)

    # --- process ---

    def _empty(self) -> PagePool:
        return PagePool(self.spec.pages, self.spec.page_tokens, partial(self.world.watch.pages_move, self.name))

    def start(self) -> None:
        """A new process with a new epoch; routers will dial it."""
        self.boot += 1
        self.alive = True
        self.pool = self._empty()
        self.ram = {}
        self.runtime = Runtime(self.world, self.spec, self.pool, self.ram, self.feed)
        self.pairs, self.offers, self.tunnels = {}, {}, {}
        self._checkpoints = 0
        self._copied_names = {}
        self._hurried = False
        self.world.watch.worker_started(self.name)
        self.feed(wx.Restarted(self.world.next_epoch()))
        self.world.agenda.after(self.world.schedule.settings.heartbeat_ms, self._beat, self.boot)
        self.world.dial(self.name)

    def crash(self, down_ms: float, orderly: bool = False) -> None:
        """The process is gone, at once."""
        if not self.alive:
            return
        self.alive = False
        self.runtime.end()
        self._inbox.clear()
        for tunnel in self.tunnels.values():
            tunnel.worker_up = False
            self.world.break_for_router(tunnel, orderly)
        self.world.watch.worker_gone(self.name)
        self.world.agenda.after(down_ms, self._restart, self.boot)

    def die(self, ask: str) -> None:
        """A query of death."""
        self.world.watch.killed(self.name, ask)
        self.crash(300.0)

    def relabel(self) -> bool:
        """An idle process learns that its epoch is another one; its tunnels stay. False if it is not idle."""
        if not self.alive or len(self.machine) or self.machine.draining:
            return False
        self.feed(wx.Restarted(self.world.next_epoch()))
        for pair in self.pairs.values():
            pair.sequence, pair.told = 0, None
        return True

    def _restart(self, boot: int) -> None:
        if boot == self.boot and not self.alive:
            self.start()

    # --- tunnels ---

    def opened(self, tunnel: Tunnel) -> None:
        """A router's tunnel is up here."""
        self.tunnels[tunnel.number] = tunnel
        self.pairs.setdefault(tunnel.router, Pair()).tunnels.append(tunnel.number)

    def lost(self, tunnel: Tunnel) -> None:
        """This end notices that a tunnel is gone."""
        if self.tunnels.pop(tunnel.number, None) is None or not self.alive:
            return
        tunnel.worker_up = False
        pair = self.pairs[tunnel.router]
        pair.tunnels.remove(tunnel.number)
        if pair.elected == tunnel.number:
            pair.elected = None
        self.feed(wx.TunnelLost(tunnel.number))

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
        """A message a router sent, as it was meant."""
        match value:
            case Offer():
                self.feed(wx.OfferReceived(value, tunnel.number, self.runtime.queue_ms(), self.pool.pages()))
            case Cancel():
                self.feed(wx.CancelReceived(value))
            case ElectTunnel():
                if self.pairs[tunnel.router].elect(tunnel.number, value.term):
                    self._tell((tunnel.router,))
            case SnapshotRequest():
                pair = self.pairs[tunnel.router]
                if pair.elected == tunnel.number:
                    pair.told = None
                    self._tell((tunnel.router,))
            case _:
                self.world.coverage.add("wire", "out-of-place")

    # --- the machine ---

    def feed(self, event: wx.WorkerEvent) -> None:
        """The machine handles an event and is obeyed, in order."""
        self._inbox.feed(event)

    def _handle(self, event: wx.WorkerEvent) -> None:
        watch, now = self.world.watch, self.world.agenda.now
        watch.before_worker(self, event)
        effects = self.machine.handle(event, now)
        self.world.trace.append((now, self.name, event, effects))
        watch.after_worker(self, event, effects)
        for effect in effects:
            self._obey(effect)

    def _obey(self, effect: WorkerEffect) -> None:
        match effect:
            case EmitDelta():
                self._send(effect.tunnel, effect.delta)
            case Reply():
                self._send(effect.tunnel, effect.reply)
            case EmitResult():
                # What it leaves resident is told before its result.
                tunnel = self.tunnels.get(effect.tunnel)
                if tunnel is not None:
                    self._tell((tunnel.router,))
                self._send(effect.tunnel, effect.result)
            case Reserve():
                self._reserve(effect.offer)
            case StartRestore():
                self.runtime.restore(effect.offer, effect.resident_tokens)
            case StartRun():
                self.runtime.run(effect.assignment, self.offers[effect.assignment], effect.cached_tokens)
            case Stop():
                self.runtime.stop(effect.assignment)
            case Release():
                self.world.watch.releases(self.name, effect.assignment)
                self.pool.release(effect.assignment)
                self.offers.pop(effect.assignment, None)
            case Drained():
                self.world.agenda.after(1.0, self._leave, self.boot)

    def _leave(self, boot: int) -> None:
        if boot == self.boot and self.alive and self.machine.draining:
            self.crash(500.0, orderly=True)

    def _reserve(self, offer: Offer) -> None:
        self.offers[offer.assignment] = offer
        request, key = offer.request, offer.assignment
        names = declared.names(request.tokens[:-1])
        resident = self.pool.longest(names, request.processed)
        counted = offer.candidate.cached_tokens if offer.candidate.tier in (Tier.GPU, Tier.INFLIGHT) else 0
        if counted > resident[0] and counted > self.runtime.coming(names, request.processed):
            self._later(self.spec.reserve_ms, self._refused, key, DeclineReason.PREFIX_GONE)
            return
        evicted = self.pool.reserve(key, request.tokens, request.max_new_tokens, resident)
        if evicted is None:
            self._later(self.spec.reserve_ms, self._refused, key, DeclineReason.INSUFFICIENT_PAGES)
            return
        wait = self.spec.reserve_ms + self.spec.evict_ms * len(evicted)
        self._later(wait, self._reserved, key, resident[0], evicted)

    def _reserved(self, key: AssignmentId, resident: int, evicted: list[int]) -> None:
        self.pool.evicted(evicted)
        self.feed(wx.ReservationMade(key, resident, self.runtime.queue_ms(), self.pool.pages()))

    def _refused(self, key: AssignmentId, reason: DeclineReason) -> None:
        self.offers.pop(key, None)
        self.feed(wx.ReservationRefused(key, reason, "", self.runtime.queue_ms(), self.pool.pages()))

    def _later(self, delay_ms: float, action: object, *arguments: object) -> None:
        self.world.agenda.after(delay_ms, self._due, self.boot, action, arguments)

    def _due(self, boot: int, action: object, arguments: tuple[object, ...]) -> None:
        if boot == self.boot and self.alive:
            assert callable(action)
            action(*arguments)

    def _send(self, number: int, value: TunnelValue) -> None:
        tunnel = self.tunnels.get(number)
        if tunnel is not None:
            self.world.to_router(tunnel, value)

    # --- heartbeats ---

    def hurry(self) -> None:
        """Something changed that routers should hear soon."""
        if not self._hurried:
            self._hurried = True
            self._later(_HURRY_MS, self._hurry)

    def _hurry(self) -> None:
        self._hurried = False
        self._tell(self.pairs)

    def _beat(self, boot: int) -> None:
        if boot != self.boot or not self.alive:
            return
        self._tell(self.pairs)
        self.world.agenda.after(self.world.schedule.settings.heartbeat_ms, self._beat, boot)

    def _tell(self, routers: Iterable[str]) -> None:
        """A heartbeat to each of these that has elected a tunnel."""
        pairs = [pair for pair in map(self.pairs.__getitem__, routers) if pair.elected is not None]
        if not pairs:
            return
        held: heartbeats.Held = {(name, Tier.GPU): (entry.end, 0.0) for name, entry in self.pool.index.items()}
        for name in self.ram:
            held[name, Tier.RAM] = (self.world.ends[name], 0.0)
        for name, found in self.runtime.inflight().items():
            held[name, Tier.INFLIGHT] = found
        load = self.load()
        for pair in pairs:
            assert pair.elected is not None
            beat = heartbeats.build(self.spec, self.costs, self.machine, load, pair, held)
            self.world.heartbeat(self.tunnels[pair.elected], beat)

    def load(self) -> Load:
        """As now."""
        return self.machine.load(self.runtime.queue_ms(), self.pool.pages())

    # --- checkpoints ---

    def computed(self, tokens: tuple[int, ...], key: AssignmentId) -> None:
        """A range is complete: what of it is not durable yet is copied out, beside everything else."""
        if not self.world.schedule.settings.checkpoints:
            return
        for node in declared.nodes(tokens):
            entry = self.pool.index.get(node.hash)
            if entry is None or node.hash in self._copied_names or self._checkpoints >= _CHECKPOINTS:
                continue
            self._checkpoints += 1
            self._copied_names[node.hash] = None
            self.world.ends[node.hash] = node.end
            op = AssignmentId(f"copy {node.hash}", key.attempt)
            self.pool.pin(entry.pages)
            self.world.watch.op_holds(self.name, op, entry.pages)
            self._later(2.0, self._copied, node, op, entry.pages)

    def _copied(self, node: chains.Node, op: AssignmentId, pages: tuple[int, ...]) -> None:
        self.pool.unpin(pages)
        self.world.watch.op_ends(self.name, op)
        self.ram[node.hash] = None
        self.hurry()
        self._later(3.0, self._durable, node, self.name)
        self._later(8.0, self._durable, node, "object")

    def _durable(self, node: chains.Node, place: str) -> None:
        self.world.store.put(place, node.hash)
        if place == "object":
            self._checkpoints -= 1
        self._publish(node, place, 1)

    def _publish(self, node: chains.Node, place: str, tries: int) -> None:
        if self.world.catalog.away_until <= self.world.agenda.now:
            # The process may die meanwhile: the fact is true all the same.
            self.world.agenda.after(self.world.schedule.settings.catalog_ms, self.world.publish, node, place)
        elif tries < _PUBLISH_TRIES:
            self._later(200.0, self._publish, node, place, tries + 1)
