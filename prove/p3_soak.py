"""A long life of short requests on the tiny model: forks, cancels, evictions, restores and restarts without end.

The bench runs in spells; each ends at rest, with the books checked, and then the worker starts anew on its own disk.
Some prompts come back again and again, for other tenants: their tokens must never change. Memory is sampled after each
restart: what it is after the warm-up it must be at the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from libs.controller.protocol import ResultStatus, Tier
from prove.checks import Checks
from prove.paths import History
from prove.processes import resident_bytes
from prove.prose import Prose
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.worker_bench import Ask, Bench, Exchange, backed, fresh_salt
from services.worker.pages.eviction import EvictionReason

CLAIM = Claim(
    "3-soak",
    "20,000 short requests with at least 500 forks, cancels, evictions, restores and restarts each: memory flat within "
    "5 %, integrity clean",
    seed=40,
)
KINDS = ("forks", "cancels", "evictions", "restores", "restarts")
_FLAT = 0.05
_WARM = 0.2
"""Of the spells: those before which memory is not compared."""
_ABREAST = 8
_KNOWN = 24
_CHATS = 48


@dataclass(frozen=True)
class _Plan:
    requests: int
    spell: int
    least: int
    judged: bool


@dataclass
class Found:
    """What happened."""

    requests: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    """Resident bytes of this process, at the start of each spell."""
    problems: list[str] = field(default_factory=list)


class Soak:
    """One run. `known`: prompts that come back, with the tokens they first got."""

    def __init__(self, bench: Bench, prose: Prose, draw: random.Random) -> None:
        self._bench, self._prose, self._draw = bench, prose, draw
        self.found = Found()
        self._chats: list[History] = []
        self._known = [prose.prompt(draw.randint(20, 300)) for _ in range(_KNOWN)]
        self._answers: dict[int, list[int]] = {}

    async def spell(self, requests: int) -> None:
        """So many requests, a few abreast; then rest, checks, and a new process."""
        gate = asyncio.Semaphore(_ABREAST)

        async def one() -> None:
            async with gate:
                await self._request()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(requests):
                tasks.create_task(one())
        self.found.problems += await self._bench.rest()
        evictions = self._bench.engine.pool.evictions.recent
        self.found.counts["evictions"] += sum(one.reason is EvictionReason.CAPACITY for one in evictions)
        await self._bench.restart()
        self.found.counts["restarts"] += 1
        self.found.memory.append(resident_bytes(os.getpid()))

    async def _request(self) -> None:
        kind = self._draw.random()
        if kind < 0.1:
            await self._again()
        elif kind < 0.35 or not self._chats:
            length = self._draw.randint(16, 120) if self._draw.random() < 0.8 else self._draw.randint(200, 600)
            await self._turn(Ask(self._prose.prompt(length), self._draw.randint(1, 16), fresh_salt()))
        else:
            await self._onward(self._draw.choice(self._chats))

    async def _again(self) -> None:
        self.found.requests += 1
        number = self._draw.randrange(len(self._known))
        exchange = await self._bench.accepted(Ask(self._known[number], 8, fresh_salt()))
        await exchange.finished()
        if exchange.tokens != self._answers.setdefault(number, list(exchange.tokens)):
            self.found.problems.append(f"prompt {number} got other tokens than at first")

    async def _onward(self, chat: History) -> None:
        """A next turn, or two at once that branch there; from the chat's end, or from somewhere in it."""
        fork = self._draw.random() < 0.3
        cut = self._draw.randint(1, len(chat.tokens)) if self._draw.random() < 0.2 else len(chat.tokens)
        branches = [self._branch(chat, cut) for _ in range(2 if fork else 1)]
        shared = await asyncio.gather(*branches)
        self.found.counts["forks"] += fork and min(shared) > 0

    async def _branch(self, chat: History, cut: int) -> int:
        """One next turn, with the chain that its disk or the store has; how many tokens of it were resident."""
        tokens = [*chat.tokens[:cut], *self._prose.continuation(self._draw.randint(1, 30))]
        chain = ()
        if self._bench.resident(tokens[:-1], chat.salt) == 0:
            chain = await self._bench.lookup(tokens[:-1], chat.salt)
        ask = Ask(tokens, self._draw.randint(1, 12), chat.salt, chain=chain, tier=Tier.SSD if chain else Tier.NONE)
        exchange = await self._turn(ask)
        self.found.counts["restores"] += exchange.usage.restored_tokens > 0
        return exchange.usage.cached_tokens

    async def _turn(self, ask: Ask) -> Exchange:
        self.found.requests += 1
        exchange = await self._bench.accepted(ask)
        if self._draw.random() < 0.15:
            await asyncio.sleep(self._draw.uniform(0, 0.05))
            exchange.cancel()
        await exchange.finished()
        result = exchange.result
        status = None if result is None else result.status
        if status is ResultStatus.CANCELLED:
            self.found.counts["cancels"] += 1
        elif status is not ResultStatus.COMPLETED:
            self.found.problems.append(f"{exchange.assignment}: {result}")
        tokens = [*ask.tokens, *exchange.tokens]
        if exchange.tokens and len(tokens) < 800:
            self._chats = [*self._chats[-_CHATS:], History(tokens, ask.salt)]
        return exchange


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    full = size is Size.FULL
    plan = _Plan(20_000, 32, 500, judged=True) if full else _Plan(72, 36, 1, judged=False)
    async with backed(stage, "tiny") as backing:
        values = {"kv_bytes": 2 << 20, "lanes": _ABREAST, "chunk_dir_cap": 256 << 20, "route_tokens": 512}
        async with Bench(backing.folder, values, backing) as bench:
            soak = Soak(bench, Prose(backing.folder, CLAIM.seed), random.Random(CLAIM.seed))
            began = time.monotonic()
            while soak.found.requests < plan.requests:
                await soak.spell(plan.spell)
            minutes = (time.monotonic() - began) / 60
    return judged(soak.found, plan.least, minutes, memory=plan.judged)


def judged(found: Found, least: int, minutes: float, *, memory: bool) -> Outcome:
    """Enough of each, nothing wrong, and (over a long run) memory flat."""
    checks = Checks()
    for kind in KINDS:
        checks.check(kind, found.counts[kind], f">= {least}", found.counts[kind] >= least)
    checks.check("problems", [*found.problems[:10]], [], not found.problems)
    change = growth(found.memory)
    if memory:
        checks.check("memory, change after the warm-up", change, f"within {_FLAT}", abs(change) <= _FLAT)
    details: dict[str, JsonValue] = {
        "requests": found.requests,
        "minutes": round(minutes, 1),
        "counts": dict[str, JsonValue](found.counts),
        "memory_change": change,
        "memory_mib": [round(one / 2**20) for one in found.memory[:: max(1, len(found.memory) // 50)]],
    }
    return checks.outcome(details)


def growth(memory: Sequence[int]) -> float:
    """Median of the last fifth over that of the first fifth after the warm-up, less 1."""
    steady = memory[int(len(memory) * _WARM) :]
    part = max(1, len(steady) // 5)
    return round(statistics.median(steady[-part:]) / statistics.median(steady[:part]) - 1, 4)
