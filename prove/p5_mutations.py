"""Every guard of the controller is there for something: taken away in turn, the simulator's invariants notice."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from pydantic import JsonValue

from prove.checks import Checks
from prove.mutants import EQUIVALENT, Honest, Mutant, Verdict, hunt, mutants, shown_by
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "5-mutations",
    "every fence, every rejection, every reason to decline and every row of the transition tables removed in turn, and "
    "every row kept out of them let in: at least 95 % are caught by the invariants within 2,000 seeds",
    seed=0,
)
SEEDS = 2_000
LEAST = 0.95
# Of each kind, for the slice: caught within the first few seeds.
_SLICE = (
    "fence RouterFence.DUPLICATE_SUBMISSION",
    "fence WorkerFence.FENCED",
    "decline QUEUE_FULL",
    "drop router streaming, delta",
    "drop worker ending, quiesced",
)
_SLICE_SEEDS = 25
_BATCH = 20
A, R = TypeVar("A"), TypeVar("R")


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    full = size is Size.FULL
    wanted = [one for one in mutants() if full or one.name in _SLICE]
    seeds = range(CLAIM.seed, CLAIM.seed + (SEEDS if full else _SLICE_SEEDS))
    honest, verdicts = await asyncio.to_thread(tried, wanted, seeds, full)
    checks = Checks()
    # What the honest controller breaks too says nothing against a mutant.
    checks.equal("seeds that the honest controller fails", [one.seed for one in honest if one.broken], [])
    caught = [one for one in verdicts if one.seed >= 0]
    share = len(caught) / len(verdicts)
    checks.check("share of mutants caught", round(share, 4), f">= {LEAST}", share >= LEAST)
    survivors = {one.mutant.name: EQUIVALENT.get(one.mutant.name, "") for one in verdicts if one.seed < 0}
    unexplained = [name for name, why in survivors.items() if not why]
    checks.check("survivors without an explanation", unexplained, [], not unexplained)
    wrong = [one.mutant.name for one in caught if one.mutant.name in EQUIVALENT]
    checks.equal("mutants said to be equivalent that are not", wrong, [])
    invariants = Counter(one.invariant for one in caught)
    shows = Counter(name for one in honest for name in one.shows)
    details: dict[str, JsonValue] = {
        "mutants": len(verdicts),
        "caught": len(caught),
        "by_kind": dict(Counter(one.mutant.kind for one in verdicts)),
        "by_invariant": {name: invariants[name] for name in sorted(invariants)},
        "survivors": dict(survivors),
        "most_seeds": max((one.seed - CLAIM.seed + 1 for one in caught), default=0),
        "runs": sum(one.runs for one in verdicts),
        "first_seed": {one.mutant.name: one.seed for one in verdicts},
        "seeds_that_could_show": {one.mutant.name: shows[one.mutant.name] for one in verdicts},
    }
    return checks.outcome(details)


def tried(wanted: list[Mutant], seeds: range, parallel: bool) -> tuple[list[Honest], list[Verdict]]:
    """An honest run of every seed, then each mutant against those seeds that could show it."""
    honest = [one for part in _each(_shown, _parts(seeds), parallel) for one in part]
    chances = [[one.seed for one in honest if mutant.name in one.shows] for mutant in wanted]
    return honest, _each(_hunted, list(zip(wanted, chances, strict=True)), parallel)


def _parts(seeds: range) -> list[range]:
    return [seeds[begin : begin + _BATCH] for begin in range(0, len(seeds), _BATCH)]


def _shown(seeds: range) -> list[Honest]:
    return [shown_by(seed) for seed in seeds]


def _hunted(what: tuple[Mutant, list[int]]) -> Verdict:
    return hunt(*what)


def _each(work: Callable[[A], R], items: Sequence[A], parallel: bool) -> list[R]:
    if not parallel:
        return [work(item) for item in items]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, items))
