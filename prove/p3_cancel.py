"""Cancels at random moments of every phase: what was held is let go at the next boundary, and nothing late does harm.

A round offers a few requests of one kind and cancels all but one of them, each when it has come to the phase meant and
a random while after. When the round is at rest nothing may be reserved, loading or pinned and the books must balance.
Events of what has ended (landed restores, computed rows) are then said again while the next round runs on the same
pages: they must change nothing, and whoever was not cancelled must get the very tokens it gets alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.controller.protocol import AssignmentId, ResultStatus, Tier
from libs.controller.worker_table import Phase
from prove import paths
from prove.checks import Checks
from prove.paths import History
from prove.prose import Prose
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.worker_bench import Ask, Bench, Exchange, backed, fresh_salt
from services.worker.handlers import NodeFill

CLAIM = Claim(
    "3-cancel",
    "cancelled 200 times at random moments of each phase: at the next boundary nothing is reserved, loading or pinned",
    seed=36,
)
PHASES = (Phase.QUEUED, Phase.RESTORING, Phase.PREFILLING, Phase.DECODING)
_DELAY_S = {Phase.QUEUED: 0.02, Phase.RESTORING: 0.006, Phase.PREFILLING: 0.05, Phase.DECODING: 0.12}
"""Longest random while between coming to the phase and the cancel."""
_LONG, _SHORT, _NEW, _MORE = 1_400, 40, 60, 8


@dataclass
class Found:
    """`hit`: cancels by the phase they came in; `late`: events of the dead that were said again."""

    hit: Counter[Phase] = field(default_factory=Counter)
    missed: int = 0
    late: int = 0
    survivors: int = 0
    problems: list[str] = field(default_factory=list)
    boundary_ms: list[float] = field(default_factory=list)
    """From a cancel to the release of its pages."""


@dataclass
class Rounds:
    """Plays rounds on one bench. `histories`: durable, to be restored; `alone`: what a prompt gets by itself."""

    bench: Bench
    prose: Prose
    draw: random.Random
    histories: Sequence[History]
    found: Found = field(default_factory=Found)
    stale: list[tuple[AssignmentId, NodeFill | int]] = field(default_factory=list)
    """Uploads and computed ends of assignments that have ended."""

    async def play(self, phase: Phase, wanted: int) -> None:
        """Until so many cancels came in that phase; rounds that bring none are bounded."""
        rounds = 0
        while self.found.hit[phase] < wanted and rounds < 20 + 4 * wanted:
            rounds += 1
            await self._round(phase)

    async def _round(self, phase: Phase) -> None:
        if phase is Phase.RESTORING:
            await self.bench.restart()
            self.stale.clear()  # of another process
        self._listen()
        asks = self._asks(phase)
        exchanges = [await self.bench.accepted(ask) for ask in asks]
        survivor = self.draw.randrange(len(exchanges))
        late = asyncio.create_task(self._say_late())
        async with asyncio.TaskGroup() as tasks:
            for number, exchange in enumerate(exchanges):
                if number != survivor:
                    tasks.create_task(self._cancel(exchange, phase))
        await exchanges[survivor].completed()
        await late
        self.found.survivors += 1
        await self._compare(asks[survivor], exchanges[survivor])
        self.found.problems += await self.bench.rest()
        for exchange in exchanges:
            self.stale.append((exchange.assignment, len(exchange.offer.request.tokens)))

    def _asks(self, phase: Phase) -> list[Ask]:
        if phase is Phase.RESTORING:
            return [
                Ask([*one.tokens, *self.prose.continuation(_MORE)], 4, one.salt, chain=one.nodes, tier=Tier.SSD)
                for one in self.histories
            ]
        length, new = {Phase.QUEUED: (_SHORT * 6, 12), Phase.PREFILLING: (_LONG, 2)}.get(phase, (_SHORT, _NEW))
        return [Ask(self.prose.prompt(length), new, fresh_salt()) for _ in range(6)]

    async def _cancel(self, exchange: Exchange, phase: Phase) -> None:
        machine, assignment = self.bench.interpreter.machine, exchange.assignment
        while machine.phase(assignment) not in (phase, Phase.GONE):  # noqa: ASYNC110 - phases announce themselves nowhere
            await asyncio.sleep(0.0002)
        await asyncio.sleep(self.draw.uniform(0, _DELAY_S[phase]))
        at = machine.phase(assignment)
        if at is phase:
            self.found.hit[phase] += 1
        else:
            self.found.missed += 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        exchange.cancel()
        await exchange.finished()
        while machine.phase(assignment) is not Phase.GONE:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
        if at in PHASES:
            self.found.boundary_ms.append((loop.time() - began) * 1e3)
            status = None if exchange.result is None else exchange.result.status
            if status is not ResultStatus.CANCELLED:
                self.found.problems.append(f"{assignment}: cancelled in {at}, ended {status}")
        if assignment in self.bench.engine.pool.held():
            self.found.problems.append(f"{assignment}: cancelled, gone, and still holds pages")

    def _listen(self) -> None:
        """Keeps every upload that is planned, to be said again when its assignment has ended."""
        pool, honest = self.bench.engine.pool, type(self.bench.engine.pool).plan_restore

        def plan_restore(key: AssignmentId, nodes: Sequence[object]) -> tuple[NodeFill, ...]:
            fills = honest(pool, key, nodes)  # type: ignore[arg-type]
            self.planned += [(key, fill) for fill in fills]
            return fills

        self.planned: list[tuple[AssignmentId, NodeFill]] = []
        pool.plan_restore = plan_restore  # type: ignore[method-assign, assignment]

    async def _say_late(self) -> None:
        """What ended before this round, again, a little at a time while the round runs."""
        pool = self.bench.engine.pool
        ended = [*self.stale, *self.planned]
        self.draw.shuffle(ended)
        for key, what in ended[:24]:
            if key in pool.held():
                continue
            self.found.late += 1
            if isinstance(what, int):
                pool.computed(key, what)
            elif pool.landed(key, what) and any(part.pages for part in what.fills):
                self.found.problems.append(f"{key}: a late upload counted")
            await asyncio.sleep(0.001)

    async def _compare(self, ask: Ask, exchange: Exchange) -> None:
        """The same request by itself, for a tenant of its own."""
        alone = await self.bench.run(Ask(ask.tokens, ask.new, fresh_salt()))
        if alone.tokens != exchange.tokens:
            self.found.problems.append(f"{exchange.assignment}: other tokens than alone")


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    wanted = 200 if size is Size.FULL else 4
    async with backed(stage, "tiny") as backing:
        prose, draw = Prose(backing.folder, CLAIM.seed), random.Random(CLAIM.seed)
        values = {"kv_bytes": 24 << 20, "lanes": 2, "step_tokens": 64}
        async with Bench(backing.folder, values, backing) as bench:
            histories = []
            for _ in range(4):
                salt = fresh_salt()
                played = await paths.cold(bench, prose.prompt(_LONG), 4, salt)
                nodes = await bench.durable(played.exchange.processed, salt)
                histories.append(played.history(salt, nodes))
            rounds = Rounds(bench, prose, draw, histories)
            for phase in PHASES:
                await rounds.play(phase, wanted)
            late = bench.engine.pool.late
    return _outcome(rounds.found, wanted, late)


def _outcome(found: Found, wanted: int, late: int) -> Outcome:
    checks = Checks()
    for phase in PHASES:
        checks.check(f"cancels while {phase.value}", found.hit[phase], f">= {wanted}", found.hit[phase] >= wanted)
    checks.check("problems", [*found.problems[:10]], [], not found.problems)
    checks.check("late events said again", found.late, "> 0", found.late > 0)
    slowest = max(found.boundary_ms, default=0.0)
    details = {
        "came_too_late": found.missed, "survivors": found.survivors, "late_events_counted": late,
        "slowest_boundary_ms": round(slowest, 1),
    }  # fmt: skip
    return checks.outcome(dict(details))
