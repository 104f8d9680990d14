"""Enumerates the awaits of a generation's commit, of a replacement and of a bind: cancels at each, asserts that nothing
has happened, and returns how many there were.

The awaits are not listed by hand: each try counts them and cancels at the next, until one try gets through. The locks
of the guard suspend whoever takes them, so that each of them is such a point.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from libs.pool.contours import Contour, Move
from libs.pool.effects import Dial as DialEffect
from libs.pool.generation import GenerationKey
from libs.pool.model import WorkerTarget
from libs.tunnel import Degraded, Registry
from tests.pool.rig import Rig, SlowLock, Suspensions, rig
from tests.tunnel.harness import LIMIT_S

MOST = 200
"""Points past which a try must have got through."""
_MOMENT_S = 3.0


def slow_registry() -> Registry:
    """Whose binding lock always suspends."""
    registry = Registry()
    registry.binding_lock = SlowLock()
    return registry


def slow(made: Rig) -> None:
    """The other two barriers too."""
    made.pool._guard.writers, made.pool._guard.reinit = SlowLock(), SlowLock()


def _free(made: Rig) -> bool:
    guard = made.pool._guard
    return not guard.held and not any(lock.locked() for lock in (guard.writers, guard.binding, guard.reinit))


async def unlocked(made: Rig) -> None:
    """Nobody holds the guard or a part of it for good; whoever publishes a tunnel meanwhile does for a moment."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_MOMENT_S):
            await made.until(lambda: _free(made))
    assert _free(made), "something is locked still"


def swap(made: Rig) -> None:
    """An operator's generation: everything anew."""
    made.pool.swap()


def map_changes(made: Rig) -> None:
    """A map's generation: the last worker is gone from it."""
    for _ in range(made.pool.policy.map_stable_snapshots):
        made.observe(*(worker.endpoint() for worker in made.workers[:-1]))


async def commit_points(want: Callable[[Rig], None] = swap, **changes: object) -> int:
    """Of a generation's commit, wanted in this way, under this policy."""
    async with rig(2, registry=slow_registry(), **changes) as made:
        slow(made)
        await made.full()
        pool, books = made.pool, made.pool._core.books
        held: list[GenerationKey] = []

        async def hold_up(key: GenerationKey) -> None:
            held.append(key)

        commit, pool._commit = pool._commit, hold_up  # type: ignore[method-assign]
        want(made)
        await made.until(lambda: bool(held))
        before = {record.writer: record.contour for record in books.inventory}
        generation = books.generations.active
        points = 0
        for at in range(1, MOST):
            steps = Suspensions(at)
            task = asyncio.ensure_future(_run(steps, commit(held[-1])))
            await _finished(task)
            await unlocked(made)
            if not task.cancelled():
                task.result()
                break
            points += 1
            now = {record.writer: record.contour for record in books.inventory if record.writer in before}
            assert now == before, "half a commit"
            assert books.generations.active == generation, "half a commit"
            assert books.generations.pending is not None
        assert books.generations.active == generation + 1
        served = [writer for writer, contour in before.items() if contour is Contour.ACTIVE]
        old = [record for record in books.inventory if record.writer in served]
        if want is swap:
            assert all(record.contour is Contour.DRAINING for record in old)
        books.check_integrity()
    return points


def shadows_rotate(_made: Rig) -> None:
    """By itself, as its policy says."""


def writers_degrade(made: Rig) -> None:
    """One of them, for long enough."""
    made.pool.writers()[0].tunnel.health.mark(Degraded.PING_SLOW)


async def replacement_points(want: Callable[[Rig], None] = shadows_rotate, **changes: object) -> int:
    """Of a replacement, wanted in this way, up to its commit."""
    chosen = changes or {"shadow_writers": 1, "shadow_rotation_s": 0.02}
    async with rig(1, registry=slow_registry(), **chosen) as made:
        slow(made)
        pool, books = made.pool, made.pool._core.books
        points: list[tuple[int, bool]] = []
        wrong: list[AssertionError] = []
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
            counts = books.replacements.counts
            committed, restored = counts.committed, counts.restored
            try:
                assert books.replacements.phase(effect.replaces).value == "preparing"
                await steps(original(effect))
            finally:
                came = counts.committed > committed
                points.append((at, came))
                try:
                    assert _free(made), "something is locked still"
                    if came:
                        assert victim.contour is Contour.DRAINING
                        assert victim.why is Move.REPLACED
                    else:
                        # Open again; by now perhaps reserved for another successor.
                        assert counts.restored == restored + 1, "the victim is not Open again"
                        assert effect.writer not in dict(books.replacements)
                        assert victim.active
                        assert effect.writer not in books.inventory
                        assert effect.writer not in {writer.writer for writer in pool.writers()}
                except AssertionError as error:
                    wrong.append(error)
                if came or wrong:
                    done.set()
            return None

        pool._dialler.hold = hold  # type: ignore[method-assign]
        await made.until(lambda: len(pool.writers()) >= pool.policy.writers_per_endpoint)
        want(made)
        async with asyncio.timeout(40):
            await done.wait()
        if wrong:
            raise wrong[0]
        before = [point for point, came in points if not came]
        assert before == list(range(1, len(before) + 1))
        books.check_integrity()
    return len(before)


async def bind_points(waits: bool) -> int:
    """Of a bind: one that finds a tunnel, or (``waits``) one that is held for want of any."""
    points = 0
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
            await _finished(task)
            assert not made.registry.binding_lock.locked()
            if task.cancelled():
                points += 1
                await made.assert_rest()
                if waits and at > 6:
                    break
                continue
            bound += 1
            task.result().close()
            break
        assert bound == (0 if waits else 1)
        assert made.pool.status().held == 0, "a bind that was given up is still held"
        await made.assert_rest()
    return points


async def _finished(task: asyncio.Task[Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(task, return_exceptions=True)


async def _run(steps: Suspensions, work: Coroutine[Any, Any, Any]) -> Any:
    return await steps(work)
