"""Tunnels to the workers: one to every endpoint of the map, redialled with full jitter, the first retries fast.

A healthy tunnel outranks a missing endpoint: a worker that vanishes from the map keeps its tunnel (and is redialled
should it break) for the grace period, so that an outage of the catalog and its recovery close nothing. Then the tunnel
is retired. A worker that left in order is not dialled again unless it is listed.

A worker process is known to be gone when its tunnel breaks; the endpoint under its address may then be a new process
with a larger epoch. If the map says so while the old tunnel still stands, the tunnel leads to a process that has been
replaced: it is given up and dialled anew.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from libs.controller.catalog_facts import Endpoint
from libs.controller.merging import merge_deltas
from libs.service.channel import open_channel
from libs.service.logs import get_logger
from libs.service.transport import Transport
from libs.tunnel import (
    EXPECTED_ENDS,
    Closed,
    CloseReason,
    Handlers,
    Registry,
    Side,
    Tunnel,
    TunnelClosedError,
    TunnelConfig,
)
from libs.tunnel.grpc_carrier import dial
from services.router.clock import Spawn

SERVICE = "segue.v1.Worker"
ROUTER_KEY = "segue-router"
"""Metadata of an Attach call: this process's id, which makes all its tunnels to a worker one pair."""

_CONNECT_S = 3.0
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 3.0
_STEADY_S = 5.0  # a tunnel that lived this long was no failed attempt

log = get_logger(__name__)


@dataclass
class LinkCounters:
    """Exported as metrics."""

    up: int = field(default=0, metadata={"help": "Tunnels to workers that are up", "kind": "gauge"})
    wanted: int = field(default=0, metadata={"help": "Worker endpoints kept connected", "kind": "gauge"})
    unlisted: int = field(
        default=0, metadata={"help": "Of them, not in the endpoint map: kept for the grace period", "kind": "gauge"}
    )
    dials: int = field(default=0, metadata={"help": "Connection attempts to workers"})
    losses: int = field(default=0, metadata={"help": "Tunnels to workers that were up and broke"})
    retired: int = field(default=0, metadata={"help": "Tunnels given up because their endpoint left the map"})


@dataclass(eq=False)
class Link:
    """One worker address."""

    endpoint: Endpoint
    wanted: bool = True
    lapse: asyncio.TimerHandle | None = None  # runs while the endpoint is not in the map
    tunnel: Tunnel | None = None  # once it is up
    superseded: bool = False
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def listed(self) -> bool:
        """Whether it is in the current map."""
        return self.lapse is None and self.wanted


@dataclass(frozen=True)
class Hooks:
    """Who is told about tunnels. All return at once."""

    up: Callable[[Tunnel, Endpoint], None]
    lost: Callable[[Tunnel, bool], None]
    """With whether it ended in order."""
    control: Callable[[Tunnel, bytes], None]
    epoch: Callable[[Tunnel], int]
    """The process the tunnel leads to, as far as known; 0 = not known."""


class WorkerLinks:
    """All tunnels to workers of this process."""

    def __init__(
        self,
        transport: Transport,
        registry: Registry,
        hooks: Hooks,
        spawn: Spawn,
        *,
        router_id: str,
        grace_s: float,
        config: TunnelConfig | None = None,
    ) -> None:
        self.counters = LinkCounters()
        self._transport = transport
        self._registry = registry
        self._hooks = hooks
        self._spawn = spawn
        self._metadata = ((ROUTER_KEY, router_id),)
        self._grace_s = grace_s
        self._config = config
        self._links: dict[tuple[str, str], Link] = {}  # (worker, address)
        self._by_tunnel: dict[int, Link] = {}
        self._keepers: set[asyncio.Task[None]] = set()
        self._closing = False

    def tunnel(self, tunnel_id: int) -> Tunnel | None:
        """A tunnel that is up."""
        link = self._by_tunnel.get(tunnel_id)
        return link.tunnel if link is not None else None

    def apply(self, endpoints: Sequence[Endpoint]) -> None:
        """The current map."""
        if self._closing:
            return
        listed = {(endpoint.worker, endpoint.address): endpoint for endpoint in endpoints}
        for key, link in self._links.items():
            if key not in listed and link.listed:
                link.lapse = asyncio.get_running_loop().call_later(self._grace_s, self._lapse, link)
                log.info("worker left the endpoint map", worker=key[0], address=key[1], kept_for_s=self._grace_s)
        for key, endpoint in listed.items():
            known = self._links.get(key)
            if known is None or not known.wanted:
                link = self._links[key] = Link(endpoint)
                keeper = self._spawn(self._keep(key, link), f"tunnel to worker {endpoint.worker}")
                self._keepers.add(keeper)
                keeper.add_done_callback(self._keepers.discard)
            else:
                self._list(known, endpoint)
        self._count()

    async def tried(self, within_s: float) -> None:
        """Waits until every endpoint of the map has been dialled once, with whatever success."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for link in tuple(self._links.values()):
                    await link.tried.wait()

    def close(self) -> None:
        """Ends all tunnels in order; nothing is dialled any more."""
        self._closing = True
        for link in self._links.values():
            link.wanted = False
            link.changed.set()
            if link.lapse is not None:
                link.lapse.cancel()
            if link.tunnel is not None:
                link.tunnel.close(CloseReason.SHUTDOWN, "the router is shutting down")

    async def closed(self, within_s: float) -> None:
        """Waits until no tunnel is up."""
        if self._keepers:
            await asyncio.wait(tuple(self._keepers), timeout=within_s)

    def _list(self, link: Link, endpoint: Endpoint) -> None:
        if link.lapse is not None:
            link.lapse.cancel()
            link.lapse = None
            link.changed.set()
            log.info("worker is back in the endpoint map", worker=endpoint.worker, address=endpoint.address)
        link.endpoint = endpoint
        if link.tunnel is not None and 0 < self._hooks.epoch(link.tunnel) < endpoint.epoch:
            link.superseded = True
            link.tunnel.close(CloseReason.RETIRED, f"the worker has been replaced by epoch {endpoint.epoch}")

    def _lapse(self, link: Link) -> None:
        link.wanted = False
        link.changed.set()
        if link.tunnel is not None:
            self.counters.retired += 1
            log.warning("worker stays out of the endpoint map: its tunnel is retired", worker=link.endpoint.worker)
            link.tunnel.close(CloseReason.RETIRED, "its endpoint left the map")

    async def _keep(self, key: tuple[str, str], link: Link) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        try:
            while link.wanted:
                began = loop.time()
                closed = await self._hold(link)
                if not link.listed and closed is not None and closed.reason in EXPECTED_ENDS:
                    return
                failures = 0 if loop.time() - began > _STEADY_S else failures + 1
                longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(failures, 10))
                link.changed.clear()
                if link.wanted:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(random.uniform(0, longest)):  # noqa: S311
                            await link.changed.wait()
        finally:
            link.wanted = False
            if link.lapse is not None:
                link.lapse.cancel()
            if self._links.get(key) is link:
                del self._links[key]
            link.tried.set()
            link.changed.set()
            self._count()

    async def _hold(self, link: Link) -> Closed | None:
        """One tunnel, from dialling to its end; None if it never came up."""
        self.counters.dials += 1
        endpoint = link.endpoint
        channel = open_channel(endpoint.address, self._transport)
        handlers = Handlers(merge=merge_deltas, on_control=self._hooks.control, on_tunnel_lost=self._lost)
        carrier = dial(channel, endpoint.address, SERVICE, metadata=self._metadata)
        tunnel = Tunnel(carrier, self._registry, Side.DIALING, handlers, self._config)
        running = asyncio.create_task(tunnel.run(), name=f"tunnel to worker {endpoint.worker}")
        try:
            await tunnel.ready(_CONNECT_S)
        except (TimeoutError, TunnelClosedError) as error:
            log.debug("worker cannot be reached", worker=endpoint.worker, reason=str(error) or "timed out")
            return None
        else:
            if not link.wanted:
                tunnel.close(CloseReason.RETIRED)
                return None
            link.tunnel, link.superseded = tunnel, False
            self._by_tunnel[tunnel.tunnel_id] = link
            self._count()
            log.info("worker connected", worker=endpoint.worker, address=endpoint.address)
            # The map may have moved on while this was being dialled.
            self._hooks.up(tunnel, endpoint)
            link.tried.set()
            return await running
        finally:
            link.tried.set()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await channel.close(None)

    def _lost(self, tunnel: Tunnel, closed: Closed) -> None:
        link = self._by_tunnel.pop(tunnel.tunnel_id, None)
        if link is None:
            return
        link.tunnel = None
        self._count()
        orderly = closed.reason in EXPECTED_ENDS and not link.superseded
        if not orderly:
            self.counters.losses += 1
        say = log.info if orderly else log.warning
        say("worker disconnected", worker=link.endpoint.worker, reason=closed.reason.label, detail=closed.detail)
        self._hooks.lost(tunnel, orderly)

    def _count(self) -> None:
        self.counters.up = len(self._by_tunnel)
        self.counters.wanted = sum(link.wanted for link in self._links.values())
        self.counters.unlisted = sum(link.wanted and not link.listed for link in self._links.values())
