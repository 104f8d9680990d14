"""Frames through tunnels beside a bare bidirectional stream of the same bytes: how many a second, and how late.

Two processes on the services' event loop, one that sends and one that receives into a thousand routes, each with its
listener. Three shapes, for a tunnel makes one frame of what a turn of the loop has: *single*, a frame for each payload,
beside a message of the frame's bytes; *payload*, frames as the tunnel makes them, counted by the payloads they carry,
beside a message for each payload; *full*, frames of exactly eight lanes, beside a message of the frame's bytes.
Everything stands at once and takes turns.
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
SHAPES = ("single", "payload", "full")
_ROOT = Path(__file__).resolve().parents[1]
Found = dict[str, dict[str, list[float]]]


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice judges only that all of it arrives."""
    del stage
    full = size is Size.FULL
    found = await bench(*((9, 6_000, 1_000) if full else (1, 240, 40)))
    checks = Checks()
    for many in (1, 8):
        if full:
            judge(checks, found, many)
        else:
            least = min(found[shape][f"tunnel {many}"][0] for shape in SHAPES)
            checks.check(f"{many}: units a second", least, "> 0", least > 0)
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
    for shape in SHAPES:
        rates = zip(found[shape][f"tunnel {many}"], found[shape][f"bare {many}"], strict=True)
        ratio = round(median(ours / theirs for ours, theirs in rates), 3)
        checks.check(f"{many}, {shape}: a second, over a bare stream's", ratio, f">= {LEAST}", ratio >= LEAST)
    late = zip(found["p50_ms"][f"tunnel {many}"], found["p50_ms"][f"bare {many}"], strict=True)
    added = round(median(ours - theirs for ours, theirs in late), 4)
    checks.check(f"{many}: p50 added to a bare stream's, ms", added, f"<= {ADDED_MS}", added <= ADDED_MS)
