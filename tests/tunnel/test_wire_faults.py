"""Real gRPC streams through a fault proxy: whatever breaks, each session gets exactly one close and nothing leaks."""

import asyncio
import random
import subprocess
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from libs.contracts.segue.v1 import tunnel_pb2, worker_pb2_grpc
from libs.tunnel import CarrierLostError, Closed, CloseReason, FrameKind, Registry, Route, RouteClosedError
from libs.tunnel.frames import encode, encode_u64
from libs.tunnel.grpc_carrier import dial
from tests.fixtures.attach_server import SERVICE
from tests.fixtures.fault_proxy import Direction, FaultProxy
from tests.tunnel.harness import FAST, LIMIT_S, End, Server, grpc_dial, grpc_server, proxied, until


async def bound(end: End, server_end: End, count: int) -> list[Route]:
    routes = [await end.tunnel.open(b"open", end.on_closed) for _ in range(count)]
    for _ in routes:
        await server_end.accepted_route()
    return routes


async def assert_lost(end: End, server: Server, server_end: End, routes: list[Route], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        closed = await end.run
    assert closed.reason is CloseReason.PEER_LOST and not closed.by_peer
    for registry in (end.registry, server.registry):
        await registry.wait_rest(limit_s)
        assert registry.snapshot().bindings == 0
    for side in (end, server_end):
        assert {conn_id: [c.reason for c in ends] for conn_id, ends in side.closes.items()} == {
            route.conn_id: [CloseReason.PEER_LOST] for route in routes
        }
        assert len(side.lost) == 1


async def test_round_trip_over_grpc() -> None:
    async with proxied() as (end, server, _):
        server_end = await server.arrived.get()
        near = await end.tunnel.open(b"hello")
        far = await server_end.accepted_route()
        payload = bytes(range(256)) * 4096
        far.post(payload)
        near.try_send(b"up")
        assert await near.receive(LIMIT_S) == payload
        assert await far.receive(LIMIT_S) == b"up"
        far.close()
        assert [piece async for piece in near] == []


@pytest.mark.parametrize("fault", ["reset", "cut", "half_close_up", "half_close_down"])
async def test_a_broken_connection_is_seen_at_once(fault: str) -> None:
    async with proxied() as (end, server, proxy):
        server_end = await server.arrived.get()
        routes = await bound(end, server_end, 20)
        started = time.monotonic()
        if fault == "reset":
            proxy.reset()
        elif fault == "cut":
            proxy.cut_after(10)
        elif fault == "half_close_up":
            proxy.half_close(Direction.UP)
        else:
            proxy.half_close(Direction.DOWN)
        await assert_lost(end, server, server_end, routes, LIMIT_S)
        assert time.monotonic() - started < 3 * FAST.health.pong_timeout_s


@pytest.mark.parametrize("directions", [{Direction.UP}, {Direction.DOWN}, set(Direction)])
async def test_a_silent_network_is_found_by_pings(directions: set[Direction]) -> None:
    async with proxied() as (end, server, proxy):
        server_end = await server.arrived.get()
        routes = await bound(end, server_end, 20)
        proxy.blackhole(directions=frozenset(directions))
        await assert_lost(end, server, server_end, routes, FAST.health.pong_timeout_s * 4 + 2)


async def test_delay_degrades_and_health_returns() -> None:
    async with proxied() as (end, _, proxy):
        health = end.tunnel.health
        await until(lambda: len(health._samples) >= 5)
        proxy.delay(0.15)
        await until(lambda: health.degraded)
        proxy.heal()
        await until(lambda: not health.degraded)
        assert end.tunnel.closed is None


async def test_server_shutdown_is_an_expected_end() -> None:
    async with proxied() as (end, server, _):
        server_end = await server.arrived.get()
        near = await end.tunnel.open(b"x", end.on_closed)
        await server_end.accepted_route()
        server_end.tunnel.close(CloseReason.SHUTDOWN, "leaving")
        async with asyncio.timeout(LIMIT_S):
            assert await end.run == Closed(CloseReason.SHUTDOWN, "leaving", by_peer=True)
        with pytest.raises(RouteClosedError) as caught:
            await near.receive(LIMIT_S)
        assert caught.value.closed.reason is CloseReason.SHUTDOWN


@pytest.mark.parametrize("closer", ["client", "server"])
async def test_an_orderly_close_loses_nothing_on_the_way(closer: str) -> None:
    # However long the bytes take on a busy machine: neither end may lose patience meanwhile.
    patient = replace(FAST, goodbye_s=LIMIT_S, health=replace(FAST.health, stall_s=LIMIT_S, pong_timeout_s=LIMIT_S))
    async with proxied(patient) as (end, server, proxy):
        server_end = await server.arrived.get()
        near = await end.tunnel.open(b"x")
        far = await server_end.accepted_route()
        proxy.delay(0.05)
        this, sender, receiver = (end, near, far) if closer == "client" else (server_end, far, near)
        payloads = [bytes([index]) * 20_000 for index in range(20)]
        for payload in payloads:
            sender.try_send(payload)
        this.tunnel.close(CloseReason.RETIRED)
        received: list[bytes] = []
        with pytest.raises(RouteClosedError) as caught:
            while True:
                received.append(await receiver.receive(LIMIT_S))
        assert b"".join(received) == b"".join(payloads)
        assert caught.value.closed == Closed(CloseReason.RETIRED, "", by_peer=True)


async def test_a_handler_killed_by_server_stop_leaks_nothing() -> None:
    async with proxied() as (end, server, _):
        server_end = await server.arrived.get()
        await bound(end, server_end, 10)
        await server.server.stop(0)
        async with asyncio.timeout(LIMIT_S):
            assert (await end.run).reason is CloseReason.PEER_LOST
        await server.registry.wait_rest(LIMIT_S)
        assert [len(ends) for ends in server_end.closes.values()] == [1] * 10


async def test_nobody_there() -> None:
    async with Registry() as registry, FaultProxy("127.0.0.1", 1) as proxy:
        proxy.refuse = True
        async with grpc.aio.insecure_channel(proxy.address) as channel:
            carrier = dial(channel, proxy.address, SERVICE)
            with pytest.raises(CarrierLostError, match="UNAVAILABLE"):
                async with asyncio.timeout(LIMIT_S):
                    await carrier.read()
            assert registry.snapshot().tunnels == 0


async def test_random_kills_under_load() -> None:
    """Routes open, exchange and close on four tunnels while connections are killed; every session ends exactly once."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(40))

        def serve(route: Route, payload: bytes) -> None:
            for index in range(8):
                route.post(b"%d" % index)
            route.close(CloseReason.DONE)

        server = await stack.enter_async_context(grpc_server(FAST, on_accept=serve))
        registry = await stack.enter_async_context(Registry())
        ends: dict[int, int] = {}
        outcomes = {"done": 0, "lost": 0}
        refused = 0

        def on_closed(route: Route, _closed: Closed) -> None:
            ends[route.conn_id] = ends.get(route.conn_id, 0) + 1

        async def client(end: End) -> None:
            nonlocal refused
            while end.tunnel.closed is None:
                try:
                    route = await end.tunnel.open(b"go", on_closed)
                except Exception:
                    refused += 1
                    return
                opened.append(route.conn_id)
                received: list[bytes] = []
                try:
                    async for payload in route:
                        received.append(payload)  # noqa: PERF401 - kept when the iteration raises
                except RouteClosedError:
                    outcomes["lost"] += 1
                    assert received == [b"%d" % index for index in range(len(received))]
                else:
                    outcomes["done"] += 1
                    assert received == [b"%d" % index for index in range(8)]

        opened: list[int] = []

        async def life(proxy: FaultProxy) -> None:
            for _ in range(4):
                async with grpc_dial(proxy.address, registry) as end:
                    clients = [asyncio.create_task(client(end)) for _ in range(25)]
                    await asyncio.sleep(rng.uniform(0.05, 0.15))
                    fault = rng.choice(["reset", "blackhole", "cut", "half", "cancel"])
                    if fault == "reset":
                        proxy.reset()
                    elif fault == "blackhole":
                        proxy.blackhole()
                    elif fault == "cut":
                        proxy.cut_after(rng.randrange(2000))
                    elif fault == "half":
                        proxy.half_close(rng.choice(list(Direction)))
                    else:
                        end.run.cancel()
                    await asyncio.wait({end.run}, timeout=LIMIT_S)
                    assert end.run.done(), fault
                    await asyncio.gather(*clients)
                    proxy.heal()
                    proxy.reset()

        proxies = [await stack.enter_async_context(FaultProxy("127.0.0.1", server.port)) for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            for proxy in proxies:
                group.create_task(life(proxy))
        await registry.wait_rest(LIMIT_S)
        await server.registry.wait_rest(LIMIT_S)
        assert ends == dict.fromkeys(opened, 1)
        assert outcomes["done"] + outcomes["lost"] == len(opened) > 100
        assert registry.snapshot().tunnels == 0
        print(f"{len(opened)} routes, {outcomes}, {refused} refused")


class TestInterop:
    """The wire is the generated service's: either end may be generated code."""

    async def test_a_generated_stub_talks_to_a_tunnel(self) -> None:
        async with grpc_server() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Attach()
            nonce = encode_u64(7)
            await call.write(tunnel_pb2.Frame.FromString(encode(FrameKind.PING, 1, [(0, nonce)])))
            async with asyncio.timeout(LIMIT_S):
                while True:
                    frame = await call.read()
                    if frame.kind == tunnel_pb2.FRAME_KIND_PONG:
                        break
            assert frame.items[0].payload == nonce
            call.cancel()

    async def test_a_corrupt_peer_sees_it_in_its_status(self) -> None:
        async with grpc_server() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Attach()
            await call.write(tunnel_pb2.Frame(kind=1, seq=1, crc32=1, items=[tunnel_pb2.Item(conn_id=1, payload=b"x")]))
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    while await call.read() is not grpc.aio.EOF:
                        pass
            assert caught.value.code() is grpc.StatusCode.DATA_LOSS
            assert server.registry.counters.corrupt == {"checksum": 1}
            assert server.registry.counters.routes_opened == 0


def test_imports_nothing_of_the_controller() -> None:
    """The tunnel is a library of its own worth."""
    found = subprocess.run(
        ["grep", "-rnE", r"libs\.(controller|continuation|service|pool|chunks)", "libs/tunnel"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""
