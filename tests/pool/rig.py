"""Echo workers behind real sockets, and a pool that dials them."""

import asyncio
import random
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc.aio

from libs.pool.hooks import Hooks, Loss, Writer
from libs.pool.knobs import FloorMode, PoolPolicy
from libs.pool.model import Endpoint
from libs.pool.pool import TunnelPool
from libs.tunnel import Carrier, Closed, CloseReason, Handlers, Registry, Route, RouteClosedError, Side, Tunnel
from libs.tunnel.grpc_carrier import Context, dial, serve_tunnel
from tests.fixtures.attach_server import SERVICE, attach_server
from tests.tunnel.harness import FAST, LIMIT_S

T = TypeVar("T")

# Nothing periodic, every wait short.
CALM = PoolPolicy(
    floor_mode=FloorMode.STATIC,
    reinit_interval_s=0,
    keepalive_s=0.2,
    keepalive_jitter_s=0.05,
    fast_retry_s=0.05,
    reconnect_min_s=0.05,
    reconnect_max_s=0.1,
    flap_s=0,
    map_coalesce_s=0.02,
    vanish_grace_s=0.3,
    no_coverage_wait_s=5.0,
    connect_s=5.0,
    partial_after_s=0.2,
    recovery_grace_s=0,
)


def joined(first: bytes, second: bytes) -> bytes | None:
    """Echoed payloads are runs of tokens."""
    return first + second


class EchoWorker:
    """Serves Attach: sends every payload of a route back, ends the route on b"bye"; b"stream N" is answered by N
    tokens and the end."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        self.name, self.host, self.port = name, host, 0
        self.incarnation = 0
        self.tunnels: list[Tunnel] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self._registry: Registry | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def endpoint(self, *cells: str) -> Endpoint:
        return Endpoint(self.name, self.address, cells or ("A",), self.incarnation)

    async def start(self) -> None:
        """A new process, as far as anybody can see."""
        self.incarnation += 1
        self._registry = registry = Registry()
        await registry.__aenter__()

        async def attach(carrier: Carrier, context: Context) -> None:
            tunnel = Tunnel(carrier, registry, Side.ACCEPTING, Handlers(merge=joined, accept=self._accept), FAST)
            self.tunnels.append(tunnel)
            await serve_tunnel(tunnel, context)

        server = attach_server(attach)
        self.port = server.add_insecure_port(self.address)
        await server.start()
        self._server = server

    async def kill(self) -> None:
        """At once, nothing said."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        registry, self._registry = self._registry, None
        if registry is not None:
            await registry.__aexit__(None, None, None)
        self.tunnels.clear()

    async def leave(self) -> None:
        """In order: says goodbye on every tunnel."""
        for tunnel in self.tunnels:
            tunnel.close(CloseReason.SHUTDOWN, "the worker leaves")
        async with asyncio.timeout(LIMIT_S):
            while any(tunnel.routes or tunnel.closed is None for tunnel in self.tunnels):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        await self.kill()

    def _accept(self, route: Route, payload: bytes) -> None:
        task = asyncio.create_task(self._serve(route, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, route: Route, payload: bytes) -> None:
        try:
            if payload.startswith(b"stream "):
                for number in range(int(payload.split()[1])):
                    route.post(bytes([number % 251]))
                    await asyncio.sleep(0)
                route.close(CloseReason.DONE)
                return
            route.post(payload)
            async for more in route:
                if more == b"bye":
                    route.close(CloseReason.DONE)
                    return
                route.post(more)
        except RouteClosedError:
            return


@dataclass
class Seen:
    """What the pool told its user."""

    up: list[Writer] = field(default_factory=list)
    lost: list[tuple[Writer, Loss]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    crashes: list[BaseException] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    closes: dict[int, list[Closed]] = field(default_factory=dict)

    def on_closed(self, route: Route, closed: Closed) -> None:
        self.closes.setdefault(route.conn_id, []).append(closed)

    def hooks(self) -> Hooks:
        return Hooks(
            merge=joined,
            on_writer_up=self.up.append,
            on_writer_lost=lambda writer, loss: self.lost.append((writer, loss)),
            on_warning=lambda warning: self.warnings.append(warning.kind.value),
            on_route_dropped=lambda conn_id, _reason: self.dropped.append(conn_id),
            crashed=self.crashes.append,
        )


@asynccontextmanager
async def dial_endpoint(endpoint: Endpoint) -> AsyncIterator[Carrier]:
    """What a service hands in."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(endpoint.address, options=options) as channel:
        yield dial(channel, endpoint.address, SERVICE)


@dataclass
class Rig:
    pool: TunnelPool
    registry: Registry
    workers: list[EchoWorker]
    seen: Seen
    revision: int = 0

    def observe(self, *endpoints: Endpoint) -> None:
        self.revision += 1
        self.pool.observe(endpoints, self.revision)

    def observe_all(self) -> None:
        self.observe(*(worker.endpoint() for worker in self.workers))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - any condition
                await asyncio.sleep(0.002)

    async def full(self, each: int = 2) -> None:
        """Every worker has its tunnels."""
        await self.until(lambda: all(self.active(worker) == each for worker in self.workers))

    def active(self, worker: EchoWorker) -> int:
        return sum(view.active for view in self.pool.status().pool.endpoints if view.key.worker == worker.name)

    async def assert_rest(self) -> None:
        await self.registry.wait_rest(LIMIT_S)
        status = self.pool.status()
        assert (status.routes, status.bindings, status.permits, status.pool.bound) == (0, 0, 0, 0)
        assert not self.seen.crashes


@asynccontextmanager
async def rig(
    count: int = 2,
    policy: PoolPolicy = CALM,
    *,
    hosts: tuple[str, ...] = ("127.0.0.1",),
    observed: bool = True,
    registry: Registry | None = None,
    **changes: object,
) -> AsyncIterator[Rig]:
    """Running workers and a pool that has their map."""
    workers = [EchoWorker(f"w{index}", host) for index in range(count) for host in hosts]
    registry = registry or Registry()
    seen = Seen()
    async with asyncio.timeout(60):
        for worker in workers:
            await worker.start()
        try:
            async with registry:
                pool = TunnelPool(
                    registry,
                    dial_endpoint,
                    seen.hooks(),
                    replace(policy, **changes),  # type: ignore[arg-type]
                    config=FAST,
                    chance=random.Random(7),
                )
                async with pool:
                    made = Rig(pool, registry, workers, seen)
                    if observed:
                        made.observe_all()
                    yield made
                assert not seen.crashes
        finally:
            for worker in workers:
                await worker.kill()


class SlowLock(asyncio.Lock):
    """A lock that always suspends whoever takes it: its waits exist even where nobody holds it."""

    async def acquire(self) -> bool:  # type: ignore[override]
        await asyncio.sleep(0)
        return await super().acquire()


class Suspensions:
    """Counts the points at which a coroutine awaits, and cancels its task at one of them, as anybody might."""

    def __init__(self, cancel_at: int = 0) -> None:
        self.count = 0
        self.cancel_at = cancel_at

    def __call__(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return self._drive(work)

    @types.coroutine
    def _drive(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        send: Callable[[], Any] = lambda: work.send(None)  # noqa: E731
        while True:
            try:
                awaited = send()
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            self.count += 1
            if self.count == self.cancel_at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                got = yield awaited
                send = lambda got=got: work.send(got)  # noqa: E731
            except BaseException as error:
                send = lambda error=error: work.throw(error)  # noqa: E731
