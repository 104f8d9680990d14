"""Cancellation at every await of a generation's commit, of a replacement, of a bind: all or nothing."""

import asyncio

import pytest

from libs.pool.model import WorkerTarget
from tests.pool.cancelling import bind_points, commit_points, map_changes, replacement_points, writers_degrade
from tests.pool.rig import rig


async def test_commit() -> None:
    assert await commit_points() == 3  # writers -> registry binding -> reinit coordinator, and nothing after


async def test_commit_of_a_map() -> None:
    assert await commit_points(map_changes, close_covered=True) == 3


async def test_replacement() -> None:
    assert await replacement_points() == 4  # the first frame, then writers -> registry binding -> reinit coordinator


async def test_replacement_of_a_degraded_writer() -> None:
    assert await replacement_points(writers_degrade, replace_degraded_s=0.01, degraded_clear_pings=1000) == 4


@pytest.mark.parametrize("waits", [False, True])
async def test_bind(waits: bool) -> None:
    assert await bind_points(waits)


async def test_bind_waits_for_the_binding_lock() -> None:
    async with rig(1) as made:
        await made.full()
        async with made.pool._guard:
            waiting = asyncio.create_task(made.pool.bind(WorkerTarget("w0"), b"x"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not waiting.done()
            assert made.registry.snapshot().routes == 0
        (await waiting).close()
        await made.assert_rest()
