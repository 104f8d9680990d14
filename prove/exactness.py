"""What the claims on exactness share: sizes, prompts, the docket of what was played, the verdict on all of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
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

    async def histories(self, prompts: Sequence[list[int]], new: int, *, judged: bool = False) -> list[History]:
        """Of cold turns, one at a time; durable."""
        return [await self._history(prompt, new, judged) for prompt in prompts]

    async def histories_at_once(self, prompts: Sequence[list[int]], new: int, at_once: int) -> list[History]:
        """The same, a few beside each other, not judged."""
        return await gathered([lambda prompt=prompt: self._history(prompt, new, False) for prompt in prompts], at_once)

    async def _history(self, prompt: list[int], new: int, judged: bool) -> History:
        salt = fresh_salt()
        played = await paths.cold(self.bench, prompt, new, salt)
        if judged:
            await self.docket.add(played)
        return played.history(salt, await self.bench.durable(played.exchange.processed, salt))

    async def again(self, history: History) -> History:
        """The same tokens for another tenant, resident and of nobody else."""
        salt = fresh_salt()
        played = await paths.cold(self.bench, history.tokens, 2, salt)
        return played.history(salt)


async def gathered(works: Sequence[Callable[[], Coroutine[object, object, T]]], at_once: int) -> list[T]:
    """All results, in order; so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(work: Callable[[], Coroutine[object, object, T]]) -> T:
        async with gate:
            return await work()

    async with asyncio.TaskGroup() as tasks:
        done = [tasks.create_task(one(work)) for work in works]
    return [task.result() for task in done]


@asynccontextmanager
async def scene(size: Size, stage: Stage | None, seed: int) -> AsyncIterator[tuple[Scene, Court]]:
    """A bench with room, and a court."""
    plan = plan_of(size)
    async with backed(stage) as backing, Judge(backing.folder).court() as court:
        values = {"kv_bytes": plan.kv_bytes, "lanes": LANES}
        async with Bench(backing.folder, values, backing) as bench:
            yield Scene(plan, bench, Prose(backing.folder, seed), random.Random(seed), Docket(court)), court


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
