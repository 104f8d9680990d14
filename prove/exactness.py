"""What the claims on exactness share: sizes, prompts, the docket of what was played, the verdict on all of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from prove import paths
from prove.checks import Checks
from prove.judging import Court, Judge, Tally
from prove.paths import History, Played
from prove.prose import Prose
from prove.report import Outcome, Size
from prove.stage import Stage
from prove.worker_bench import Bench, backed, fresh_salt

S = TypeVar("S")
T = TypeVar("T")

LANES = 8
MORE = 24
"""Tokens a next turn adds."""


@dataclass(frozen=True)
class Plan:
    """`many` x `long` tokens on the main paths, `few` x `short` on the others; prompts of `shortest`..`longest` tokens.
    In `tight` bytes of pages not all of the few have room.
    """

    many: int
    long: int
    few: int
    short: int
    shortest: int
    longest: int
    kv_bytes: int
    tight: int


FULL = Plan(200, 64, 40, 32, 265, 900, 1 << 30, 128 << 20)
SLICE = Plan(4, 12, 2, 8, 270, 620, 6 << 20, 3 << 20)


def plan_of(size: Size) -> Plan:
    """At that size."""
    return FULL if size is Size.FULL else SLICE


class Docket:
    """What was played, submitted to the reference as it comes."""

    def __init__(self, court: Court) -> None:
        self._court = court
        self.by_path: dict[str, list[Played]] = {}

    async def add(self, *played: Played) -> None:
        for one in played:
            ones = self.by_path.setdefault(one.path, [])
            ones.append(one)
            await self._court.submit(one.path, one.generation(len(ones)))

    async def outcome(self) -> Outcome:
        """The verdict on all of it; nothing may follow."""
        return outcome(self.by_path, await self._court.verdicts())


@dataclass
class Scene:
    """A worker, texts for it, and the reference beside it; the bench and the reference have a core each."""

    plan: Plan
    bench: Bench
    prose: Prose
    draw: random.Random
    docket: Docket

    def prompts(self, count: int) -> list[list[int]]:
        """Log-uniform: as many lengths around one window and chunk as around two."""
        plan = self.plan
        span = plan.longest / plan.shortest
        return [self.prose.prompt(round(plan.shortest * span ** self.draw.random())) for _ in range(count)]

    async def histories(
        self, prompts: Sequence[list[int]], new: int, *, judged: bool = False, at_once: int = 1
    ) -> list[History]:
        """Of cold turns, so many beside each other; durable."""

        async def one(prompt: list[int]) -> History:
            salt = fresh_salt()
            played = await paths.cold(self.bench, prompt, new, salt)
            if judged:
                await self.docket.add(played)
            return played.history(salt, await self.bench.durable(played.exchange.processed, salt))

        return await gathered(one, prompts, at_once)

    async def again(self, history: History) -> History:
        """The same tokens for another tenant, resident and of nobody else."""
        salt = fresh_salt()
        played = await paths.cold(self.bench, history.tokens, 2, salt)
        return played.history(salt)


async def gathered(work: Callable[[S], Awaitable[T]], of: Sequence[S], at_once: int) -> list[T]:
    """All results, in order; so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(what: S) -> T:
        async with gate:
            return await work(what)

    async with asyncio.TaskGroup() as tasks:
        done = [tasks.create_task(one(what)) for what in of]
    return [task.result() for task in done]


@asynccontextmanager
async def scene(size: Size, stage: Stage | None, seed: int) -> AsyncIterator[Scene]:
    """A bench with room, and a court that sits beside it."""
    plan = plan_of(size)
    async with backed(stage) as backing, Judge(backing.folder).court() as court:
        values = {"kv_bytes": plan.kv_bytes, "lanes": LANES}
        async with Bench(backing.folder, values, backing) as bench:
            yield Scene(plan, bench, Prose(backing.folder, seed), random.Random(seed), Docket(court))


def outcome(by_path: Mapping[str, Sequence[Played]], tallies: Mapping[str, Tally]) -> Outcome:
    """Every path taken, every token exact, and few ties among them."""
    checks, whole = Checks(), Tally()
    for path, tally in tallies.items():
        missed = [why for one in by_path[path] for why in one.missed]
        checks.check(
            f"{path}: the path was taken", {"of": len(by_path[path]), "missed": [*missed[:10]]}, [], not missed
        )
        checks.check(f"{path}: exact", tally.figures(), "no wrong token", tally.exact)
        whole.add(tally)
    agreed = 1 - whole.flips / max(1, whole.tokens)
    checks.check("the argmax, or the same draw", round(agreed, 6), ">= 0.999", agreed >= 0.999)
    found = checks.outcome({"all": whole.figures()})
    figure = {"checks": found.figure, "flips_per_100000": whole.figures()["flips_per_100000"], "tokens": whole.tokens}
    return Outcome(figure, found.limit, found.passed, found.details)
