"""A hundred requests with one new system prompt at once: computed at most twice, no waiting in vain, no herding.

Live, nobody may wait longer for the common beginning than computing it alone takes. What a request waits for besides
(its own tokens, a lane, ninety-nine others at the ingress) is what it waits for when the beginning is resident
already: so each herd is sent twice, and rank by rank the first may be later than the second by no more than a cold
prompt of that length takes on an idle cluster. The noise floor is the spread of that time over its repetitions.

Simulated, eight workers are idle when the herd comes, and the policy minimises the time to first token: computing on an
idle worker is as quick as waiting beside a busy one, so each of the eight computes it once. Computed twice in all, and
served by all alike without waiting longer than computing takes, it cannot be: what has not been computed yet cannot be
fetched. So what is held there is that no worker computes it a second time; the other figures are told.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx
from pydantic import JsonValue

from cli.sim.files import scenarios
from libs.simulation.figures import Figure, figures, unmet
from libs.simulation.strict import parse
from libs.simulation.world import World
from prove.checks import Checks
from prove.herd import Herd, Run
from prove.report import Claim, Outcome, Size
from prove.stage import Stage, staged

CLAIM = Claim(
    "5-herd",
    "100 simultaneous requests with one new system prompt, live over 2 workers and simulated over 8 workers and 2 "
    "routers: computed at most twice, nobody waits longer than computing it alone, max/mean of requests <= 1.3",
    seed=56,
)
SCENARIO = "new-system-prompt"
_COPIES, _SPREAD = 2.0, 1.3
_OWN = 16
_SETTINGS = {"kv_bytes": "512MiB", "max_control_tasks": "128"}


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    checks = Checks()
    told: dict[str, JsonValue] = {"simulated": _simulated(checks)}
    count, length, rounds = (100, 2_048, 5) if size is Size.FULL else (24, 768, 1)
    async with AsyncExitStack() as stack:
        at = stage or await stack.enter_async_context(staged("tiny", workers=2, threads=1, worker_settings=_SETTINGS))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
        herd = Herd(at, await stack.enter_async_context(httpx.AsyncClient(limits=limits)), CLAIM.seed)
        alone = [await herd.alone(length + _OWN) for _ in range(9 if size is Size.FULL else 2)]
        cold, warm = list[Run](), list[Run]()
        for _ in range(rounds):
            shared = herd.prompt(length)
            cold.append(await herd.together(shared, count, _OWN))
            warm.append(await herd.together(shared, count, _OWN))
        told |= _live(checks, cold, warm, alone, len(at.cluster.workers), timed=size is Size.FULL)
    return checks.outcome(told)


def _simulated(checks: Checks) -> JsonValue:
    schedule = parse(scenarios()[SCENARIO])
    world = World(schedule)
    found = figures(world, world.run())
    workers = [worker.name for worker in schedule.settings.workers]
    served = [_number(found, f"worker.{name}.served") for name in workers]
    spread = round(max(served) * len(workers) / max(1.0, sum(served)), 3)
    copies, over = _number(found, "computed.system"), _number(found, "ttft.most_over_alone")
    checks.equal("simulated: what the scenario expects", [*unmet(schedule.expect, found)], [])
    checks.equal("simulated: requests served", sum(served), float(len(schedule.asks)))
    few = 1 <= copies <= len(workers)
    checks.check("simulated: times it is computed, at most once a worker", copies, f"1 to {len(workers)}", few)
    return {
        "copies": copies, "longest_wait_over_alone": over, "max_over_mean": spread, "served": [*served],
        "ttft_ms": {name: found[f"ttft.{name}_ms"] for name in ("mean", "most")},
    }  # fmt: skip


def _number(found: dict[str, Figure], name: str) -> float:
    value = found.get(name, 0.0)
    return value if isinstance(value, float) else 0.0


def _live(
    checks: Checks, cold: Sequence[Run], warm: Sequence[Run], alone: Sequence[float], workers: int, *, timed: bool
) -> dict[str, JsonValue]:
    faults = [fault for run in (*cold, *warm) for fault in run.faults]
    checks.check("live: every answer complete, usage exact", faults[:10], [], not faults)
    copies = [round(run.copies, 3) for run in cold]
    checks.check(
        "live: times it is computed", [*copies], f"1 to {_COPIES:g}", min(copies) >= 1 and max(copies) <= _COPIES
    )
    again = [round(run.copies, 3) for run in warm]
    checks.check("live: and when it is there", [*again], f"<= {_COPIES:g} with the first time",
                 all(one + two <= _COPIES for one, two in zip(copies, again, strict=True)))  # fmt: skip
    spread = [round(run.max_over_mean(workers), 3) for run in cold]
    waits = [
        round(max(one - two for one, two in zip(first.ttft_ms, second.ttft_ms, strict=True)), 1)
        for first, second in zip(cold, warm, strict=True)
    ]
    limit = round(statistics.median(alone) + (max(alone) - min(alone)), 1)
    if timed:
        checks.check("live: requests a worker, max/mean", [*spread], f"<= {_SPREAD}", max(spread) <= _SPREAD)
        wait, name = statistics.median(waits), "live: longest wait for the common part, ms, median of the rounds"
        checks.check(name, wait, f"<= {limit}", wait <= limit)
    return json.loads(json.dumps({
        "alone_ms": {"median": round(statistics.median(alone), 1), "spread": round(max(alone) - min(alone), 1)},
        "waits_ms": waits, "by_worker": [run.by_worker for run in cold], "max_over_mean": spread,
        "ttft_ms": [
            {"cold": [round(run.ttft_ms[0], 1), round(run.ttft_ms[-1], 1)],
             "warm": [round(other.ttft_ms[0], 1), round(other.ttft_ms[-1], 1)]}
            for run, other in zip(cold, warm, strict=True)
        ],
    }))  # type: ignore[no-any-return]  # fmt: skip
