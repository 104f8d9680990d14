"""A pool with its tunnels, whole, under a logical clock: an event loop whose time jumps to the next timer.

Nothing here waits for anything outside the process, so whenever no task can go on the next timer is due at once. Ten
minutes of pings take a second.
"""

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from libs.pool.hooks import Hooks
from libs.pool.knobs import PoolPolicy
from libs.pool.model import Endpoint
from libs.pool.pool import TunnelPool
from libs.tunnel import Carrier, Handlers, Registry, Route, Side, Tunnel
from tests.pool.rig import joined
from tests.tunnel.carriers import pair

T = TypeVar("T")


class _Jumps(selectors.DefaultSelector):
    """Where a loop would wait for its next timer, its time is that timer's."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = 1_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            self.moment, timeout = self.moment + timeout, 0
        return super().select(timeout)


class LogicalLoop(asyncio.SelectorEventLoop):
    """See the module. For loops without sockets, subprocesses and threads."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Logical seconds."""
        return self._jumps.moment


def logically(work: Callable[[], Awaitable[T]]) -> T:
    """Runs it on a loop of its own, in a thread of its own."""

    async def whole() -> T:
        return await work()

    def run() -> T:
        with asyncio.Runner(loop_factory=LogicalLoop) as runner:
            return runner.run(whole())

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


@dataclass
class Both:
    """A pool, and the routes as the worker has them."""

    pool: TunnelPool
    registry: Registry
    far: Registry
    accepted: list[Route]


@asynccontextmanager
async def in_memory(policy: PoolPolicy) -> AsyncIterator[Both]:
    """A pool of one worker, in this process, by the loop's clock."""
    clock = asyncio.get_running_loop().time
    accepted: list[Route] = []
    async with Registry() as far, Registry() as registry:

        @asynccontextmanager
        async def dial(_endpoint: Endpoint) -> AsyncIterator[Carrier]:
            near, other = pair()
            handlers = Handlers(merge=joined, accept=lambda route, _payload: accepted.append(route))
            peer = Tunnel(other, far, Side.ACCEPTING, handlers, clock=clock)
            running = asyncio.create_task(peer.run())
            try:
                yield near
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        chance = random.Random(1)
        async with TunnelPool(registry, dial, Hooks(merge=joined), policy, clock=clock, chance=chance) as pool:
            pool.observe([Endpoint("w0", "memory:1", ("A",))], 1)
            assert await pool.wait_ready(60)
            yield Both(pool, registry, far, accepted)
