"""The adaptive floor: a day of recorded arrivals under a logical clock, and a burst after the night on real sockets.

The day judges that the count follows the load and costs neither coverage nor churn. The burst judges what an idle
pool's first customers pay: pools with the static and with the adaptive floor stand over the same worker processes, and
bursts at them alternate; a second static pool says what is noise.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, dataclass, field, replace
from statistics import median

from pydantic import JsonValue

from libs.pool.floor import Reason
from libs.pool.knobs import FloorMode, PoolPolicy
from libs.pool.model import CellTarget
from prove.checks import Checks
from prove.p6_stopped_consumer import TELLING
from prove.pool_day import CURVE, NIGHT_HOURS, Day, day
from prove.pooled import LIMIT_S, ZERO, Pooled, echoing, pooled, until
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from tests.pool.rig import CALM

CLAIM = Claim(
    "6-floor",
    "adaptive floor under a 24 h logical day of the traces' arrivals with an 8 h idle night: no coverage loss, bounded "
    "switches and churn, the count follows load; a burst after the night: bind wait p99 and TTFT <= 1.2x of the static "
    "floor",
    seed=68,
)
MOST = 1.2
_BURST, _PER_S = 300, 1_000.0
_STATIC = replace(CALM, floor_mode=FloorMode.STATIC, keepalive_s=2.0)
_ADAPTIVE = replace(_STATIC, floor_mode=FloorMode.ADAPTIVE, idle_s=0.05, recovery_grace_s=0.0)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice has hours of five minutes, and judges no time."""
    del stage
    full = size is Size.FULL
    checks = Checks()
    found = await asyncio.to_thread(day, PoolPolicy(), CLAIM.seed, 3_600.0 if full else 300.0)
    judge(checks, found, PoolPolicy(), full)
    bursts = await after_the_night(checks, 40 if full else 2, _BURST if full else 20)
    if full:
        judge_bursts(checks, bursts)
    details: dict[str, JsonValue] = {
        "curve_requests_an_hour_and_cell": list(CURVE),
        "night_hours": NIGHT_HOURS,
        "day": asdict(found) | {"looked": dict(found.looked), "astray": [*found.astray[:10]]},
        "bursts_ms": {name: one.medians() for name, one in bursts.items()},
    }
    return checks.outcome(details)


def judge(checks: Checks, found: Day, policy: PoolPolicy, full: bool) -> None:
    """The day."""
    checks.check("requests", found.requests, "> 0", found.requests > (5_000 if full else 100))
    checks.equal("requests without a writer, or cut", found.lost, 0)
    least = min(found.least.values())
    checks.check("fewest serving writers of a cell, ever", least, f">= {policy.survivability_min}", least >= 1)
    spells = found.quiet_spells
    checks.check("spells quiet enough to be idle", spells, ">= 2", spells >= 2)
    # Into each spell and out of it; and the evening's, which is not over.
    checks.check("switches", found.switches, f"<= {2 * spells + 2}", 0 < found.switches <= 2 * spells + 2)
    shrunk, most = found.shrunk, (found.switches // 2 + 1) * 3
    checks.check("writers that the floor took out", shrunk, f"<= {most}", 0 < shrunk <= most)
    checks.equal("looks at which the count was not what the load asks for", found.astray[:5], [])
    looked = dict(found.looked)
    checks.check(
        "looks at idle and at active cells",
        looked,
        ">= 10 each",
        min(looked.get("idle", 0), looked.get("active", 0)) >= 10,
    )
    night, noon = found.by_hour[NIGHT_HOURS // 2], found.by_hour[12]
    checks.check("writers at night and at noon", [night, noon], "half", night <= noon / 2)
    if full:
        # Each periodic generation makes every writer anew, by intent; the floor adds what it took out and brought back.
        periodic = found.commits.get("periodic", 0)
        bound = 10 * (periodic + 1) + 2 * shrunk
        checks.check("connects", found.connects, f"<= {bound}", periodic >= 80 and found.connects <= bound)


@dataclass
class Bursts:
    """Each burst's p99, in milliseconds."""

    waits: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        return {"bind_wait_p99": round(median(self.waits), 3), "ttft_p99": round(median(self.ttfts), 3)}


async def after_the_night(checks: Checks, rounds: int, routes: int) -> dict[str, Bursts]:
    """Bursts at the three pools in turn, the order drawn."""
    chance = random.Random(CLAIM.seed)
    async with (
        echoing(2) as workers,
        pooled(workers, _STATIC) as static,
        pooled(workers, _STATIC) as again,
        pooled(workers, _ADAPTIVE) as adaptive,
    ):
        pools = {"static": static, "static again": again, "adaptive": adaptive}
        found = {name: Bursts() for name in pools}
        await static.full()
        await again.full()
        nights = 0
        for number in range(-2, rounds):
            for name in chance.sample(list(pools), len(pools)):
                made = pools[name]
                due = Reason.IDLE if made is adaptive else Reason.STATIC
                await until(lambda made=made, due=due: _at_floor(made, due))
                nights += made is adaptive
                waits, ttfts = await burst(made, routes, chance)
                if number >= 0:  # the first warm up
                    found[name].waits.append(_p99(waits))
                    found[name].ttfts.append(_p99(ttfts))
                checks.made += _unless_equal(f"{name}: held by the pool after a burst", await made.rest(), ZERO)
        switches = adaptive.pool.status().pool.floor_switches
        checks.check(
            "times the adaptive pool went to its night floor and came back",
            switches,
            f">= {2 * nights - 1}",
            switches >= 2 * nights - 1,
        )
    return found


def _at_floor(made: Pooled, reason: Reason) -> bool:
    """Every endpoint has what its floor asks for, for this reason, and nothing else is under way."""
    told = made.pool.status().pool
    wanted = sum(view.floor for view in told.endpoints)
    return len(told.writers) == wanted and all(
        view.reason is reason and view.active == view.floor and not view.dialling for view in told.endpoints
    )


def _unless_equal(name: str, figure: JsonValue, limit: JsonValue) -> list[dict[str, JsonValue]]:
    """A check that is worth a line only where it fails."""
    checks = Checks()
    checks.equal(name, figure, limit)
    return checks.failed


async def burst(made: Pooled, routes: int, chance: random.Random) -> tuple[list[float], list[float]]:
    """A thousand a second: how long each waited for its bind, and for its first payload, in milliseconds."""
    waits: list[float] = []
    ttfts: list[float] = []

    async def request() -> None:
        began = time.perf_counter()
        route = await made.pool.bind(CellTarget("A"), b"stream 4")
        waits.append((time.perf_counter() - began) * 1e3)
        await route.receive(LIMIT_S)
        ttfts.append((time.perf_counter() - began) * 1e3)
        async for _ in route:
            pass

    async with asyncio.TaskGroup() as group:
        for _ in range(routes):
            group.create_task(request())
            await asyncio.sleep(chance.expovariate(_PER_S))
    return waits, ttfts


def judge_bursts(checks: Checks, found: dict[str, Bursts]) -> None:
    """Medians of the bursts' p99 over the static floor's."""
    static, again, adaptive = (found[name].medians() for name in ("static", "static again", "adaptive"))
    for name in static:
        ratio, noise = adaptive[name] / static[name], max(again[name] / static[name], static[name] / again[name])
        checks.check(f"noise: {name}, static over static", round(noise, 3), f"<= {TELLING}", noise <= TELLING)
        most = max(MOST, noise)
        checks.check(f"{name}, adaptive over static", round(ratio, 3), f"<= {most:.3f}", ratio <= most)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
