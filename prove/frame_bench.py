"""The receiving end of the frames' bench, and its rounds: `python -m prove.frame_bench ROUNDS FRAMES PACED`.

Everything stands before the first round: the bare streams, one and eight; a pool with one tunnel, another with eight, a
thousand routes on each. Then the four send in turn, the order changing, and again at a pace for their latency. Prints
one line of JSON: for each, by round, messages or frames per second and the p50 of the latencies in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import grpc.aio
import uvloop

from libs.pool.knobs import FloorMode, PoolPolicy
from libs.pool.model import CellTarget, Endpoint
from libs.pool.pool import TunnelPool
from libs.tunnel import Carrier, Registry, Route, RouteClosedError
from libs.tunnel.grpc_carrier import dial
from prove.frame_server import CONFIG, ITEMS, SERVICE, STAMP, STREAM
from prove.pooled import until
from prove.processes import started

ROUTES = 1_000
MANY = 8
PACE_US = 2_000
"""Between two frames where latency is measured, all lines together: five hundred a second."""
_ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 120.0
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


class Line(Protocol):
    """Something that carries messages."""

    async def carry(self, count: int, pace_us: int) -> tuple[float, list[float]]:
        """So many messages or frames in all: seconds from the word to the last one, latencies in ms."""
        ...


class Bare:
    """Streams of the library alone."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    async def carry(self, count: int, pace_us: int) -> tuple[float, list[float]]:
        """See Line."""
        each, latencies = count // len(self._calls), list[float]()

        async def read(call: Any) -> None:
            await call.write(b"%d %d" % (each, pace_us))
            for _ in range(each):
                message = await call.read()
                latencies.append((time.monotonic_ns() - STAMP.unpack_from(message)[0]) / 1e6)

        began = time.perf_counter()
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
            for call in self._calls:
                group.create_task(read(call))
        return time.perf_counter() - began, latencies


class Pooled:
    """Tunnels of a pool, and a consumer for each of their routes."""

    def __init__(self, pool: TunnelPool, registry: Registry) -> None:
        self._pool, self._registry = pool, registry
        self._latencies: list[float] = []
        self._due = 0
        self._whole = asyncio.Event()

    async def carry(self, count: int, pace_us: int) -> tuple[float, list[float]]:
        """See Line."""
        writers = self._pool.writers()
        self._latencies, self._due = [], count // len(writers) * len(writers) * ITEMS
        self._whole.clear()
        frames = self._registry.counters.frames_received
        began = time.perf_counter()
        for writer in writers:
            writer.tunnel.try_control(b"%d %d" % (count // len(writers), pace_us))
        async with asyncio.timeout(_LIMIT_S):
            await self._whole.wait()
        took = time.perf_counter() - began
        # One iteration, one frame: the tunnel may not make fewer of them.
        assert self._registry.counters.frames_received - frames >= self._due // ITEMS
        return took, self._latencies

    async def consume(self, route: Route) -> None:
        """What comes on one route, to its end."""
        try:
            while True:
                for payload in await route.receive_all():
                    self._latencies.append((time.monotonic_ns() - STAMP.unpack_from(payload)[0]) / 1e6)
                if len(self._latencies) >= self._due:
                    self._whole.set()
        except RouteClosedError:
            return


@asynccontextmanager
async def bare(address: str, count: int) -> AsyncIterator[Bare]:
    """So many streams, each on a connection of its own."""
    async with AsyncExitStack() as stack:
        calls = []
        for _ in range(count):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
            call = channel.stream_stream(f"/{STREAM}/Echo", None, None)()
            stack.callback(call.cancel)
            calls.append(call)
        yield Bare(calls)


@asynccontextmanager
async def dialled(endpoint: Endpoint) -> AsyncIterator[Carrier]:
    """As a service dials."""
    async with grpc.aio.insecure_channel(endpoint.address, options=_OPTIONS) as channel:
        yield dial(channel, endpoint.address, SERVICE)


@asynccontextmanager
async def tunnelled(address: str, count: int) -> AsyncIterator[Pooled]:
    """A pool of so many tunnels, a thousand routes over them."""
    policy = PoolPolicy(floor_mode=FloorMode.STATIC, reinit_interval_s=0, writers_per_endpoint=count)
    async with Registry() as registry, TunnelPool(registry, dialled, None, policy, config=CONFIG) as pool:
        pool.observe([Endpoint("w", address, ("A",))], 1)
        await until(lambda: len(pool.writers()) == count)
        made = Pooled(pool, registry)
        consumers = []
        for number in range(ROUTES):
            route = await pool.bind(CellTarget("A"), b"open")
            consumers.append(asyncio.create_task(made.consume(route)))
            if number % 50 == 0:
                await until(lambda: not any(writer.tunnel.writer.waiting_items for writer in pool.writers()))
        assert all(writer.tunnel.routes for writer in pool.writers())
        yield made
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)


async def rounds(count: int, frames: int, paced: int) -> dict[str, dict[str, list[float]]]:
    """All of them; `frames` as fast as they go, `paced` at a pace."""
    async with AsyncExitStack() as stack:
        argv = [sys.executable, "-m", "prove.frame_server"]
        server = await stack.enter_async_context(started(argv, cwd=_ROOT, talk=True))
        assert server.stdout is not None
        address = f"127.0.0.1:{json.loads(await server.stdout.readline())['port']}"
        lines: dict[str, Line] = {}
        for many in (1, MANY):
            lines[f"bare {many}"] = await stack.enter_async_context(bare(address, many))
            lines[f"tunnel {many}"] = await stack.enter_async_context(tunnelled(address, many))
        found: dict[str, dict[str, list[float]]] = {name: {"per_s": [], "p50_ms": []} for name in lines}
        for number in range(-1, count):
            for name in list(lines) if number % 2 else reversed(list(lines)):
                seconds, _ = await lines[name].carry(frames, 0)
                _, latencies = await lines[name].carry(paced, PACE_US * int(name.split()[1]))
                if number >= 0:  # the first warms up
                    found[name]["per_s"].append(round(frames / seconds, 1))
                    found[name]["p50_ms"].append(round(median(latencies), 4))
        return found


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(rounds(*map(int, sys.argv[1:4])))))
