"""One run: routers, workers, the ingress and the stores, joined by links, driven by the agenda, under the watch.

A function of its schedule alone. `run` ends when every ask has ended, every fault is over and things have come to rest;
what goes wrong before is a `Failure`, with the step and the time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from libs.controller.fences import Fence
from libs.controller.protocol import Heartbeat, Tier, TunnelValue
from libs.controller.router_effects import Deliver
from libs.controller.wire import TunnelCodec
from libs.simulation import faults, tracing
from libs.simulation.agenda import Agenda
from libs.simulation.coverage import Coverage
from libs.simulation.ingress import Ingress
from libs.simulation.links import Links, Tunnel
from libs.simulation.router_node import RouterNode
from libs.simulation.schedule import Schedule
from libs.simulation.storage import OBJECT, Catalog, Store
from libs.simulation.violations import ViolationError
from libs.simulation.watch import Watch, bug
from libs.simulation.worker_node import WorkerNode

MOST_EVENTS = 200_000
TAIL = 40  # lines of the trace a failure shows


@dataclass(frozen=True, slots=True)
class Failure:
    """An invariant did not hold."""

    invariant: str
    detail: str
    step: int
    at_ms: float
    tail: tuple[str, ...]


class World:
    """See the module."""

    def __init__(
        self, schedule: Schedule, router_fence: Fence | None = None, worker_fence: Fence | None = None
    ) -> None:
        self.schedule = schedule
        self.router_fence = router_fence if router_fence is not None else Fence()
        self.worker_fence = worker_fence if worker_fence is not None else Fence()
        self.agenda = Agenda()
        self.coverage = Coverage()
        self.trace: list[tracing.Entry] = []
        self.steps = 0
        self.codec = TunnelCodec()
        self.links = Links(self.agenda, schedule.settings.latency_ms)
        self.store, self.catalog = Store(), Catalog()
        self.asks = {ask.name: ask for ask in schedule.asks}
        self.restored: Counter[str] = Counter()
        self.accepted: dict[str, float] = {}  # by request, when its newest attempt was
        self.ends: dict[str, int] = {}
        self._slow: dict[tuple[str, str], tuple[float, int]] = {}
        self._muted: dict[tuple[str, str], float] = {}
        self._stale: dict[tuple[str, str], float] = {}
        self._epochs = 0
        self._tunnels = 0
        self.watch = Watch(self)
        self.workers = {spec.name: WorkerNode(self, spec) for spec in schedule.settings.workers}
        self.routers = {f"r{index}": RouterNode(self, f"r{index}") for index in range(schedule.settings.routers)}
        self.ingress = Ingress(self)

    # --- running ---

    def run(self) -> Failure | None:
        """The whole schedule; what went wrong, if anything."""
        try:
            self._start()
            rest_ms = self._last_fault_ms()
            settle_ms = self.schedule.settings.settle_ms
            agenda, watch, ingress = self.agenda, self.watch, self.ingress
            routers = [*self.routers.values()]
            # A submission made by mistake has nobody waiting for it, but it too has its deadline.
            latest_ms = max((ask.at_ms + ask.deadline_ms for ask in self.schedule.asks), default=0.0)
            while agenda.step():
                self.steps += 1
                watch.after_step()
                if ingress.open or (agenda.now < latest_ms and any(len(node.machine) for node in routers)):
                    rest_ms = max(rest_ms, agenda.now)
                elif agenda.now > rest_ms + settle_ms:
                    break
                if self.steps > MOST_EVENTS:
                    raise ViolationError("1 one end", f"does not come to rest within {MOST_EVENTS} events")
            watch.at_rest()
        except ViolationError as error:
            return self._failure(error)
        except Exception as error:
            # Ours: a machine that contradicts itself, or this simulator. Either way the schedule shows it.
            return self._failure(bug(error))
        return None

    def _start(self) -> None:
        for worker in self.workers.values():
            worker.start()
        for router in self.routers.values():
            router.start()
        self.ingress.start()
        for fault in self.schedule.faults:
            self.agenda.at(fault.at_ms, self._fault, fault)

    def _fault(self, fault: faults.Fault) -> None:
        self.trace.append((self.agenda.now, "fault", fault, []))
        if faults.apply(self, fault):
            self.coverage.add("fault", fault.do.value)

    def _last_fault_ms(self) -> float:
        return max((fault.at_ms + fault.ms for fault in self.schedule.faults), default=0.0)

    def _failure(self, error: ViolationError) -> Failure:
        return Failure(error.invariant, error.detail, self.steps, self.agenda.now, tuple(self.lines(-TAIL)))

    def lines(self, start: int = 0) -> list[str]:
        """The trace from an entry on: time, who, event; then its effects."""
        return list(tracing.lines(self.trace[start:]))

    # --- tunnels ---

    def dial(self, worker: str, router: str | None = None) -> None:
        """The pool learns of a process and dials it, from one router or all."""
        for name, node in self.routers.items():
            if router in (None, name) and node.alive:
                for _ in range(self.schedule.settings.tunnels):
                    boots = (node.boot, self.workers[worker].boot)
                    self.agenda.after(self.schedule.settings.dial_ms, self._dialled, name, worker, boots)

    def redial(self, tunnel: Tunnel) -> None:
        """The pool replaces a tunnel that was lost."""
        boots = (self.routers[tunnel.router].boot, self.workers[tunnel.worker].boot)
        self.agenda.after(self.schedule.settings.dial_ms * 4, self._dialled, tunnel.router, tunnel.worker, boots)

    def _dialled(self, router: str, worker: str, boots: tuple[int, int]) -> None:
        near, far = self.routers[router], self.workers[worker]
        if not (near.alive and far.alive and (near.boot, far.boot) == boots):
            return
        self._tunnels += 1
        tunnel = Tunnel(self._tunnels, router, worker)
        far.opened(tunnel)
        self.watch.newest.dialled(near, worker, far.machine.epoch)
        near.opened(tunnel, far.machine.epoch)

    def break_for_router(self, tunnel: Tunnel, orderly: bool) -> None:
        """The worker's end is gone; the router's end will notice."""
        self.links.of(tunnel.worker, tunnel.router).send(self.routers[tunnel.router].lost, tunnel, orderly, once=True)

    def break_for_worker(self, tunnel: Tunnel) -> None:
        """The router's end is gone; the worker's end will notice."""
        self.links.of(tunnel.router, tunnel.worker).send(self.workers[tunnel.worker].lost, tunnel, once=True)

    def to_worker(self, tunnel: Tunnel, value: TunnelValue) -> None:
        """A message on a tunnel."""
        if tunnel.router_up:
            link = self.links.of(tunnel.router, tunnel.worker)
            link.send(self.workers[tunnel.worker].receive, tunnel, self.codec.encode(value))

    def to_router(self, tunnel: Tunnel, value: TunnelValue) -> None:
        """A message on a tunnel."""
        if tunnel.worker_up:
            link = self.links.of(tunnel.worker, tunnel.router)
            link.send(self.routers[tunnel.router].receive, tunnel, self.codec.encode(value))

    def heartbeat(self, tunnel: Tunnel, beat: Heartbeat) -> None:
        """A heartbeat, if it is not lost; held back while it is stale."""
        key = (tunnel.worker, tunnel.router)
        if self._muted.get(key, 0.0) > self.agenda.now:
            return
        held_ms = self._stale.get(key, 0.0)
        if held_ms > self.agenda.now:
            self.agenda.at(held_ms, self.to_router, tunnel, beat)
        else:
            self.to_router(tunnel, beat)

    def to_ingress(self, router: RouterNode, effect: Deliver) -> None:
        """A delivery on its way."""
        link = self.links.of(router.name, "ingress")
        link.send(self.ingress.take, effect.origin, effect.delivery, once=True)

    def mute(self, worker: str, router: str, ms: float) -> None:
        """Heartbeats are lost for so long."""
        self._muted[worker, router] = self.agenda.now + ms

    def stale(self, worker: str, router: str, ms: float) -> None:
        """Heartbeats are held back for so long."""
        self._stale[worker, router] = self.agenda.now + ms

    # --- nodes ---

    def worker(self, name: str) -> WorkerNode:
        """By name."""
        return self.workers[name]

    def next_epoch(self) -> int:
        """Epochs grow over all workers."""
        self._epochs += 1
        return self._epochs

    def slow(self, worker: str, part: str, ms: float, factor: int) -> None:
        """A part of a worker costs more for so long."""
        self._slow[worker, part] = (self.agenda.now + ms, max(1, factor))

    def slowness(self, worker: str, part: str) -> float:
        """What a part's cost is multiplied with now."""
        until, factor = self._slow.get((worker, part), (0.0, 1))
        return float(factor) if self.agenda.now < until else 1.0

    # --- bytes and facts ---

    def publish(self, node: object, place: str) -> None:
        """A fact reaches the catalog."""
        self.catalog.publish(node, place)  # type: ignore[arg-type]

    def peer_of(self, worker: str, name: str) -> str | None:
        """Another live worker that holds a chunk in memory or on its disk."""
        for other, node in self.workers.items():
            if other != worker and node.alive and (name in node.ram or self.store.has(other, name)):
                return other
        return None

    def fetch(self, worker: str, ram: dict[str, None], name: str, tier: Tier) -> bool:
        """Whether a verified read of a chunk succeeds; a missing or damaged copy is put aside and its fact goes."""
        if tier is Tier.RAM:
            return name in ram
        place = OBJECT if tier is Tier.OBJECT else worker
        if tier is Tier.PEER:
            peer = self.peer_of(worker, name)
            if peer is None or name in self.workers[peer].ram:
                return peer is not None
            place = peer
        if self.store.reads(place, name):
            return True
        self.watch.durable.destroyed.add((place, name))
        self.store.drop(place, name)
        self.catalog.withdraw(name, place)
        return False
