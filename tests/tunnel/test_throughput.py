"""A sanity check, not a benchmark: the tunnel's cost per frame over a bare grpc.aio stream of the same bytes.

Both ends share one process for the bare stream as for the tunnel, so the ratio counts the CPU of both ends, and the
waking of a thousand consumers. The bound asserted is far below what is expected, for machines that are busy; the
numbers are printed.
"""

import asyncio
import dataclasses
import time

import grpc
import grpc.aio
import pytest

from libs.tunnel import Registry, Route, TunnelConfig
from tests.tunnel.harness import LIMIT_S, grpc_dial, grpc_server, until

ROUTES = 1000
ITEMS_PER_FRAME = 8
PAYLOAD = b"x" * 100
FRAMES = 1500
CONFIG = dataclasses.replace(TunnelConfig(), max_items=ITEMS_PER_FRAME)


async def bare(message: bytes, count: int) -> float:
    """Messages per second of a bare stream, server to client."""

    async def stream(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(count):
            await context.write(message)

    handler = grpc.unary_stream_rpc_method_handler(stream)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"S": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream("/t.T/S", None, None)(b"")
            await call.read()
            started = time.perf_counter()
            received = 1
            while await call.read() is not grpc.aio.EOF:
                received += 1
            elapsed = time.perf_counter() - started
            assert received == count
            return count / elapsed
    finally:
        await server.stop(0)


async def tunnelled() -> tuple[float, float]:
    """Frames and items per second of a tunnel with ROUTES open routes, server to client."""
    routes: list[Route] = []
    async with (
        grpc_server(CONFIG, on_accept=lambda route, _payload: routes.append(route)) as server,
        Registry() as registry,
        grpc_dial(f"127.0.0.1:{server.port}", registry, CONFIG) as end,
    ):
        near = []
        for _ in range(ROUTES):
            near.append(await end.tunnel.open(b"open"))
            if len(near) % 100 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: len(routes) == ROUTES)
        expected = FRAMES * ITEMS_PER_FRAME
        received = 0
        done = asyncio.Event()

        def consume(payloads: list[bytes]) -> None:
            nonlocal received
            received += len(payloads)
            if received >= expected:
                done.set()

        for route in near:
            route.listen(consume)
        before = registry.counters.frames_received
        started = time.perf_counter()
        for first in range(0, expected, ITEMS_PER_FRAME):
            for index in range(first, first + ITEMS_PER_FRAME):
                await routes[index % ROUTES].send(PAYLOAD, LIMIT_S)
            if first % 512 == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT_S):
            await done.wait()
        elapsed = time.perf_counter() - started
        frames = registry.counters.frames_received - before
        for route in near:
            route.close()
        await registry.wait_rest(LIMIT_S)
        return frames / elapsed, received / elapsed


async def test_cost_over_a_bare_stream(capsys: pytest.CaptureFixture[str]) -> None:
    message = b"x" * (ITEMS_PER_FRAME * (len(PAYLOAD) + 8) + 12)
    bare_rate = max([await bare(message, FRAMES) for _ in range(2)])
    frames, items = max([await tunnelled() for _ in range(2)])
    with capsys.disabled():
        print(
            f"\nbare stream {bare_rate:,.0f} messages/s of {len(message)} bytes; tunnel {frames:,.0f} frames/s"
            f" ({frames / bare_rate:.2f} of bare), {items:,.0f} items/s over {ROUTES} routes"
        )
    assert frames / bare_rate > 0.15
