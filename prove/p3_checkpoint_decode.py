"""What checkpointing costs those who decode meanwhile: rounds with and without it take turns on one worker.

In each round a few lanes read their prompts; as soon as all of them decode, every chunk of those prompts is handed to
the checkpointer, and the times between tokens are taken from then on. None, local, none, store, none, saturated, …: a
round with checkpoints has its own without, just before. How far the rounds without differ among themselves (A/A: every
other one against the rest) says what a ratio means on this machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from prove.checkpoint_modes import Mode, SwitchedCheckpointer
from prove.checks import Checks
from prove.p3_offer_reply import quantile
from prove.prose import Prose
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.worker_bench import Ask, Bench, backed, fresh_salt
from services.worker.checkpoint.checkpointer import ChunkCheckpointer

CLAIM = Claim(
    "3-checkpoint-decode",
    "beside checkpoints to the local tier, one decode thread: time between tokens p50 <= 1.05x, p99 <= 1.3x of none; "
    "saturated staging drops, p99 still <= 1.3x",
    seed=38,
)
P50, P99 = 1.05, 1.3


@dataclass(frozen=True)
class _Plan:
    rounds: int
    lanes: int
    prompt: int
    new: int
    judged: bool
    """Whether the ratios are held against the limits: a toy model on a busy machine says nothing of speed."""


@dataclass
class Rounds:
    """Of one mode. `gaps`: ms between tokens, by round; bytes captured in all and while lanes decoded."""

    gaps: list[list[float]] = field(default_factory=list)
    captured: int = 0
    beside: int = 0
    dropped: int = 0
    lost: int = 0

    @property
    def all(self) -> list[float]:
        return sorted(gap for gaps in self.gaps for gap in gaps)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    if size is Size.FULL:
        plan = _Plan(rounds=12, lanes=4, prompt=640, new=64, judged=True)
    else:
        plan = _Plan(rounds=1, lanes=2, prompt=600, new=24, judged=False)
    async with backed(stage) as backing:
        values = {"lanes": plan.lanes, "threads": 1, "kv_bytes": (1 << 30) if plan.judged else (48 << 20)}
        async with Bench(backing.folder, values, backing, warm=plan.judged) as bench:
            real = bench.handlers.checkpointer
            assert isinstance(real, ChunkCheckpointer)
            switched = SwitchedCheckpointer(real, bench.engine.pool)
            bench.interpreter.checkpointer = switched
            found = await _play(plan, bench, switched, real, Prose(backing.folder, CLAIM.seed))
    return judged(found, plan.judged)


async def _play(
    plan: _Plan, bench: Bench, switched: SwitchedCheckpointer, real: ChunkCheckpointer, prose: Prose
) -> dict[Mode, Rounds]:
    found = {mode: Rounds() for mode in Mode}
    await _round(plan, bench, switched, real, prose, Rounds(), Mode.NONE)  # pays for what the first one touches
    for _ in range(plan.rounds):
        for mode in (Mode.LOCAL, Mode.STORE, Mode.SATURATED):
            await _round(plan, bench, switched, real, prose, found[Mode.NONE], Mode.NONE)
            await _round(plan, bench, switched, real, prose, found[mode], mode)
    return found


async def _round(
    plan: _Plan,
    bench: Bench,
    switched: SwitchedCheckpointer,
    real: ChunkCheckpointer,
    prose: Prose,
    into: Rounds,
    mode: Mode,
) -> None:
    switched.switch(mode)
    metrics = real.metrics
    captured, dropped, lost = metrics.captured_bytes, metrics.dropped, metrics.lost
    exchanges = [
        await bench.accepted(Ask(prose.prompt(plan.prompt), plan.new, fresh_salt())) for _ in range(plan.lanes)
    ]
    for exchange in exchanges:
        await exchange.drawn(1)
    begun = [len(exchange.tokens) for exchange in exchanges]
    switched.go()
    for exchange in exchanges:
        await exchange.completed()
    beside = metrics.captured_bytes - captured
    await real.drain(60.0)
    faults = await bench.rest()
    if faults:
        raise RuntimeError(f"after a round of {mode.value}: {faults}")
    into.gaps.append(
        [gap for exchange, first in zip(exchanges, begun, strict=True) for gap in exchange.gaps_ms[first - 1 :]]
    )
    into.captured += metrics.captured_bytes - captured
    into.beside += beside
    into.dropped += metrics.dropped - dropped
    into.lost += metrics.lost - lost


def judged(found: dict[Mode, Rounds], limits: bool) -> Outcome:
    """Ratios to the rounds without, and what was captured and dropped."""
    checks = Checks()
    none = found[Mode.NONE]
    halves = [sorted(gap for gaps in none.gaps[start::2] for gap in gaps) for start in (0, 1)]
    details: dict[str, JsonValue] = {
        "none_p50_ms": round(statistics.median(none.all), 3),
        "none_p99_ms": round(quantile(none.all, 0.99), 3),
        "noise_p50": ratio(halves[0], halves[1], 0.5),
        "noise_p99": ratio(halves[0], halves[1], 0.99),
    }
    for mode in (Mode.LOCAL, Mode.STORE, Mode.SATURATED):
        mine = found[mode]
        p50, p99 = ratio(mine.all, none.all, 0.5), ratio(mine.all, none.all, 0.99)
        overlap = round(mine.beside / max(1, mine.captured), 3)
        details[mode.value] = {
            "p50": p50, "p99": p99, "captured_bytes": mine.captured, "overlap": overlap, "dropped": mine.dropped,
            "lost": mine.lost,
        }  # fmt: skip
        checks.check(f"{mode.value}: bytes captured beside decode", mine.beside, "> 0", mine.beside > 0)
        if limits and mode is Mode.LOCAL:
            checks.check("local: p50", p50, f"<= {P50}", p50 <= P50)
        if limits and mode is not Mode.STORE:
            checks.check(f"{mode.value}: p99", p99, f"<= {P99}", p99 <= P99)
    checks.check("saturated: ranges dropped", found[Mode.SATURATED].dropped, "> 0", found[Mode.SATURATED].dropped > 0)
    checks.equal("local: ranges lost", found[Mode.LOCAL].lost, 0)
    return checks.outcome(details)


def ratio(one: Sequence[float], other: Sequence[float], share: float) -> float:
    """Of the two sides' quantiles, both ascending."""
    return round(quantile(one, share) / max(1e-9, quantile(other, share)), 3)
