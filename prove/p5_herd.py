"""A hundred requests with one new system prompt at once: computed at most twice, no waiting in vain, no herding.

Live, nobody may wait longer for the common beginning than computing it alone takes. What a request waits for besides
(its own tokens, a lane, ninety-nine others at the ingress and at two processors) is what it waits for when the
beginning is resident already: so each herd is sent twice, and rank by rank the first may be later than the second by no
more than computing takes a *stranger*: a prompt of that length that nobody has seen, sent with the second herd, less
the quickest of that herd. The noise floor is the spread of the time that such a prompt takes on the idle cluster.
Before each herd the cluster comes to rest, so that none pays for what the one before has left to write; before the
first, prompts side by side have measured both workers.

Simulated, eight workers are idle when the herd comes. A request's *wait for the common beginning* is the time from its
arrival until a worker has taken it which then computes none of it, but fetches it or has it (or until a worker takes it
that computes it: there are at most two of those). What has not been computed yet cannot be fetched, so fetching comes
after the wait and is no part of it; a request that could be served only by computing the beginning once more would wait
exactly as long as computing takes. So all three hold together, for every single request: computed at most twice, the
wait at most the time to first token of the same prompt alone on an empty cluster, requests spread over all workers.
What that costs, the fetch on top, is told as the longest time to first token over the same.
"""

from __future__ import annotations

import asyncio
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
    count, length, rounds = (100, 3_072, 5) if size is Size.FULL else (24, 768, 1)
    async with AsyncExitStack() as stack:
        at = stage or await stack.enter_async_context(staged("tiny", workers=2, threads=1, worker_settings=_SETTINGS))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
        herd = Herd(at, await stack.enter_async_context(httpx.AsyncClient(limits=limits)), CLAIM.seed)
        for _ in range(4 if size is Size.FULL else 0):
            await asyncio.gather(*(herd.alone(length + _OWN) for _ in range(4)))
        alone = [await herd.alone(length + _OWN) for _ in range(9 if size is Size.FULL else 2)]
        cold, warm = list[Run](), list[Run]()
        for _ in range(rounds):
            shared = herd.prompt(length)
            for runs in (cold, warm):
                await herd.rest()
                runs.append(await herd.together(shared, count, _OWN, stranger=runs is warm))
        told |= _live(checks, cold, warm, alone, len(at.cluster.workers), timed=size is Size.FULL)
    return checks.outcome(told)


def _simulated(checks: Checks) -> JsonValue:
    schedule = parse(scenarios()[SCENARIO])
    world = World(schedule)
    found = figures(world, world.run())
    workers = [worker.name for worker in schedule.settings.workers]
    served = [_number(found, f"worker.{name}.served") for name in workers]
    spread = round(_number(found, "served.max_over_mean"), 3)
    copies, wait = _number(found, "computed.system"), _number(found, "wait.most_over_alone")
    checks.equal("simulated: what the scenario expects", [*unmet(schedule.expect, found)], [])
    checks.equal("simulated: requests served", sum(served), float(len(schedule.asks)))
    checks.check("simulated: times it is computed", copies, f"1 to {_COPIES:g}", 1 <= copies <= _COPIES)
    name = "simulated: longest wait for the common part, by computing it alone"
    checks.check(name, wait, "above 0, <= 1", 0 < wait <= 1)
    checks.check("simulated: requests a worker, max/mean", spread, f"<= {_SPREAD}", spread <= _SPREAD)
    return {
        "copies": copies, "longest_wait_over_alone": wait, "max_over_mean": spread, "served": [*served],
        "longest_ttft_over_alone": found["ttft.most_over_alone"],
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
    strangers = [round(run.stranger_ms - run.ttft_ms[0], 1) for run in warm]
    limit = round(statistics.median(strangers) + (max(alone) - min(alone)), 1)
    if timed:
        checks.check("live: requests a worker, max/mean", [*spread], f"<= {_SPREAD}", max(spread) <= _SPREAD)
        wait, name = statistics.median(waits), "live: longest wait for the common part, ms, median of the rounds"
        checks.check(name, wait, f"<= {limit}", wait <= limit)
    return json.loads(json.dumps({
        "idle_alone_ms": {"median": round(statistics.median(alone), 1), "spread": round(max(alone) - min(alone), 1)},
        "waits_ms": waits, "stranger_waits_ms": strangers, "max_over_mean": spread,
        "by_worker": [run.by_worker for run in cold],
        "ttft_ms": [
            {"cold": [round(run.ttft_ms[0], 1), round(run.ttft_ms[-1], 1)],
             "warm": [round(other.ttft_ms[0], 1), round(other.ttft_ms[-1], 1)]}
            for run, other in zip(cold, warm, strict=True)
        ],
    }))  # type: ignore[no-any-return]  # fmt: skip
