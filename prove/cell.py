"""A cell in a process of its own: `python -m prove.cell WORKERS REQUESTS`, interpreted or on `prove.compiled` modules.

One router decides for all workers. What the replay found is one JSON object on standard output, how far it is stands on
standard error. Past its time it is given up, and the requests that were played tell how much was reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import replace

from pydantic import JsonValue

from libs.controller import candidates
from libs.simulation.traces.costs import DECLARED, Error, TierSet
from libs.simulation.traces.recorded import SHIPPED, read, scaled
from libs.simulation.traces.replay import Setting, figures, loaded
from libs.simulation.traces.replay import run as replay
from libs.simulation.traces.synthetic import Copies
from prove import large_pages
from prove.processes import resident_bytes

WITHIN_S = 1_200.0
_SEED = 54
_LOAD = 0.6
_TRACE = SHIPPED / "mooncake_synthetic_trace.jsonl"
_COSTS = replace(DECLARED, ram_blocks=500, ssd_blocks=1_000, heartbeat_ms=2_000.0)
"""Smaller tiers, so that the simulated blocks fit this machine; heartbeats as far apart as a large fleet's."""
_SHOWN_S = 20.0  # between two reports of progress
_GROWN = 1 << 13  # requests after which there is much more memory


class _LateError(Exception):
    """The replay's time is over after so many requests."""

    def __init__(self, done: int) -> None:
        self.done = done
        super().__init__(f"{done} requests")


def play(workers: int, requests: int) -> dict[str, JsonValue]:
    """See the module."""
    began, worked = time.perf_counter(), time.process_time()
    recorded = read(_TRACE, None if requests >= 10_000 else 300)
    # Round robin in the tiers of the cell's workers, on one copy.
    factor = loaded(recorded, _LOAD, TierSet.LOCAL, 8, _COSTS)
    rows = Copies(scaled(recorded, factor), workers, requests)
    setting = Setting("segue", TierSet.LOCAL, Error.REDRAWN, _SEED, workers, _COSTS)
    shown = 0.0

    def progress(done: int) -> None:
        nonlocal shown
        seconds = time.perf_counter() - began
        if seconds > WITHIN_S:
            raise _LateError(done)
        if done % _GROWN == 0:
            large_pages.collapse()
        if seconds - shown >= _SHOWN_S:
            shown = seconds
            print(
                f"  {done:,} of {requests:,} requests in {seconds:,.0f} s: "
                f"{seconds / done * (requests - done) / 60:.1f} more minutes",
                file=sys.stderr,
                flush=True,
            )

    try:
        found = replay(rows, setting, progress)
    except _LateError as late:
        return {"workers": workers, "requests": late.done, **_spent(began, worked, late.done)}
    one = figures(found)
    return {
        "ttft_ms": {"mean": round(one.mean, 1), "p50": round(one.p50, 1), "p99": round(one.p99, 1)},
        "hit_by_tier": {tier: round(share, 3) for tier, share in one.hit_by_tier.items()},
        "max_over_mean_busy": round(one.max_over_mean_busy, 3),
        "max_over_mean_work": round(one.max_over_mean_work, 3),
        "decisions_per_s": round(one.decisions_per_s),
        "chosen": hashlib.sha256(repr(found.chosen).encode()).hexdigest()[:16],
        "workers": workers,
        "requests": requests,
        **_spent(began, worked, requests),
    }


def _spent(began: float, worked: float, requests: int) -> dict[str, JsonValue]:
    processor_s = time.process_time() - worked
    return {
        "compiled": not (candidates.__file__ or "").endswith(".py"),
        "minutes": round((time.perf_counter() - began) / 60, 2),
        "processor_minutes": round(processor_s / 60, 2),
        "processor_ms_per_request": round(processor_s / max(1, requests) * 1e3, 3),
        "resident_mb": round(resident_bytes(os.getpid()) / 1e6),
    }


if __name__ == "__main__":
    print(json.dumps(play(int(sys.argv[1]), int(sys.argv[2])), indent=2))
