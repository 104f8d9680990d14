"""The accepting end of the ingresses' tunnels: submissions and cancels in, deliveries out.

One route per request, opened by its submission; a small task per route hears its cancel. A route that ends before its
request does (its ingress closed it, was lost, or read too slowly) cancels that request and no other.

At the end of the process new submissions are refused by closing their route with SHUTDOWN, which an ingress answers by
going to another router; a tunnel without requests is closed at once, one with requests when the last of them has ended
or the grace is over (then its ingress resubmits what still runs elsewhere, with what was delivered).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from libs.controller.errors import WireError
from libs.controller.merging import merge_deliveries
from libs.controller.protocol import CancelRequest, Delivery, Submission, TokensDelivery
from libs.controller.wire import AttachCodec
from libs.service.logs import get_logger
from libs.tunnel import (
    Carrier,
    Closed,
    CloseReason,
    Handlers,
    PayloadTooLargeError,
    Registry,
    Route,
    RouteClosedError,
    Side,
    Tunnel,
    TunnelConfig,
)
from libs.tunnel.grpc_carrier import serve_tunnel
from services.router.clock import Spawn
from services.router.requests import Requests

log = get_logger(__name__)


class RouteSink:
    """A requester on a tunnel."""

    def __init__(self, route: Route, codec: AttachCodec) -> None:
        self._route, self._codec = route, codec
        self.ended = False
        """Whether it had its terminal delivery."""

    def deliver(self, delivery: Delivery) -> None:
        """See Sink. A route that cannot take more is dropped by the tunnel, which cancels its request."""
        terminal = not isinstance(delivery, TokensDelivery)
        self.ended = self.ended or terminal
        try:
            self._route.post(self._codec.encode(delivery))
        except RouteClosedError:
            return
        except PayloadTooLargeError:
            self._route.close(CloseReason.PROTOCOL, "a delivery exceeds the tunnel's frame size")
        if terminal:
            self._route.close(CloseReason.DONE)


@dataclass
class AttachCounters:
    """Exported as metrics."""

    tunnels: int = field(default=0, metadata={"help": "Tunnels from ingresses that are up", "kind": "gauge"})
    refused: int = field(default=0, metadata={"help": "Submissions refused while stopping"})
    slow: int = field(default=0, metadata={"help": "Requests dropped because their ingress read too slowly"})


class AttachServer:
    """All tunnels from ingresses."""

    def __init__(
        self, registry: Registry, requests: Requests, spawn: Spawn, config: TunnelConfig | None = None
    ) -> None:
        self.codec = AttachCodec()
        self.counters = AttachCounters()
        self._registry = registry
        self._requests = requests
        self._spawn = spawn
        self._config = config
        self._tunnels: dict[int, Tunnel] = {}
        self._draining = False

    async def serve(self, carrier: Carrier, context: Any) -> None:
        """One Attach call, to its end."""
        handlers = Handlers(merge=merge_deliveries, accept=self._accept, on_tunnel_lost=self._lost)
        tunnel = Tunnel(carrier, self._registry, Side.ACCEPTING, handlers, self._config)
        self._tunnels[tunnel.tunnel_id] = tunnel
        self.counters.tunnels = len(self._tunnels)
        log.info("ingress connected", peer=tunnel.peer)
        if self._draining:
            tunnel.close(CloseReason.SHUTDOWN, "the router is shutting down")
        try:
            await serve_tunnel(tunnel, context)
        finally:
            self._tunnels.pop(tunnel.tunnel_id, None)
            self.counters.tunnels = len(self._tunnels)

    def drain(self) -> None:
        """Takes no new request; closes the tunnels that carry none. Idempotent."""
        self._draining = True
        for tunnel in tuple(self._tunnels.values()):
            self._close_if_idle(tunnel)

    def close(self) -> None:
        """Closes every tunnel, whatever it carries. After `drain`."""
        for tunnel in tuple(self._tunnels.values()):
            tunnel.close(CloseReason.SHUTDOWN, "the router is shutting down")

    def _close_if_idle(self, tunnel: Tunnel) -> None:
        if self._draining and not tunnel.routes:
            tunnel.close(CloseReason.SHUTDOWN, "the router is shutting down")

    def _lost(self, tunnel: Tunnel, closed: Closed) -> None:
        log.info("ingress disconnected", peer=tunnel.peer, reason=closed.reason.label, detail=closed.detail)

    def _accept(self, route: Route, payload: bytes) -> None:
        if self._draining:
            self.counters.refused += 1
            route.close(CloseReason.SHUTDOWN, "the router is shutting down")
            return
        try:
            value = self.codec.decode(payload)
        except WireError as error:
            route.close(CloseReason.PROTOCOL, str(error))
            return
        if not isinstance(value, Submission):
            self.codec.counts["out-of-place"] += 1
            route.close(CloseReason.PROTOCOL, "a route begins with a submission")
            return
        sink = RouteSink(route, self.codec)
        route.on_closed = self._closed
        origin = self._requests.submit(value, sink, route.tunnel_id)
        self._spawn(self._hear(route, origin, sink), "requester")

    async def _hear(self, route: Route, origin: int, sink: RouteSink) -> None:
        """What follows the submission on its route, to the route's end."""
        try:
            while True:
                try:
                    payload = await route.receive()
                    value = self.codec.decode(payload)
                except RouteClosedError as error:
                    if not sink.ended and error.closed.reason is CloseReason.RESOURCE_EXHAUSTED:
                        self.counters.slow += 1
                    return
                except WireError as error:
                    route.close(CloseReason.PROTOCOL, str(error))
                    return
                if isinstance(value, CancelRequest):
                    self._requests.cancel(origin)
                else:
                    self.codec.counts["out-of-place"] += 1
        finally:
            self._requests.cancel(origin)

    def _closed(self, route: Route, _closed: Closed) -> None:
        tunnel = self._tunnels.get(route.tunnel_id)
        if tunnel is not None:
            self._close_if_idle(tunnel)
