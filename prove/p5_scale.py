"""How large a fleet one router decides for: the time of a decision, the memory of the residency index, prefix matching
beside another project's index, and a replay of a large cluster with the real policy.

The replay is one cell: one process, one router that decides for all workers. How far it is stands on standard error.
Past its time it is given up, and the requests that were played tell how much of the target was reached.
A decision is judged by the processor time it takes; the time on the wall, which other programs lengthen, is reported.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from pydantic import JsonValue

from libs.controller.protocol import Resident, Tier
from libs.controller.residency import ResidencyIndex
from libs.simulation.traces.costs import DECLARED, Error, TierSet
from libs.simulation.traces.recorded import SHIPPED, read, scaled
from libs.simulation.traces.replay import Setting, figures, loaded
from libs.simulation.traces.replay import run as replay
from libs.simulation.traces.synthetic import Copies
from prove import decisions_bench
from prove.checks import Checks
from prove.processes import finished, resident_bytes
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "5-scale",
    "a decision (chain of 64, 1,000 workers, 20 with residency) <= 1 ms p99 on one core; residency index of 1,000,000 "
    "chunks: memory; prefix matching >= ai-dynamo-runtime's RadixTree.find_matches (64 workers, 32-block chains, "
    "100,000 blocks); one cell of 1,000 workers and 1,000,000 requests in <= 20 minutes",
    seed=54,
)
PEER = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
_LOAD = 0.6
_TRACE = SHIPPED / "mooncake_synthetic_trace.jsonl"
_COSTS = replace(DECLARED, ram_blocks=500, ssd_blocks=1_000, heartbeat_ms=2_000.0)
"""Smaller tiers, so that the simulated blocks fit this machine; heartbeats as far apart as a large fleet's."""
_PEER_S = 300.0
_SHOWN_S = 20.0  # between two reports of progress
_WITHIN_S = 1_200.0


class _LateError(Exception):
    """The replay's time is over after so many requests."""

    def __init__(self, done: int) -> None:
        self.done = done
        super().__init__(f"{done} requests")


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    full, checks, details = size is Size.FULL, Checks(), dict[str, JsonValue]()
    decided = await asyncio.to_thread(decisions_bench.measure, 1_000, 40 if full else 3, 25 if full else 2)
    details["decision_ms"] = {**decided}
    checks.check("decision p99, ms of processor", decided["cpu_p99"], 1.0, decided["cpu_p99"] <= 1.0 or not full)
    memory = await asyncio.to_thread(_memory, 1_000_000 if full else 20_000)
    details["index"] = {**memory}
    checks.check("index, bytes a chunk", memory["bytes_per_chunk"], 200, memory["bytes_per_chunk"] <= 200 or not full)
    await _matching(checks, details, 3_125 if full else 100)
    found = await asyncio.to_thread(_scale, *((1_000, 1_000_000) if full else (16, 200)))
    details["replay"] = {**found}
    wanted = 1_000_000 if full else 200
    name = f"replay, requests of {wanted:,} in {_WITHIN_S / 60:g} minutes"
    checks.check(name, found["requests"], wanted, found["requests"] == wanted)
    return checks.outcome(details)


def _memory(chunks: int) -> dict[str, float]:
    """Resident set before and after the index was filled; names are dropped as a heartbeat's are."""
    index, draw = ResidencyIndex(), random.Random(CLAIM.seed)
    before, began = resident_bytes(os.getpid()), time.perf_counter()
    for number in range(chunks):
        name = draw.randbytes(32).hex()
        slot = index.slot(f"w{number % 1_000:03}")
        index.add(slot, Resident(name, 256, Tier.GPU, "f"), 0.0)
    seconds = time.perf_counter() - began
    grown = resident_bytes(os.getpid()) - before
    assert len(index) == chunks
    return {
        "mb": round(grown / 1e6, 1),
        "bytes_per_chunk": round(grown / chunks, 1),
        "adds_per_s": round(chunks / seconds),
    }


async def _matching(checks: Checks, details: dict[str, JsonValue], count: int) -> None:
    """The same chains and holders for both, one after the other."""
    draw = random.Random(CLAIM.seed)
    names = [[draw.getrandbits(63) for _ in range(32)] for _ in range(count)]
    held = [[(worker, 32) for worker in draw.sample(range(64), draw.randint(1, 4))] for _ in names]
    chains = [[f"{name:064x}" for name in chain] for chain in names]
    index = ResidencyIndex()
    for chain, holders in zip(chains, held, strict=True):
        for worker, depth in holders:
            for name in chain[:depth]:
                index.add(index.slot(f"w{worker}"), Resident(name, 256, Tier.GPU, "f"), 0.0)
    rates = []
    for _ in range(7):
        began = time.perf_counter()
        for chain in chains:
            index.find_matches(chain)
        rates.append(len(chains) / (time.perf_counter() - began))
    ours = max(rates)
    details["matches_per_s"] = round(ours)
    matched = index.find_matches(chains[0])
    checks.equal("matched", matched, {f"w{worker}": depth for worker, depth in held[0]})
    if not PEER.exists():
        details["peer_matches_per_s"] = "not measured: make peers installs ai-dynamo-runtime"
        checks.check("peer was measured", PEER.name, "present", count < 1_000)
        return
    with tempfile.TemporaryDirectory(prefix="segue-radix-") as folder:
        given = Path(folder) / "chains.json"
        given.write_text(json.dumps({"chains": names, "held": held}))
        script = Path(__file__).with_name("peer_radix.py")
        done = await finished([str(PEER), str(script), str(given)], _PEER_S)
    if done.code:
        details["peer_matches_per_s"] = done.stderr[-500:]
        checks.check("peer was measured", done.code, 0, count < 1_000)
        return
    theirs = float(json.loads(done.stdout)["per_s"])
    details["peer_matches_per_s"] = round(theirs)
    checks.check("matches a second over the peer's", round(ours / theirs, 2), 1.0, ours >= theirs or count < 1_000)


def _scale(workers: int, requests: int) -> dict[str, JsonValue]:
    began, worked = time.perf_counter(), time.process_time()
    recorded = read(_TRACE, None if requests >= 10_000 else 300)
    # Round robin in the tiers of the cell's workers, on one copy.
    factor = loaded(recorded, _LOAD, TierSet.LOCAL, 8, _COSTS)
    rows = Copies(scaled(recorded, factor), workers, requests)
    setting = Setting("segue", TierSet.LOCAL, Error.REDRAWN, CLAIM.seed, workers, _COSTS)
    shown = 0.0

    def progress(done: int) -> None:
        nonlocal shown
        seconds = time.perf_counter() - began
        if seconds > _WITHIN_S:
            raise _LateError(done)
        if seconds - shown >= _SHOWN_S:
            shown = seconds
            print(
                f"  {done:,} of {requests:,} requests in {seconds:,.0f} s: "
                f"{seconds / done * (requests - done) / 60:.1f} more minutes",
                file=sys.stderr,
                flush=True,
            )

    try:
        one = figures(replay(rows, setting, progress))
    except _LateError as late:
        return {"workers": workers, "requests": late.done, **_spent(began, worked)}
    return {
        "ttft_ms": {"mean": round(one.mean, 1), "p50": round(one.p50, 1), "p99": round(one.p99, 1)},
        "hit_by_tier": {tier: round(share, 3) for tier, share in one.hit_by_tier.items()},
        "max_over_mean_busy": round(one.max_over_mean_busy, 3),
        "max_over_mean_work": round(one.max_over_mean_work, 3),
        "decisions_per_s": round(one.decisions_per_s),
        "workers": workers,
        "requests": requests,
        **_spent(began, worked),
    }


def _spent(began: float, worked: float) -> dict[str, JsonValue]:
    return {
        "minutes": round((time.perf_counter() - began) / 60, 2),
        "processor_minutes": round((time.process_time() - worked) / 60, 2),
        "resident_mb": round(resident_bytes(os.getpid()) / 1e6),
    }


if __name__ == "__main__":
    print(json.dumps(_scale(int(sys.argv[1]), int(sys.argv[2])), indent=2))
