"""Cancellation at every await of a generation's commit, of a replacement, of a bind: all or nothing.

The awaits are not listed by hand: each run counts them and cancels at the next, until one run gets through. The locks
of the guard suspend whoever takes them, so that each of them is such a point.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from libs.pool.contours import Contour, Move
from libs.pool.effects import Dial as DialEffect
from libs.pool.generation import GenerationKey
from libs.pool.model import WorkerTarget
from libs.tunnel import Registry
from tests.pool.rig import Rig, SlowLock, Suspensions, rig
from tests.tunnel.harness import LIMIT_S

MOST = 200


def slow_registry() -> Registry:
    registry = Registry()
    registry.binding_lock = SlowLock()
    return registry


def slow(made: Rig) -> None:
    made.pool._guard.writers, made.pool._guard.reinit = SlowLock(), SlowLock()


def unlocked(made: Rig) -> None:
    guard = made.pool._guard
    assert not guard.held
    assert not any(lock.locked() for lock in (guard.writers, guard.binding, guard.reinit))


async def finished(task: asyncio.Task[Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(task, return_exceptions=True)


async def test_commit() -> None:
    async with rig(2, registry=slow_registry()) as made:
        slow(made)
        await made.full()
        pool, books = made.pool, made.pool._core.books
        held: list[GenerationKey] = []

        async def hold_up(key: GenerationKey) -> None:
            held.append(key)

        commit, pool._commit = pool._commit, hold_up  # type: ignore[method-assign]
        pool.swap()
        await made.until(lambda: bool(held))
        before = {record.writer: record.contour for record in books.inventory}
        points = 0
        for at in range(1, MOST):
            steps = Suspensions(at)
            task = asyncio.ensure_future(_run(steps, commit(held[-1])))
            await finished(task)
            unlocked(made)
            if not task.cancelled():
                break
            points += 1
            now = {record.writer: record.contour for record in books.inventory if record.writer in before}
            assert now == before
            assert books.generations.active == 1
            assert books.generations.pending is not None
        assert points == 3  # writers -> registry binding -> reinit coordinator, and nothing after
        assert books.generations.active == 2
        old = [
            record for record in books.inventory if record.writer in before and before[record.writer] is Contour.ACTIVE
        ]
        assert all(record.contour is Contour.DRAINING for record in old)
        books.check_integrity()


async def test_replacement() -> None:
    async with rig(1, registry=slow_registry(), shadow_writers=1, shadow_rotation_s=0.02) as made:
        slow(made)
        pool, books = made.pool, made.pool._core.books
        points: list[tuple[int, bool]] = []
        original = pool._dialler.hold
        done = asyncio.Event()
        at = 0

        async def hold(effect: DialEffect) -> None:
            nonlocal at
            if effect.replaces is None or done.is_set():
                return await original(effect)
            at += 1
            steps = Suspensions(at)
            victim = books.inventory.get(effect.replaces)
            assert victim is not None
            assert pool._core.books.replacements.phase(effect.replaces).value == "preparing"
            committed, restored = books.replacements.counts.committed, books.replacements.counts.restored
            try:
                await steps(original(effect))
            finally:
                came = books.replacements.counts.committed > committed
                points.append((at, came))
                unlocked(made)
                if came:
                    assert victim.contour is Contour.DRAINING
                    assert victim.why is Move.REPLACED
                    done.set()
                else:
                    # Open again; by now perhaps reserved for another successor.
                    assert books.replacements.counts.restored == restored + 1
                    assert effect.writer not in dict(books.replacements)
                    assert victim.active
                    assert effect.writer not in books.inventory
                    assert effect.writer not in {writer.writer for writer in pool.writers()}
            return None

        pool._dialler.hold = hold  # type: ignore[method-assign]
        async with asyncio.timeout(40):
            await done.wait()
        before = [point for point, came in points if not came]
        assert before == list(range(1, len(before) + 1))
        assert len(before) == 4  # the first frame, then writers -> registry binding -> reinit coordinator
        books.check_integrity()


@pytest.mark.parametrize("waits", [False, True])
async def test_bind(waits: bool) -> None:
    async with rig(1, registry=slow_registry(), observed=not waits) as made:
        if not waits:
            await made.full()
        bound = 0
        for at in range(1, MOST):
            steps = Suspensions(at)
            task = asyncio.ensure_future(_run(steps, made.pool.bind(WorkerTarget("w0"), b"x", made.seen.on_closed)))
            if waits and at > 1:
                await asyncio.sleep(0.01)
                if not task.done():
                    task.cancel()
            await finished(task)
            assert not made.registry.binding_lock.locked()
            if task.cancelled():
                await made.assert_rest()
                if waits and at > 6:
                    break
                continue
            bound += 1
            task.result().close()
            break
        assert bound == (0 if waits else 1)
        assert made.pool.status().held == 0
        await made.assert_rest()


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


async def _run(steps: Suspensions, work: Coroutine[Any, Any, Any]) -> Any:
    return await steps(work)
