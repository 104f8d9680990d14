"""Tunnels to the routers: one to every address, redialled for ever.

A name may stand for several routers (a headless service), and a single connection through a virtual address would pin
all requests to one of them; so names are resolved here, again and again, and every address gets a link of its own. An
address that leaves the name keeps its tunnel while it is healthy and is not dialled again. With TLS a router must show
a certificate for the name it was found under. Redials wait with full jitter (a restarted router is not met by everybody
at once), growing while they fail.

Requests are spread round robin over the links that are up.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from libs.controller.merging import merge_deliveries
from libs.service.channel import open_channel
from libs.service.logs import get_logger
from libs.service.transport import Transport
from libs.tunnel import Handlers, Registry, Side, Tunnel, TunnelClosedError, TunnelConfig
from libs.tunnel.grpc_carrier import dial

SERVICE = "segue.v1.Router"

_CONNECT_S = 5.0
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_STEADY_S = 5.0  # a tunnel that lived this long was no failed attempt

log = get_logger(__name__)


class NoRouterError(Exception):
    """No link is up, and none came up in time."""


@dataclass
class LinkCounters:
    """Exported as metrics."""

    up: int = field(default=0, metadata={"help": "Routers connected now", "kind": "gauge"})
    known: int = field(default=0, metadata={"help": "Router addresses known now", "kind": "gauge"})
    dials: int = field(default=0, metadata={"help": "Connection attempts to routers"})
    losses: int = field(default=0, metadata={"help": "Tunnels to routers that were up and ended"})
    resolve_failures: int = field(default=0, metadata={"help": "Look-ups of a router's name that failed"})


class RouterLinks:
    """All links of this process. `run` owns their tasks."""

    def __init__(
        self,
        routers: Sequence[str],
        transport: Transport,
        registry: Registry,
        *,
        resolve_every_s: float = 5.0,
        config: TunnelConfig | None = None,
    ) -> None:
        self.counters = LinkCounters()
        self._routers = tuple(routers)
        self._transport = transport
        self._registry = registry
        self._resolve_every_s = resolve_every_s
        self._config = config
        self._handlers = Handlers(merge=merge_deliveries)
        self._wanted: dict[str, str] = {}
        """By address, the name it was found under; empty where the setting gives the address itself."""
        self._links: dict[str, asyncio.Task[None]] = {}
        self._up: list[Tunnel] = []
        self._changed = asyncio.Event()
        self._turn = 0

    async def run(self) -> None:
        """Keeps the links until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wanted = await self._resolve()
                self.counters.known = len(self._wanted)
                for address in sorted(self._wanted.keys() - self._links.keys()):
                    self._links[address] = group.create_task(self._keep(address), name=f"router link {address}")
                await asyncio.sleep(self._resolve_every_s * random.uniform(0.8, 1.2))  # noqa: S311

    @property
    def any_up(self) -> bool:
        return bool(self._up)

    async def wait_change(self) -> None:
        """Returns when a link has come up or gone down since the call."""
        await self._changed.wait()

    async def pick(self, within_s: float, avoid: Tunnel | None = None) -> Tunnel:
        """The next live tunnel, `avoid` only if there is no other. Raises NoRouterError after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not any(tunnel.closed is None for tunnel in self._up):
                    await self._changed.wait()
        live = [tunnel for tunnel in self._up if tunnel.closed is None]
        if not live:
            raise NoRouterError(f"none of the routers {', '.join(self._routers)} was connected within {within_s:g} s")
        preferred = [tunnel for tunnel in live if tunnel is not avoid] or live
        # A tunnel that stalls is used only if all do.
        preferred = [tunnel for tunnel in preferred if not tunnel.health.reasons] or preferred
        self._turn += 1
        return preferred[self._turn % len(preferred)]

    async def _resolve(self) -> dict[str, str]:
        """All addresses of all names, and the names; a name that cannot be looked up now keeps those it had."""
        found: dict[str, str] = {}
        for router in self._routers:
            host, _, port = router.rpartition(":")
            host = host.strip("[]")
            try:
                async with asyncio.timeout(_CONNECT_S):
                    answers = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            except (OSError, TimeoutError) as error:
                self.counters.resolve_failures += 1
                log.warning("router name cannot be resolved", router=router, reason=str(error) or "timed out")
                return self._wanted | found
            for family, _, _, _, address in answers:
                literal = f"[{address[0]!s}]" if family == socket.AF_INET6 else str(address[0])
                found.setdefault(f"{literal}:{address[1]!s}", "" if host == address[0] else host)
        return found

    async def _keep(self, address: str) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        try:
            while (name := self._wanted.get(address)) is not None:
                started = loop.time()
                await self._hold(address, name)
                failures = 0 if loop.time() - started > _STEADY_S else failures + 1
                longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(failures, 10))
                await asyncio.sleep(random.uniform(0, longest))  # noqa: S311
        finally:
            self._links.pop(address, None)

    async def _hold(self, address: str, name: str) -> None:
        """One tunnel, from dialling to its end."""
        self.counters.dials += 1
        channel = open_channel(address, self._transport, server_name=name)
        tunnel = Tunnel(dial(channel, address, SERVICE), self._registry, Side.DIALING, self._handlers, self._config)
        running = asyncio.create_task(tunnel.run(), name=f"tunnel to router {address}")
        try:
            await tunnel.ready(_CONNECT_S)
            self._set_up(tunnel, True)
            log.info("router connected", router=address)
            closed = await running
            log.warning("router lost", router=address, reason=closed.reason.label, detail=closed.detail)
        except (TimeoutError, TunnelClosedError) as error:
            log.debug("router cannot be reached", router=address, reason=str(error) or "timed out")
        finally:
            self._set_up(tunnel, False)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await channel.close(None)

    def _set_up(self, tunnel: Tunnel, up: bool) -> None:
        if up == (tunnel in self._up):
            return
        if up:
            self._up.append(tunnel)
        else:
            self._up.remove(tunnel)
            self.counters.losses += 1
        self.counters.up = len(self._up)
        # Wakes those who wait now; later waiters wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
