"""Decode at 1 and 8 lanes and prefill of 1,000 tokens against the bare transformers forward at the same batch.

The two take turns in one process (`prove/speed_rounds.py`). A figure is the bare forward's time over ours: 1.0 is as
fast, more is faster. How far two halves of one side's own rounds differ (A/A) says what a difference means here.
The slice shows that both sides run and choose the same tokens; a toy model and a busy machine say nothing of speed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from cli.embedded.models import default_cache, prepare
from prove.checks import Checks
from prove.processes import finished
from prove.report import ROOT, Claim, Outcome, Size
from prove.speed_rounds import Plan, Rounds
from prove.stage import Stage

CLAIM = Claim(
    "2-speed", "decode at 1 and 8 lanes and prefill of 1,000 tokens reach 0.8 of the bare transformers forward", seed=5
)
LIMIT = 0.8
_SAME_TOKENS = 0.9
"""Share of equal tokens below which they did not compute the same. (One flip at a float tie changes all after it.)"""
_WITHIN_S = 1_800.0


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    if stage is not None:
        plan = Plan(str(stage.folder), threads=1, prompt=64, steps=8, prefill=300, rounds=2, seed=CLAIM.seed)
    else:
        folder: Path = await prepare("gemma3-270m", default_cache(), lambda _doing, _fraction: None)
        threads = os.cpu_count() or 1
        plan = Plan(str(folder), threads, prompt=128, steps=16, prefill=1_000, rounds=6, seed=CLAIM.seed)
    found = await _played(plan)
    checks, figures = Checks(), {}
    for name, rounds in found.items():
        ratio = round(statistics.median(rounds.bare) / statistics.median(rounds.ours), 3)
        figures[name] = ratio
        same = round(rounds.same_tokens / max(1, rounds.tokens), 3)
        checks.check(f"{name}: the same tokens", same, _SAME_TOKENS, rounds.tokens > 0 and same >= _SAME_TOKENS)
        ran = len(rounds.ours) == len(rounds.bare) == plan.rounds and min(rounds.ours + rounds.bare) > 0
        checks.check(f"{name}: both ran", len(rounds.ours), plan.rounds, ran)
        if size is Size.FULL:
            checks.check(f"{name}: of the bare forward's speed", ratio, LIMIT, ratio >= LIMIT)
    outcome = checks.outcome()
    details = outcome.details | {
        "threads": plan.threads,
        "ms": {name: asdict(rounds) for name, rounds in found.items()},
        "spread_a_a": {name: _spread(rounds.ours) for name, rounds in found.items()},
        "spread_b_b": {name: _spread(rounds.bare) for name, rounds in found.items()},
    }
    return Outcome({**figures}, LIMIT, outcome.passed, details)


async def _played(plan: Plan) -> dict[str, Rounds]:
    """In a process of its own: thread pools are made once, and the caller's are other ones."""
    env = {**os.environ, "OMP_NUM_THREADS": str(plan.threads), "TOKENIZERS_PARALLELISM": "false"}
    argv = [sys.executable, "-m", "prove.speed_rounds", json.dumps(asdict(plan))]
    ended = await finished(argv, _WITHIN_S, env=env, cwd=ROOT)
    if ended.code:
        raise RuntimeError(f"the rounds ended with {ended.code}: {ended.stderr[-2_000:]}")
    return {name: Rounds(**rounds) for name, rounds in json.loads(ended.stdout.splitlines()[-1]).items()}


def _spread(times: list[float]) -> float:
    """Median of every second round over that of the others: what the same thing differs from itself."""
    return round(statistics.median(times[::2]) / statistics.median(times[1::2]), 3)
