"""Run several awaitables at once under one owner."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure cancels the rest and is raised as itself, not as a group."""
    owner = asyncio.current_task()
    assert owner is not None
    cancellations = owner.cancelling()
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(coroutine) for coroutine in work)
    except BaseExceptionGroup as failures:
        # Python 3.11's TaskGroup cancels its owner when a task fails while it waits for the rest, and does not take
        # that back: the owner would count as being cancelled for good. (A real cancellation is no group.)
        while owner.cancelling() > cancellations:
            owner.uncancel()
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
