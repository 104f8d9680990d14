"""The accepting end of routers' tunnels: offers and cancels in, and who is told of what is lost.

One route per assignment, opened by its offer; a small task per route hears its cancel. A route that ends other than
by us gives its assignment up; a lost tunnel gives up all of its own at once, through the machine. Control messages
(election, snapshot request) go to the heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from libs.controller.errors import WireError
from libs.controller.merging import merge_deltas
from libs.controller.protocol import AssignmentId, Cancel, ElectTunnel, Offer, SnapshotRequest
from libs.controller.wire import TunnelCodec
from libs.service.logs import get_logger
from libs.tunnel import (
    Carrier,
    Closed,
    CloseReason,
    Counters,
    Handlers,
    Registry,
    Route,
    RouteClosedError,
    Side,
    Tunnel,
    TunnelConfig,
)
from libs.tunnel.grpc_carrier import serve_tunnel
from services.worker.endpoint.interpreter import Interpreter
from services.worker.endpoint.outlets import RouteOutlet
from services.worker.endpoint.requests import fault

log = get_logger(__name__)

ROUTER_KEY = "segue-router"
"""Metadata of an Attach call: the calling router process's id, which makes its tunnels one pair."""


class Pairs(Protocol):
    """The heartbeats, as tunnels see them."""

    def opened(self, tunnel: Tunnel, router: str) -> None:
        """A tunnel is up; `router` is empty where the caller did not say who it is."""
        ...

    def elected(self, tunnel: Tunnel, term: int) -> None:
        """This tunnel carries the pair's heartbeats from now on."""
        ...

    def snapshot_wanted(self, tunnel: Tunnel) -> None:
        """Send everything next."""
        ...

    def told(self, tunnel_id: int) -> int:
        """The number of the last heartbeat sent to the router at this tunnel's other end; 0 = none was."""
        ...

    def lost(self, tunnel: Tunnel) -> None:
        """The tunnel is gone."""
        ...


class AttachServer(AbstractAsyncContextManager["AttachServer"]):
    """All tunnels of the process. An async context manager: leaving it closes them in order."""

    def __init__(self, interpreter: Interpreter, pairs: Pairs, config: TunnelConfig | None = None) -> None:
        self.codec = TunnelCodec()
        self.counters = Counters()
        self.passed_over = 0
        """Messages of a type this version does not know, or that make no sense where they came."""
        self._interpreter = interpreter
        self._pairs = pairs
        self._config = config or TunnelConfig()
        self._registry = Registry(counters=self.counters)
        self._tunnels: dict[int, Tunnel] = {}
        self._routes: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def registry(self) -> Registry:
        """Routes, permits and tunnels held now."""
        return self._registry

    async def __aenter__(self) -> Self:
        await self._registry.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        for task in tuple(self._routes):
            task.cancel()
        if self._routes:
            await asyncio.wait(self._routes)
        await self._registry.__aexit__(kind, error, trace)

    def close(self) -> None:
        """Ends every tunnel in order; new ones are refused. Idempotent."""
        self._closing = True
        for tunnel in tuple(self._tunnels.values()):
            tunnel.close(CloseReason.SHUTDOWN, "the worker is shutting down")

    async def serve(self, carrier: Carrier, context: Any) -> None:
        """One Attach call, to its end."""
        handlers = Handlers(
            merge=merge_deltas, accept=self._accept, on_control=self._control, on_tunnel_lost=self._tunnel_lost
        )
        tunnel = Tunnel(carrier, self._registry, Side.ACCEPTING, handlers, self._config)
        self._tunnels[tunnel.tunnel_id] = tunnel
        metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
        self._pairs.opened(tunnel, str(metadata.get(ROUTER_KEY, "")))
        if self._closing:
            tunnel.close(CloseReason.SHUTDOWN, "the worker is shutting down")
        try:
            await serve_tunnel(tunnel, context)
        finally:
            self._tunnels.pop(tunnel.tunnel_id, None)
            self._pairs.lost(tunnel)

    def _tunnel_lost(self, tunnel: Tunnel, closed: Closed) -> None:
        log.info("tunnel ended", peer=tunnel.peer, reason=closed.reason.label, detail=closed.detail)
        self._interpreter.tunnel_lost(tunnel.tunnel_id)

    def _control(self, tunnel: Tunnel, payload: bytes) -> None:
        try:
            value = self.codec.decode(payload)
        except WireError as error:
            log.warning("control message refused", peer=tunnel.peer, reason=error.reason)
            return
        match value:
            case ElectTunnel():
                self._pairs.elected(tunnel, value.term)
            case SnapshotRequest():
                self._pairs.snapshot_wanted(tunnel)
            case _:
                self.passed_over += 1

    def _accept(self, route: Route, payload: bytes) -> None:
        try:
            value = self.codec.decode(payload)
        except WireError as error:
            route.close(CloseReason.PROTOCOL, str(error))
            return
        if not isinstance(value, Offer):
            self.passed_over += 1
            route.close(CloseReason.PROTOCOL, "a route begins with an offer")
            return
        if (problem := fault(value.request)) is not None:
            route.close(CloseReason.PROTOCOL, ": ".join(problem))
            return
        tunnel_id = route.tunnel_id
        outlet = RouteOutlet(route, self.codec, lambda: self._pairs.told(tunnel_id))
        task = asyncio.get_running_loop().create_task(self._hear(route, value.assignment, outlet))
        self._routes.add(task)
        task.add_done_callback(self._routes.discard)
        self._interpreter.offer(value, tunnel_id, outlet)

    async def _hear(self, route: Route, assignment: AssignmentId, outlet: RouteOutlet) -> None:
        """What follows the offer on its route, to the route's end."""
        while True:
            try:
                payload = await route.receive()
            except RouteClosedError as error:
                # Ended by us: all is said. Lost with its tunnel: the machine knows. Else the router wants no more.
                if error.closed.by_peer or error.closed.reason is CloseReason.RESOURCE_EXHAUSTED:
                    self._interpreter.abandoned(assignment, outlet)
                return
            try:
                value = self.codec.decode(payload)
            except WireError as error:
                log.warning("message refused", reason=error.reason)
                self._interpreter.abandoned(assignment, outlet)
                route.close(CloseReason.PROTOCOL, str(error))
                return
            if isinstance(value, Cancel):
                self._interpreter.cancel(value.assignment, value.epoch)
            else:
                self.passed_over += 1
