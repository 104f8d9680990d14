"""A run is a function of its schedule: the same trace, byte for byte, in any process; and a failure that was shrunk and
saved fails again, in the same step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from libs.simulation.generate import generate
from libs.simulation.schedule import Schedule
from libs.simulation.shrink import shrink
from libs.simulation.strict import parse, render
from prove.checks import Checks
from prove.mutants import Mutant, mutants
from prove.processes import finished
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "5-replay",
    "the same seed in processes with different hash seeds gives the same trace, byte for byte; a saved, shrunk failure "
    "of a controller with a planted bug replays",
    seed=7,
)
PLANTED = "fence RouterFence.DUPLICATE_SUBMISSION"
_ROOT = Path(__file__).resolve().parents[1]
_PROCESS_S = 300.0
_TRACES = """
import hashlib, json, sys
from libs.simulation.generate import generate
from libs.simulation.world import World
for seed in map(int, sys.argv[1:]):
    world = World(generate(seed))
    world.run()
    text = "".join(line + chr(10) for line in world.lines()).encode()
    print(json.dumps([seed, world.steps, len(text), hashlib.sha256(text).hexdigest()]))
"""
_FAILURE = """
import json, sys
from libs.simulation.strict import parse
from prove.mutants import mutants
mutant = next(one for one in mutants() if one.name == sys.argv[1])
failure = mutant.run(parse(sys.argv[2]))
print(json.dumps(None if failure is None else [failure.invariant, failure.detail, failure.step, *failure.tail]))
"""


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    count, hash_seeds = (200, ("0", "1", "4242", "random")) if size is Size.FULL else (4, ("0", "4242"))
    seeds = [str(CLAIM.seed * 1_000 + index) for index in range(count)]
    checks = Checks()
    said = {seed: await _said(checks, seed, _TRACES, *seeds) for seed in hash_seeds}
    first = next(iter(said.values()))
    checks.equal("traces", len(first.splitlines()), count)
    checks.equal("processes that trace otherwise", sum(one != first for one in said.values()), 0)
    mutant = next(one for one in mutants() if one.name == PLANTED)
    found = planted(mutant)
    small = shrink(found, lambda schedule: _broken(mutant, schedule))
    saved = render(small)
    checks.equal("the saved failure reads as it was written", parse(saved) == small, True)
    choices = [len(one.asks) + len(one.faults) for one in (found, small)]
    checks.check("choices before and after shrinking", list(choices), "fewer, at most 3", choices[1] <= 3 < choices[0])
    again = {seed: await _said(checks, seed, _FAILURE, PLANTED, saved) for seed in hash_seeds}
    failure = mutant.run(small)
    here = None if failure is None else [failure.invariant, failure.detail, failure.step, *failure.tail]
    checks.equal(
        "the failure replays in each process", [json.loads(one) == here for one in again.values()], [True] * len(again)
    )
    return checks.outcome({"seeds": count, "hash_seeds": [*hash_seeds], "failure": here, "schedule": json.loads(saved)})


async def _said(checks: Checks, hash_seed: str, code: str, *arguments: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = await finished([sys.executable, "-c", code, *arguments], _PROCESS_S, env=env, cwd=_ROOT)
    checks.equal(f"hash seed {hash_seed}: ended", done.code, 0)
    return done.stdout


def planted(mutant: Mutant) -> Schedule:
    """The first random schedule that shows the planted bug."""
    return next(schedule for schedule in map(generate, range(2_000)) if mutant.run(schedule) is not None)


def _broken(mutant: Mutant, schedule: Schedule) -> str:
    failure = mutant.run(schedule)
    return failure.invariant if failure is not None else ""
