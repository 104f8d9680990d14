"""How large a fleet one router decides for: the time of a decision, the memory of the residency index, prefix matching
beside another project's index, and a replay of a large cluster with the real policy.

The replay is one cell: one process, one router that decides for all workers (`cell`). At full size its modules are
compiled (`compiled`), the very ones that a router runs; shorter replays tell that they choose the same workers as they
do interpreted, and what they take so. Without a C compiler all is interpreted, and the report says so.
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
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from libs.controller.protocol import Resident, Tier
from libs.controller.residency import ResidencyIndex
from prove import cell, compiled, decisions_bench, large_pages
from prove.checks import Checks
from prove.processes import finished, resident_bytes
from prove.report import ROOT, Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "5-scale",
    "a decision (chain of 64, 1,000 workers, 20 with residency) <= 1 ms p99 on one core; residency index of 1,000,000 "
    "chunks: memory; prefix matching >= ai-dynamo-runtime's RadixTree.find_matches (64 workers, 32-block chains, "
    "100,000 blocks); one cell of 1,000 workers and 1,000,000 requests in <= 20 minutes",
    seed=54,
)
PEER = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
_PEER_S = 300.0
_STARTS_S = 120.0  # what a replay may take beyond its own time
_BOTH_PLAY = 20_000  # requests that are replayed compiled and interpreted


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
    wanted = 1_000_000 if full else 200
    played = await _cell(checks, details, 1_000 if full else 16, wanted)
    checks.check(f"replay, requests of {wanted:,} in {cell.WITHIN_S / 60:g} minutes", played, wanted, played == wanted)
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


async def _cell(checks: Checks, details: dict[str, JsonValue], workers: int, requests: int) -> int:
    """Returns how many requests were played. At full size on compiled modules, which are held against the interpreter
    on fewer requests before.
    """
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(ROOT), **large_pages.ENVIRONMENT}
    if requests > _BOTH_PLAY:
        interpreted = await _played(environment, workers, _BOTH_PLAY)
        details["replay_interpreted"] = interpreted
        try:
            environment = {**compiled.environment(await compiled.ready()), **large_pages.ENVIRONMENT}
        except compiled.NotCompiledError as error:
            details["not_compiled"] = str(error)
        else:
            short = await _played(environment, workers, _BOTH_PLAY)
            details["replay_compiled"] = short
            checks.equal("choices of the compiled modules", short["chosen"], interpreted["chosen"])
    found = await _played(environment, workers, requests)
    details["replay"] = found
    played = found["requests"]
    assert isinstance(played, int)
    return played


async def _played(environment: Mapping[str, str], workers: int, requests: int) -> dict[str, JsonValue]:
    argv = [sys.executable, "-P", "-m", "prove.cell", str(workers), str(requests)]
    done = await finished(argv, cell.WITHIN_S + _STARTS_S, env=environment, loud=True)
    if done.code:
        raise RuntimeError(f"the replay of {workers} workers ended with {done.code}: see above")
    found: dict[str, JsonValue] = json.loads(done.stdout)
    return found
