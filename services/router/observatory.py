"""What this router knows of its workers: tunnels and heartbeats into the discovery registry, its effects carried out.

Heartbeats come on the control route of the elected tunnel. What the registry accepts goes to the fleet (load, costs,
residency), what it concludes (a worker is unavailable) to the router machine, at once: a broken tunnel is a loss the
moment it is seen, not when a timer says so.

A worker has several tunnels and its heartbeats come on one of them. Which process the others lead to is inferred from
it, and the pool is told: tunnels that came up under the same address lead to the same process, unless they were heard
to lead to another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from libs.controller import discovery
from libs.controller.catalog_facts import Endpoint
from libs.controller.discovery import (
    AskSnapshot,
    DiscoveryEffect,
    Elect,
    Forgotten,
    Observed,
    RoutesEnded,
    WorkerRecord,
)
from libs.controller.errors import WireError
from libs.controller.fleet import Fleet
from libs.controller.knobs import DiscoveryKnobs
from libs.controller.prefix_holds import news
from libs.controller.protocol import ElectTunnel, Heartbeat, SnapshotRequest
from libs.controller.router_events import CapacityFreed, Loss, PrefixesReported, RouterEvent, WorkerUnavailable
from libs.controller.wire import TunnelCodec
from libs.service.logs import get_logger
from libs.tunnel import ChannelFullError, Tunnel, TunnelClosedError
from services.router.clock import now_ms
from services.router.heartbeat_order import HeartbeatOrder

_RETRY_S = 0.1

log = get_logger(__name__)


@dataclass(slots=True)
class _Known:
    """A tunnel that is up. `epoch`: the process it leads to, as told to the pool; 0 = not yet."""

    tunnel: Tunnel
    worker: str
    address: str
    epoch: int = 0


class Observatory:
    """See the module.

    `waiting`: requests that wait for capacity; `awaited`: prefixes that requests are held for; `identify`: the process
    that a tunnel leads to; `takes`: whether a worker's tunnels take new routes.
    """

    def __init__(
        self,
        knobs: DiscoveryKnobs,
        fleet: Fleet,
        codec: TunnelCodec,
        feed: Callable[[RouterEvent], None],
        *,
        waiting: Callable[[], int],
        awaited: Callable[[], Collection[str]],
        identify: Callable[[Tunnel, int], None],
        takes: Callable[[str], bool],
    ) -> None:
        self.registry = discovery.Registry(knobs)
        self.order = HeartbeatOrder(self._missing)
        self.fleet = fleet
        self.losses: Counter[str] = Counter()
        self.codec = codec
        self._feed = feed
        self._waiting = waiting
        self._awaited = awaited
        self._identify = identify
        self._takes = takes
        self._tunnels: dict[int, _Known] = {}

    def listed(self, endpoints: Sequence[Endpoint]) -> None:
        """The current endpoint map."""
        self.registry.set_listed(frozenset(endpoint.worker for endpoint in endpoints))

    def up(self, tunnel: Tunnel, worker: str, address: str, epoch: int) -> None:
        """A tunnel to a worker is up; the process is the one that the map had when it was dialled."""
        record = self.registry.record(worker)
        if record is not None and record.epoch > epoch and address in self._addresses(record):
            epoch = record.epoch  # the map is behind
        self._tunnels[tunnel.tunnel_id] = _Known(tunnel, worker, address)
        self._obey(self.registry.opened(tunnel.tunnel_id, worker, now_ms(), epoch))
        self._infer(worker)

    def lost(self, tunnel: Tunnel, orderly: bool) -> None:
        """It is gone."""
        self._tunnels.pop(tunnel.tunnel_id, None)
        self._obey(self.registry.closed(tunnel.tunnel_id, now_ms(), orderly))

    def control(self, tunnel: Tunnel, payload: bytes) -> None:
        """A message on the control route."""
        try:
            value = self.codec.decode(payload)
        except WireError as error:
            log.warning("control message refused", peer=tunnel.peer, reason=error.reason)
            return
        if isinstance(value, Heartbeat):
            self._obey(self.registry.heard(tunnel.tunnel_id, value, now_ms()))
            self._infer(value.worker)
            self.order.heard(value.worker)
        else:
            self.codec.counts["out-of-place"] += 1

    def withhold(self) -> None:
        """Whether workers' tunnels take new routes may have changed."""
        for worker in self.fleet.views():
            self.fleet.withhold(worker, not self._takes(worker))

    async def run(self) -> None:
        """Looks for silent workers, several times per expiry, until cancelled."""
        every_s = self.registry.knobs.expiry_ms / 10_000
        while True:
            await asyncio.sleep(every_s)
            self._obey(self.registry.tick(now_ms()))

    def _obey(self, effects: Sequence[DiscoveryEffect]) -> None:
        for effect in effects:
            match effect:
                case Elect():
                    self._tell(effect.tunnel, ElectTunnel(effect.term))
                case AskSnapshot():
                    self._tell(effect.tunnel, SnapshotRequest())
                case Observed():
                    self._observe(effect)
                case Forgotten():
                    self.fleet.forget(effect)
                case RoutesEnded():
                    pass  # each of them says so itself
                case WorkerUnavailable():
                    self.order.gone(effect.worker)
                    self.losses[effect.loss.value] += 1
                    # Who leaves in order is no reason to look.
                    say = log.info if effect.loss is Loss.RETIRED else log.warning
                    say("worker unavailable", worker=effect.worker, epoch=effect.epoch, reason=effect.loss.value)
                    self._feed(effect)

    def _observe(self, observed: Observed) -> None:
        self.fleet.observe(observed, now_ms())
        heartbeat = observed.heartbeat
        told = news(heartbeat, self._awaited())
        if told:
            self._feed(PrefixesReported(heartbeat.worker, heartbeat.epoch, told))
        self.fleet.withhold(heartbeat.worker, not self._takes(heartbeat.worker))
        view = self.fleet.view(heartbeat.worker)
        if self._waiting() and view is not None and not view.draining:
            # Level-triggered: a waiter that cannot use the slot passes it on, so saying one too many costs a plan.
            self._feed(CapacityFreed(max(1, heartbeat.lanes - heartbeat.load.active)))

    def _infer(self, worker: str) -> None:
        """Once a process was heard, its other tunnels are known too."""
        record = self.registry.record(worker)
        if record is None or not record.sequence:
            return
        addresses = self._addresses(record)
        for number, known in self._tunnels.items():
            if known.worker == worker and not known.epoch and known.address in addresses:
                self._obey(self.registry.joined(number, record.epoch))
        for number in record.tunnels:
            known = self._tunnels[number]
            if known.epoch != record.epoch:
                known.epoch = record.epoch
                # The pool may be in the middle of publishing it.
                asyncio.get_running_loop().call_soon(self._identify, known.tunnel, record.epoch)

    def _missing(self, worker: str, epoch: int, sequence: int) -> bool:
        record = self.registry.record(worker)
        return record is not None and record.epoch == epoch and record.sequence < sequence

    def _addresses(self, record: WorkerRecord) -> set[str]:
        return {self._tunnels[number].address for number in record.tunnels}

    def _tell(self, tunnel_id: int, value: ElectTunnel | SnapshotRequest) -> None:
        known = self._tunnels.get(tunnel_id)
        if known is None:
            return
        try:
            known.tunnel.try_control(self.codec.encode(value))
        except ChannelFullError:
            asyncio.get_running_loop().call_later(_RETRY_S, self._tell, tunnel_id, value)
        except TunnelClosedError:
            return
