"""Many routes over few writers while workers die, maps swap and policies change: no leak, no duplicate, no loss."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

from libs.pool.errors import NoCoverageError
from libs.pool.model import CellTarget
from libs.tunnel import CloseReason, RouteClosedError
from tests.pool.rig import CALM, Rig, rig

ROUTES = 1000
TOKENS = 40


async def test_real_churn() -> None:
    """The size in which a suite can afford it; the claim's own run has ten thousand."""
    async with rig(4, reinit_interval_s=0) as made:
        await made.full()
        ends: Counter[str] = Counter()
        slots = asyncio.Semaphore(100)
        done = asyncio.Event()

        async def request() -> None:
            async with slots:
                try:
                    route = await made.pool.bind(CellTarget("A"), b"stream %d" % TOKENS, made.seen.on_closed)
                except NoCoverageError:
                    ends["refused"] += 1
                    return
                received = b""
                try:
                    async for payload in route:
                        received += payload
                except RouteClosedError as error:
                    ends[error.closed.reason.label] += 1
                    assert error.closed.reason in (CloseReason.PEER_LOST, CloseReason.RETIRED, CloseReason.NO_ROUTE)
                    assert received == bytes(range(TOKENS))[: len(received)]
                else:
                    ends["done"] += 1
                    assert received == bytes(range(TOKENS))

        trouble = asyncio.create_task(_trouble(made, done))
        async with asyncio.TaskGroup() as group:
            for _ in range(ROUTES):
                group.create_task(request())
        done.set()
        await trouble
        assert sum(ends.values()) == ROUTES
        assert ends["done"] > ROUTES / 2
        assert all(len(closes) == 1 for closes in made.seen.closes.values())
        assert len(made.seen.closes) == ROUTES - ends["refused"]
        made.observe_all()
        await made.full()
        await made.assert_rest()
        made.pool._core.books.check_integrity()


async def _trouble(made: Rig, done: asyncio.Event) -> None:
    chance = random.Random(3)
    policies = [replace(CALM, close_covered=True), replace(CALM, writers_per_endpoint=3), CALM]
    for step in range(20):
        kind = step % 4
        if kind == 0:
            worker = chance.choice(made.workers)
            await worker.kill()
            await asyncio.sleep(0.02)
            await worker.start()
            made.observe_all()
        elif kind == 1:
            made.pool.swap()
        elif kind == 2:
            left_out = chance.randrange(len(made.workers))
            made.observe(*(worker.endpoint() for index, worker in enumerate(made.workers) if index != left_out))
        else:
            made.observe_all()
            if policies:
                made.pool.set_policy(policies.pop(0))
        await asyncio.sleep(0.03)
    await done.wait()
