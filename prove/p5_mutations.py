"""Every guard of the controller is there for something: taken away in turn, the simulator's invariants notice."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from pydantic import JsonValue

from libs.simulation.fuzz import run_seed
from prove.checks import Checks
from prove.mutants import EQUIVALENT, Mutant, Verdict, hunt, mutants
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "5-mutations",
    "every fence, every rejection and every row of the transition tables removed in turn, and every row kept out of "
    "them let in: at least 95 % are caught by the invariants within 2,000 seeds",
    seed=0,
)
SEEDS = 2_000
LEAST = 0.95
# Of each kind, for the slice: caught within the first few seeds.
_SLICE = (
    "fence RouterFence.DUPLICATE_SUBMISSION",
    "fence WorkerFence.FENCED",
    "drop router streaming, delta",
    "drop worker ending, quiesced",
)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    wanted = mutants()
    if size is Size.SLICE:
        wanted = [one for one in wanted if one.name in _SLICE]
    verdicts = await asyncio.to_thread(tried, wanted, SEEDS if size is Size.FULL else 40, size is Size.FULL)
    checks = Checks()
    # What the honest controller breaks too says nothing against a mutant.
    shown = sorted({one.seed for one in verdicts if one.seed >= 0})
    dishonest = [seed for seed in shown if run_seed(seed).failure is not None]
    checks.equal("seeds that the honest controller fails too", dishonest, [])
    caught = [one for one in verdicts if one.seed >= 0]
    share = len(caught) / len(verdicts)
    checks.check("share of mutants caught", round(share, 4), f">= {LEAST}", share >= LEAST)
    survivors = {one.mutant.name: EQUIVALENT.get(one.mutant.name, "") for one in verdicts if one.seed < 0}
    unexplained = [name for name, why in survivors.items() if not why]
    checks.check("survivors without an explanation", unexplained, [], not unexplained)
    wrong = [one.mutant.name for one in caught if one.mutant.name in EQUIVALENT]
    checks.equal("mutants said to be equivalent that are not", wrong, [])
    invariants = Counter(one.invariant for one in caught)
    details: dict[str, JsonValue] = {
        "mutants": len(verdicts),
        "caught": len(caught),
        "by_kind": dict(Counter(one.mutant.kind for one in verdicts)),
        "by_invariant": {name: invariants[name] for name in sorted(invariants)},
        "survivors": dict(survivors),
        "most_seeds": max((one.tried for one in caught), default=0),
        "first_seed": {one.mutant.name: one.seed for one in verdicts},
    }
    return checks.outcome(details)


def tried(wanted: list[Mutant], seeds: int, parallel: bool) -> list[Verdict]:
    """Each against its seeds."""
    if not parallel:
        return [hunt(one, CLAIM.seed, seeds) for one in wanted]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return [done.result() for done in [pool.submit(hunt, one, CLAIM.seed, seeds) for one in wanted]]
