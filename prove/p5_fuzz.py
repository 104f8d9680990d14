"""Random schedules full of faults: no invariant of the design breaks, and there is nothing the machines do that they do
not reach.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from cli.sim.fuzzing import batches, document
from libs.simulation.fuzz import summarise
from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "5-fuzz",
    "20,000 random schedules: no violation, in under 10 minutes on 2 cores, median at least 300 events and 3 faults, "
    "every event, effect, transition, decline and fence reached",
    seed=100_000,
)
SEEDS, EVENTS, FAULTS, SECONDS = 20_000, 300, 3, 600.0
_JOBS = 2
_ROOT = Path(__file__).resolve().parents[1]


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    full = size is Size.FULL
    seeds = range(CLAIM.seed, CLAIM.seed + (SEEDS if full else 40))
    began = time.monotonic()
    runs = await asyncio.to_thread(lambda: [run for batch in batches(seeds, _JOBS if full else 1) for run in batch])
    seconds = time.monotonic() - began
    summary = summarise(runs)
    checks = Checks()
    checks.equal("schedules", summary.seeds, len(seeds))
    checks.equal("violations", len(summary.failures), 0)
    checks.check("median events", summary.events_median, f">= {EVENTS}", summary.events_median >= EVENTS)
    checks.check("median faults", summary.faults_median, f">= {FAULTS}", summary.faults_median >= FAULTS)
    if full:
        unreached = [name for name, reason in summary.missing.items() if not reason]
        checks.check("never reached, without a reason", unreached, [], not unreached)
        checks.check("seconds on two processes", round(seconds, 1), f"< {SECONDS:.0f}", seconds < SECONDS)
    return checks.outcome({"cores": os.cpu_count(), **document(summary, CLAIM.seed, seconds, {})})
