"""The receiving end of the frames' bench, and its rounds: `python -m prove.frame_bench ROUNDS UNITS PACED`.

Everything stands before the first round: the bare streams, one and eight; a pool with one tunnel, another with eight, a
thousand routes on each, each with its listener, as the router has them. Then they send in turn, in each of the shapes,
the order changing, and again at a pace for their latency. Prints one line of JSON: by shape and line and round, units
per second; by line and round, the p50 of the latencies in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import grpc.aio
import uvloop

from libs.pool.knobs import FloorMode, PoolPolicy
from libs.pool.model import CellTarget, Endpoint
from libs.pool.pool import TunnelPool
from libs.tunnel import Carrier, FrameKind, Registry
from libs.tunnel.frames import encode
from libs.tunnel.grpc_carrier import dial
from prove.frame_server import CONFIG, PAYLOAD_BYTES, STAMP, STREAM
from prove.pooled import until
from prove.processes import started
from tests.fixtures.attach_server import SERVICE

ROUTES, MANY, LANES = 1_000, 8, 8
PACE_US = 2_000
"""Between two turns where latency is measured, all lines together: five hundred a second."""
_ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 120.0
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True)
class Shape:
    """What is compared. `unit`: payloads that a message of the bare stream stands for; `size`: its bytes."""

    lanes: int
    most: int
    unit: int
    size: int


def _frame_bytes(items: int) -> int:
    return len(encode(FrameKind.DATA, 5_000, [(500 + i, b"x" * PAYLOAD_BYTES) for i in range(items)]))


SHAPES = {
    # One payload a turn, one a frame: nothing is gained by batching.
    "single": Shape(lanes=1, most=1, unit=1, size=_frame_bytes(1)),
    # What one turn of the loop has for all lanes, as the tunnel carries it; the stream carries the same payloads.
    "payload": Shape(lanes=LANES, most=CONFIG.max_items, unit=1, size=PAYLOAD_BYTES),
    # A frame that holds exactly one turn of all lanes; the stream is given its bytes as one message.
    "full": Shape(lanes=LANES, most=LANES, unit=LANES, size=_frame_bytes(LANES)),
}


class Line(Protocol):
    """Something that carries payloads."""

    async def carry(self, shape: Shape, units: int, pace_us: int) -> tuple[float, list[float]]:
        """So many units in all: seconds from the word to the last one, and at a pace latencies in ms."""
        ...


class Bare:
    """Streams of the library alone."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    async def carry(self, shape: Shape, units: int, pace_us: int) -> tuple[float, list[float]]:
        """See Line."""
        each, latencies = units // len(self._calls), list[float]()

        async def read(number: int, call: Any) -> None:
            await asyncio.sleep(number * pace_us / len(self._calls) / 1e6)
            await call.write(b"%d %d %d" % (each, pace_us, shape.size))
            for _ in range(each):
                message = await call.read()
                if pace_us:
                    latencies.append(_age_ms(message))

        began = time.perf_counter()
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
            for number, call in enumerate(self._calls):
                group.create_task(read(number, call))
        return time.perf_counter() - began, latencies


class Pooled:
    """Tunnels of a pool, and a listener for each of their routes."""

    def __init__(self, pool: TunnelPool, registry: Registry) -> None:
        self._pool, self._registry = pool, registry
        self._latencies: list[float] = []
        self._received, self._due, self._stamped = 0, 0, False
        self._whole = asyncio.Event()

    async def carry(self, shape: Shape, units: int, pace_us: int) -> tuple[float, list[float]]:
        """See Line."""
        writers = self._pool.writers()
        turns = units * shape.unit // shape.lanes // len(writers)
        self._latencies, self._received, self._stamped = [], 0, bool(pace_us)
        self._due = turns * shape.lanes * len(writers)
        self._whole.clear()
        frames = self._registry.counters.frames_received
        began = time.perf_counter()
        for number, writer in enumerate(writers):
            if number:
                # At a pace, one after the other and not all at once.
                await asyncio.sleep(pace_us / len(writers) / 1e6)
            writer.tunnel.try_control(b"%d %d %d %d" % (turns, pace_us, shape.lanes, shape.most))
        async with asyncio.timeout(_LIMIT_S):
            await self._whole.wait()
        took = time.perf_counter() - began
        # Frames that are bounded cannot be fewer.
        assert self._registry.counters.frames_received - frames >= self._due // shape.most
        return took, self._latencies

    def consume(self, payloads: list[bytes]) -> None:
        """What comes on one route, as the router listens to it."""
        self._received += len(payloads)
        if self._stamped:
            self._latencies += map(_age_ms, payloads)
        if self._received >= self._due:
            self._whole.set()


def _age_ms(message: bytes) -> float:
    return float(time.monotonic_ns() - STAMP.unpack_from(message)[0]) / 1e6


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
        for number in range(ROUTES):
            route = await pool.bind(CellTarget("A"), b"open")
            route.listen(made.consume)
            if number % 50 == 0:
                await until(lambda: not any(writer.tunnel.writer.waiting_items for writer in pool.writers()))
        assert all(writer.tunnel.routes for writer in pool.writers())
        yield made


async def rounds(count: int, units: int, paced: int) -> dict[str, dict[str, list[float]]]:
    """All of them; `units` as fast as they go, `paced` turns of all lanes at a pace."""
    async with AsyncExitStack() as stack:
        argv = [sys.executable, "-m", "prove.frame_server"]
        server = await stack.enter_async_context(started(argv, cwd=_ROOT, talk=True))
        assert server.stdout is not None
        address = f"127.0.0.1:{json.loads(await server.stdout.readline())['port']}"
        lines: dict[str, Line] = {}
        for many in (1, MANY):
            lines[f"bare {many}"] = await stack.enter_async_context(bare(address, many))
            lines[f"tunnel {many}"] = await stack.enter_async_context(tunnelled(address, many))
        found: dict[str, dict[str, list[float]]] = {name: {} for name in (*SHAPES, "p50_ms")}
        for number in range(-1, count):
            order = list(lines) if number % 2 else list(reversed(lines))
            for shape, kind in SHAPES.items():
                for name in order:
                    seconds, _ = await lines[name].carry(kind, units, 0)
                    if number >= 0:  # the first warms up
                        found[shape].setdefault(name, []).append(round(units / seconds, 1))
            for name in order:
                _, latencies = await lines[name].carry(SHAPES["full"], paced, PACE_US * int(name.split()[1]))
                if number >= 0:
                    found["p50_ms"].setdefault(name, []).append(round(median(latencies), 4))
        return found


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(rounds(*map(int, sys.argv[1:4])))))
