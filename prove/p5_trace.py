"""Our routing policy beside five others on recorded traces: the same workers, the same declared costs, only the choice
differs. Time to first token, balance, and how often a prefix is found with no time at all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from prove.checks import Checks
from prove.processes import finished
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "5-trace",
    "on both recorded traces, every tier set and load 0.3, 0.6, 0.85, median of three seeds: mean TTFT <= 1.02x and "
    "p99 <= 1.05x the best baseline's, max/mean busy <= 1.2 from 0.6 on; persistent error: mean <= 1.05x, busy <= 1.3; "
    "order-only hit rate >= the balanced baseline's",
)
TRACES = ("mooncake_synthetic_trace.jsonl", "dynamo_mooncake_trace_1000.jsonl")
JUDGED = (0.3, 0.6, 0.85)
KNOWN_BALANCED = {TRACES[0]: 0.638, TRACES[1]: 0.378}
"""Block hit rates of match minus relative load, as an independent count has them."""
_WITHIN_S = 5_400.0
_ROOT = Path(__file__).resolve().parents[1]


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice replays a part of the smaller trace at one load and judges only that it is whole."""
    del stage
    checks, details = Checks(), dict[str, JsonValue]()
    for trace in TRACES if size is Size.FULL else TRACES[1:]:
        more = () if size is Size.FULL else ("--limit", "120", "--seeds", "1", "--rho", "0.6", "--tiers", "local")
        document = await _command(trace, *more)
        judge(checks, trace, document, full=size is Size.FULL)
        details[trace] = document
    return checks.outcome(details)


async def _command(trace: str, *more: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "cli", "sim", "trace", trace, "--workers", "8", "--policy", "all", "--json", *more]
    done = await finished(argv, _WITHIN_S, cwd=_ROOT)
    if done.code != 0:
        raise RuntimeError(f"segue sim trace {trace} ended with {done.code}: {done.stderr[-2_000:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def judge(checks: Checks, trace: str, document: dict[str, Any], full: bool) -> None:
    """Every cell at a judged load, and the order-only hit rates."""
    short = trace.split("_")[0]
    for cell in document["cells"]:
        policies = cell["policies"]
        ours = policies["segue"]
        others = [one for name, one in policies.items() if name != "segue"]
        where = f"{short} {cell['tiers']} {cell['rho']} {cell['error']}"
        if not full:
            checks.check(f"{where}: policies", len(others), 5, len(others) == 5)
            worst = max(one["ttft_ms"]["mean"] for one in others)
            checks.check(f"{where}: mean", ours["ttft_ms"]["mean"], worst, ours["ttft_ms"]["mean"] < worst)
            continue
        if cell["rho"] not in JUDGED:
            continue
        learned = cell["error"] == "persistent"
        mean = ours["ttft_ms"]["mean"] / min(one["ttft_ms"]["mean"] for one in others)
        most = 1.05 if learned else 1.02
        checks.check(f"{where}: mean over the best", round(mean, 4), most, mean <= most)
        if not learned:
            p99 = ours["ttft_ms"]["p99"] / min(one["ttft_ms"]["p99"] for one in others)
            checks.check(f"{where}: p99 over the best", round(p99, 4), 1.05, p99 <= 1.05)
        if learned or cell["rho"] >= 0.6:
            busy, limit = ours["max_over_mean_busy"], 1.3 if learned else 1.2
            checks.check(f"{where}: max/mean busy", busy, limit, busy <= limit)
    if full:
        orders = document["order_only"]
        rate, limit = orders["segue"]["hit_rate"], KNOWN_BALANCED[trace]
        checks.check(f"{short}: order-only hit rate", rate, limit, rate >= limit)
