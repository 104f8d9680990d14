"""What this router knows of its workers: tunnels and heartbeats into the discovery registry, its effects carried out.

Heartbeats come on the control route of the elected tunnel. What the registry accepts goes to the fleet (load, costs,
residency), what it concludes (a worker is unavailable) to the router machine, at once: a broken tunnel is a loss the
moment it is seen, not when a timer says so.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from libs.controller import discovery
from libs.controller.catalog_facts import Endpoint
from libs.controller.discovery import AskSnapshot, DiscoveryEffect, Elect, Forgotten, Observed, RoutesEnded
from libs.controller.errors import WireError
from libs.controller.fleet import Fleet
from libs.controller.knobs import DiscoveryKnobs
from libs.controller.protocol import ElectTunnel, Heartbeat, SnapshotRequest
from libs.controller.router_events import CapacityFreed, Loss, RouterEvent, WorkerUnavailable
from libs.controller.wire import TunnelCodec
from libs.service.logs import get_logger
from libs.tunnel import ChannelFullError, Tunnel, TunnelClosedError
from services.router.clock import now_ms

_RETRY_S = 0.1

log = get_logger(__name__)


class Observatory:
    """See the module. `waiting`: requests that wait for capacity; `routes_ended`: a tunnel took its routes along."""

    def __init__(
        self,
        knobs: DiscoveryKnobs,
        fleet: Fleet,
        codec: TunnelCodec,
        feed: Callable[[RouterEvent], None],
        *,
        waiting: Callable[[], int],
        routes_ended: Callable[[int], None],
    ) -> None:
        self.registry = discovery.Registry(knobs)
        self.fleet = fleet
        self.losses: Counter[str] = Counter()
        self.codec = codec
        self._feed = feed
        self._waiting = waiting
        self._routes_ended = routes_ended
        self._tunnels: dict[int, Tunnel] = {}

    def tunnel_to(self, worker: str, epoch: int) -> Tunnel | None:
        """A live tunnel to that process."""
        chosen = self.registry.tunnel_to(worker, epoch)
        return self._tunnels.get(chosen) if chosen is not None else None

    def epoch(self, tunnel: Tunnel) -> int:
        """The process the tunnel leads to, as far as known; 0 = not known."""
        for record in self.registry.records():
            if tunnel.tunnel_id in record.tunnels:
                return record.epoch
        return 0

    def listed(self, endpoints: Sequence[Endpoint]) -> None:
        """The current endpoint map."""
        self.registry.set_listed(frozenset(endpoint.worker for endpoint in endpoints))

    def up(self, tunnel: Tunnel, endpoint: Endpoint) -> None:
        """A tunnel to a worker is up."""
        self._tunnels[tunnel.tunnel_id] = tunnel
        self._obey(self.registry.opened(tunnel.tunnel_id, endpoint.worker, now_ms(), endpoint.epoch))

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
        else:
            self.codec.counts["out-of-place"] += 1

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
                    self._routes_ended(effect.tunnel)
                case WorkerUnavailable():
                    self.losses[effect.loss.value] += 1
                    # Who leaves in order is no reason to look.
                    say = log.info if effect.loss is Loss.RETIRED else log.warning
                    say("worker unavailable", worker=effect.worker, epoch=effect.epoch, reason=effect.loss.value)
                    self._feed(effect)

    def _observe(self, observed: Observed) -> None:
        self.fleet.observe(observed, now_ms())
        heartbeat = observed.heartbeat
        if self._waiting() and not heartbeat.draining:
            # Level-triggered: a waiter that cannot use the slot passes it on, so saying one too many costs a plan.
            self._feed(CapacityFreed(max(1, heartbeat.lanes - heartbeat.load.active)))

    def _tell(self, tunnel_id: int, value: ElectTunnel | SnapshotRequest) -> None:
        tunnel = self._tunnels.get(tunnel_id)
        if tunnel is None:
            return
        try:
            tunnel.try_control(self.codec.encode(value))
        except ChannelFullError:
            asyncio.get_running_loop().call_later(_RETRY_S, self._tell, tunnel_id, value)
        except TunnelClosedError:
            return
