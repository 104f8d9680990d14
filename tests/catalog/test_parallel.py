"""Work in parallel: order, the first failure, cancellation in both directions."""

from __future__ import annotations

import asyncio

import pytest

from services.catalog.parallel import gather


async def after(turns: int, result: int | Exception) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    if isinstance(result, Exception):
        raise result
    return result


async def test_results_in_order() -> None:
    assert await gather(after(3 - i, i) for i in range(3)) == [0, 1, 2]


async def test_the_first_failure_is_raised_as_itself_and_ends_the_rest() -> None:
    ended = asyncio.Event()

    async def endless() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 0

    with pytest.raises(KeyError):
        await gather([endless(), after(2, KeyError("x"))])
    assert ended.is_set()


async def test_a_failure_does_not_leave_the_caller_cancelled() -> None:
    me = asyncio.current_task()
    assert me is not None
    with pytest.raises(KeyError):
        await gather([after(2, KeyError("x")), after(5, 1)])
    assert me.cancelling() == 0
    with pytest.raises(TimeoutError):  # what a stale count would turn into CancelledError
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()


async def test_cancellation_reaches_the_work_and_the_caller() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> int:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 0

    caller = asyncio.create_task(gather([endless()]))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
