"""The six invariants as a random state machine over the pure core, every retry and recovery strategy on; and the bugs
planted for each of them are found.

Every run says what it reached: a machine that never commits, never loses a tunnel or never congests a route proves
nothing about any of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from prove.checks import Checks
from prove.processes import finished
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from tests.pool.test_invariants import PLANTED

CLAIM = Claim(
    "6-invariants",
    "the six invariants hold in a random state machine over the pure core with every retry and recovery strategy on, "
    "and a bug planted against each is found",
    seed=6_000,
)
_ROOT = Path(__file__).resolve().parents[1]
_WITHIN_S = 3_600.0
_SLICE_PLANTED = ("4 half a commit",)
MUST_REACH = (
    "routes",
    "payloads merged",
    "routes ended: done",
    "routes ended: peer_lost",
    "routes ended: resource_exhausted",
    "routes ended: retired",
    "commits: map",
    "commits: operator",
    "commits: periodic",
    "commits refused",
    "replacements committed",
    "replacements restored",
    "another endpoint stood in",
    "a stale writer was kept as a fallback",
    "a commit left something missing",
    "dial_failures",
    "dials_stale",
    "flaps",
    "quarantines",
    "probes",
    "reconnects",
    "floor_switches",
    "pendings_superseded",
    "shut down",
)
_SLICE_REACH = ("routes", "routes ended: peer_lost", "reconnects")


@dataclass(frozen=True)
class Run:
    """What one process of the machine came to."""

    violation: str
    reached: Counter[str]


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    full = size is Size.FULL
    examples, steps, jobs = (2_000, 60, 2) if full else (6, 30, 1)
    began = time.monotonic()
    runs = await asyncio.gather(*(machine(CLAIM.seed + 1_000 * job, examples, steps) for job in range(jobs)))
    reached = sum((one.reached for one in runs), Counter[str]())
    checks = Checks()
    checks.equal("violations", [one.violation for one in runs if one.violation], [])
    checks.check("examples", reached["examples"], f">= {examples * jobs}", reached["examples"] >= examples * jobs)
    wanted = MUST_REACH if full else _SLICE_REACH
    checks.equal("never reached", [name for name in wanted if not reached[name]], [])
    for name in PLANTED if full else _SLICE_PLANTED:
        found = (await machine(CLAIM.seed, 400, 40, name)).violation
        checks.check(f"planted and found: {name}", found.strip().splitlines()[-1:], "a violation", bool(found))
    details: dict[str, JsonValue] = {"reached": dict(reached), "steps_each": steps}
    return checks.outcome(details | {"seconds": round(time.monotonic() - began, 1)})


async def machine(seed: int, examples: int, steps: int, planted: str = "") -> Run:
    """One process of it. Raises RuntimeError if it did not come to an end of its own."""
    argv = [sys.executable, "-m", "prove.pool_machine", str(seed), str(examples), str(steps)]
    done = await finished([*argv, "--planted", planted] if planted else argv, _WITHIN_S, cwd=_ROOT)
    if done.code:
        raise RuntimeError(f"the state machine ended with {done.code}: {done.stderr[-2_000:]}")
    document = json.loads(done.stdout.splitlines()[-1])
    return Run(document["violation"], Counter(document["reached"]))
