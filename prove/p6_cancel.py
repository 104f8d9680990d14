"""Cancellation at every await of a generation's commit, of a replacement and of a bind: all or nothing.

The awaits are not listed: each try counts them and cancels at the next one, until a try gets through. The numbers found
are the design's: three barriers, and for a replacement the wait for its first frame before them. The same enumeration
is run over code that awaits, or forgets, where it must not, and must notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from unittest import mock

from libs.pool.events import CommitGeneration
from libs.pool.generation import GenerationKey
from libs.pool.guard import PublicationGuard
from libs.pool.model import PoolBugError
from libs.pool.pool import TunnelPool
from libs.pool.replacement import Replacements
from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from tests.pool.cancelling import bind_points, commit_points, map_changes, replacement_points, writers_degrade

CLAIM = Claim(
    "6-cancel",
    "cancellation at every await point of a generation commit and of a replacement, enumerated: all or nothing, the "
    "victim back to Open",
)
Points = Callable[[], Awaitable[int]]

TRIED: dict[str, tuple[Points, int]] = {
    "an operator's commit": (commit_points, 3),
    "a commit that closes what it covers": (lambda: commit_points(close_covered=True), 3),
    "a map's commit": (lambda: commit_points(map_changes), 3),
    "a map's commit that closes what it covers": (lambda: commit_points(map_changes, close_covered=True), 3),
    "a shadow's replacement": (replacement_points, 4),
    "a degraded writer's replacement": (
        lambda: replacement_points(writers_degrade, replace_degraded_s=0.01, degraded_clear_pings=1000),
        4,
    ),
}
"""What is cancelled, and the awaits it may have: writers, registry binding, reinit coordinator, and a first frame."""
_SLICE = ("an operator's commit", "a shadow's replacement")


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    full = size is Size.FULL
    checks = Checks()
    for name in TRIED if full else _SLICE:
        await enumerated(checks, name)
    for waits in (False, True) if full else (False,):
        name = f"a bind that {'is held' if waits else 'finds a tunnel'}: cancelled at each of its awaits, nothing left"
        points = await bind_points(waits)
        checks.check(name, points, ">= 1", points >= 1)
    for name in PLANTED if full else ("half a commit",):
        found = await planted(name)
        checks.check(f"noticed: {name}", found, "something", bool(found))
    return checks.outcome()


async def enumerated(checks: Checks, name: str) -> None:
    """One enumeration; what it asserts at each point is a check too."""
    points, due = TRIED[name]
    try:
        checks.equal(f"{name}: cancelled at each of its awaits, all or nothing", await points(), due)
    except AssertionError as error:
        checks.check(f"{name}: all or nothing", str(error)[:500] or "an assertion", "nothing has happened", False)


async def _half_a_commit(self: TunnelPool, key: GenerationKey) -> None:
    async with self._guard:
        self._core.books.generations.active += 1
        await asyncio.sleep(0)
        self._core.books.generations.active -= 1
        self.feed(CommitGeneration(key))


async def _keeps_what_it_took(self: PublicationGuard) -> PublicationGuard:
    taken = AsyncExitStack()
    for lock in (self.writers, self.binding, self.reinit):
        await lock.acquire()
        taken.callback(lock.release)
    self._held = taken
    return self


def _stays_preparing(*_args: Any) -> None:
    return None


async def _still_held(self: TunnelPool, _target: object, wait_s: float) -> None:
    self._held += 1
    async with asyncio.timeout(wait_s):
        await self._news.wait()
    self._held -= 1


PLANTED: dict[str, tuple[object, str, Callable[..., Any], Points]] = {
    "half a commit": (TunnelPool, "_commit", _half_a_commit, commit_points),
    "a guard that keeps what it took": (PublicationGuard, "__aenter__", _keeps_what_it_took, commit_points),
    "a victim that stays Preparing": (Replacements, "release", _stays_preparing, replacement_points),
    "a bind that is held for ever": (TunnelPool, "_hold", _still_held, lambda: bind_points(True)),
}
"""Where, instead of what, and the enumeration that must notice."""


async def planted(name: str) -> str:
    """What the enumeration said of that bug; nothing if it went by."""
    owner, attribute, wrong, points = PLANTED[name]
    with mock.patch.object(owner, attribute, wrong):
        try:
            await points()
        except (AssertionError, PoolBugError, TimeoutError, ExceptionGroup) as error:
            return f"{type(error).__name__}: {error}"[:300]
    return ""
