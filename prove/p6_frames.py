"""Frames through tunnels beside a bare bidirectional stream of the same bytes: how many a second, and how late.

Two processes on the services' event loop, one that sends and one that receives into a thousand routes. A frame carries
one iteration of eight lanes, never more, so that frames are not saved by making them larger. Everything stands at once
and takes turns.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median

from pydantic import JsonValue

from prove.checks import Checks
from prove.processes import finished
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "6-frames",
    "frames per second through one tunnel and eight, 1,000 routes: >= 0.5 of a bare grpc.aio bidirectional stream with "
    "the same bytes; added p50 latency <= 0.3 ms over it",
)
LEAST, ADDED_MS = 0.5, 0.3
_ROOT = Path(__file__).resolve().parents[1]
Found = dict[str, dict[str, list[float]]]


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice judges only that all of it arrives."""
    del stage
    full = size is Size.FULL
    found = await bench(*((9, 6_000, 1_000) if full else (1, 200, 40)))
    checks = Checks()
    for many in (1, 8):
        if full:
            judge(checks, found, many)
        else:
            checks.check(
                f"{many}: frames/s", found[f"tunnel {many}"]["per_s"], "> 0", min(found[f"tunnel {many}"]["per_s"]) > 0
            )
    details: dict[str, JsonValue] = {"rounds": {name: dict(each) for name, each in found.items()}}
    return checks.outcome(details | {"cores": os.cpu_count()})


async def bench(rounds: int, frames: int, paced: int) -> Found:
    """See frame_bench."""
    argv = [sys.executable, "-m", "prove.frame_bench", str(rounds), str(frames), str(paced)]
    done = await finished(argv, 1_800.0, cwd=_ROOT)
    if done.code:
        raise RuntimeError(f"the bench ended with {done.code}: {done.stderr[-2_000:]}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(checks: Checks, found: Found, many: int) -> None:
    """Of each round what the tunnel makes of what the stream beside it did; the median round counts."""
    bare, tunnel = found[f"bare {many}"], found[f"tunnel {many}"]
    ratios = [ours / theirs for ours, theirs in zip(tunnel["per_s"], bare["per_s"], strict=True)]
    ratio = round(median(ratios), 3)
    checks.check(f"{many}: frames/s over a bare stream's", ratio, f">= {LEAST}", ratio >= LEAST)
    added = [ours - theirs for ours, theirs in zip(tunnel["p50_ms"], bare["p50_ms"], strict=True)]
    worst = round(median(added), 4)
    checks.check(f"{many}: p50 added to a bare stream's, ms", worst, f"<= {ADDED_MS}", worst <= ADDED_MS)
