"""Two tunnels back to back, in memory or over gRPC through the fault proxy, with what a test wants to see recorded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from libs.tunnel import (
    ChannelLimits,
    Closed,
    CloseReason,
    Handlers,
    HealthLimits,
    Merge,
    Registry,
    Route,
    Side,
    Tunnel,
    TunnelConfig,
    never_merge,
)
from libs.tunnel.frames import Verify, verify_checksum
from libs.tunnel.grpc_carrier import Carrier, Context, dial, serve_tunnel
from tests.fixtures.attach_server import SERVICE, attach_server
from tests.fixtures.fault_proxy import FaultProxy
from tests.tunnel.carriers import MemoryCarrier, pair

LIMIT_S = 10.0

# Quick enough that a test sees every timer fire.
FAST = TunnelConfig(
    ping_interval_s=0.05,
    ping_jitter_s=0.01,
    ack_delay_s=0.01,
    goodbye_s=1.0,
    route=ChannelLimits(max_items=64, max_bytes=1 << 20, high_items=32, high_bytes=1 << 19, congested_s=0.2),
    health=HealthLimits(stall_s=0.2, pong_timeout_s=0.6),
)


async def until(condition: Callable[[], bool]) -> None:
    """Wait, with a deadline, for what another task brings about."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - any condition, not only those with an event
            await asyncio.sleep(0.001)


def concatenate(first: bytes, second: bytes) -> bytes | None:
    """The simplest merge: order and content stay visible."""
    return first + second


@dataclass
class End:
    """One end and what its handlers saw."""

    registry: Registry
    tunnel: Tunnel = field(init=False)
    run: asyncio.Task[Closed] = field(init=False)
    accepted: asyncio.Queue[tuple[Route, bytes]] = field(default_factory=asyncio.Queue)
    controls: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    # conn_id → how often and how its route ended, as the owner was told.
    closes: dict[int, list[Closed]] = field(default_factory=dict)
    dropped: list[tuple[int, CloseReason]] = field(default_factory=list)
    lost: list[Closed] = field(default_factory=list)

    def on_closed(self, route: Route, closed: Closed) -> None:
        self.closes.setdefault(route.conn_id, []).append(closed)

    def accept(self, route: Route, payload: bytes) -> None:
        route.on_closed = self.on_closed
        self.accepted.put_nowait((route, payload))

    def handlers(self, merge: Merge, accepts: bool) -> Handlers:
        return Handlers(
            merge=merge,
            accept=self.accept if accepts else None,
            on_control=lambda _tunnel, payload: self.controls.put_nowait(payload),
            on_route_dropped=lambda conn_id, reason: self.dropped.append((conn_id, reason)),
            on_tunnel_lost=lambda _tunnel, closed: self.lost.append(closed),
        )

    async def accepted_route(self) -> Route:
        async with asyncio.timeout(LIMIT_S):
            route, _ = await self.accepted.get()
            return route

    def assert_rest(self) -> None:
        held = self.registry.snapshot()
        assert (held.routes, held.bindings, held.permits, held.cleanups) == (0, 0, 0, 0)


@dataclass
class Pair:
    """A dialing and an accepting end on memory carriers."""

    dialing: End
    accepting: End
    dialing_carrier: MemoryCarrier
    accepting_carrier: MemoryCarrier

    async def open(self, payload: bytes = b"hello") -> tuple[Route, Route]:
        near = await self.dialing.tunnel.open(payload, self.dialing.on_closed)
        return near, await self.accepting.accepted_route()


@asynccontextmanager
async def memory(
    config: TunnelConfig = FAST,
    merge: Merge = never_merge,
    depth: int = 64,
    verify: Verify = verify_checksum,
    max_connections: int = 0,
) -> AsyncIterator[Pair]:
    """Two running tunnels; on exit both end and nothing may be held."""
    async with asyncio.timeout(30), Registry() as near, Registry(max_connections=max_connections) as far:
        carriers = pair(depth)
        ends = End(near), End(far)
        sides = Side.DIALING, Side.ACCEPTING
        for end, carrier, side in zip(ends, carriers, sides, strict=True):
            handlers = end.handlers(merge, side is Side.ACCEPTING)
            end.tunnel = Tunnel(carrier, end.registry, side, handlers, config, verify=verify)
            end.run = asyncio.create_task(end.tunnel.run())
        try:
            for end in ends:
                await end.tunnel.ready(LIMIT_S)
            yield Pair(*ends, *carriers)
            ends[0].tunnel.close()
            for end in ends:
                await asyncio.wait({end.run}, timeout=LIMIT_S)
                await end.registry.wait_rest(LIMIT_S)
                end.assert_rest()
                assert len(end.lost) == 1
        finally:
            for end in ends:
                end.run.cancel()
            await asyncio.gather(*(end.run for end in ends), return_exceptions=True)


@dataclass
class Server:
    """A gRPC server whose Attach accepts tunnels into one registry."""

    registry: Registry
    port: int
    server: grpc.aio.Server
    ends: list[End] = field(default_factory=list)
    arrived: asyncio.Queue[End] = field(default_factory=asyncio.Queue)


@asynccontextmanager
async def grpc_server(
    config: TunnelConfig = FAST, merge: Merge = never_merge, on_accept: Callable[[Route, bytes], None] | None = None
) -> AsyncIterator[Server]:
    """Serves segue.v1.Worker on a free port."""
    async with Registry() as registry:
        rig: Server

        async def attach(carrier: Carrier, context: Context) -> None:
            end = End(registry)
            handlers = end.handlers(merge, True)
            if on_accept is not None:
                handlers = Handlers(merge=merge, accept=on_accept)
            end.tunnel = Tunnel(carrier, registry, Side.ACCEPTING, handlers, config)
            rig.ends.append(end)
            rig.arrived.put_nowait(end)
            await serve_tunnel(end.tunnel, context)

        server = attach_server(attach)
        port = server.add_insecure_port("127.0.0.1:0")
        rig = Server(registry, port, server)
        await server.start()
        try:
            yield rig
        finally:
            await server.stop(0.2)


@asynccontextmanager
async def grpc_dial(
    address: str, registry: Registry, config: TunnelConfig = FAST, merge: Merge = never_merge
) -> AsyncIterator[End]:
    """A running dialed tunnel, ready."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        end = End(registry)
        carrier = dial(channel, address, SERVICE)
        end.tunnel = Tunnel(carrier, registry, Side.DIALING, end.handlers(merge, False), config)
        end.run = asyncio.create_task(end.tunnel.run())
        try:
            await end.tunnel.ready(LIMIT_S)
            yield end
        finally:
            end.tunnel.close()
            done, _ = await asyncio.wait({end.run}, timeout=LIMIT_S)
            end.run.cancel()
            await asyncio.gather(end.run, return_exceptions=True)
            assert done, "the tunnel did not end by itself"


@asynccontextmanager
async def proxied(
    config: TunnelConfig = FAST, merge: Merge = never_merge
) -> AsyncIterator[tuple[End, Server, FaultProxy]]:
    """A dialed tunnel through a fault proxy to a server."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(40))
        server = await stack.enter_async_context(grpc_server(config, merge))
        proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", server.port))
        registry = await stack.enter_async_context(Registry())
        end = await stack.enter_async_context(grpc_dial(proxy.address, registry, config, merge))
        yield end, server, proxy
