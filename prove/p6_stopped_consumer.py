"""One consumer that stops among a thousand that go on: what it costs them, and what becomes of it.

The worker is a process; it stamps each delta, and the consumer's clock is the same machine's. Rounds with and without
the stopped one alternate; two rounds without it differ by what is noise here. That it was dropped is seen at its own
end and in the worker's books.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from statistics import median

from pydantic import JsonValue

from libs.pool.model import CellTarget
from libs.tunnel import CloseReason, Route, RouteClosedError
from prove.checks import Checks
from prove.echo_worker import DELTA
from prove.pool_worker import offering
from prove.pooled import LIMIT_S, ZERO, EchoProcess, Pooled, echoing, pooled, until
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from tests.pool.rig import CALM

CLAIM = Claim(
    "6-stopped-consumer",
    "one stopped consumer among 1,000 live ones: the others' p99 delta latency within noise or <= 1.2x; the stopped "
    "route closed with RESOURCE_EXHAUSTED, its assignment cancelled, its reservation back",
)
LIVE, TICKS = 1_000, 25
"""Live consumers, and the ticks between two deltas of each: four a second."""
MOST = 1.2
TELLING = 2.0
"""Where rounds of the same differ by more, the machine is too busy to tell anything by it."""
_STOPPED_TICKS = 1


@dataclass
class Round:
    """What the live consumers of one round saw, in milliseconds; and the conn_id of the one that stopped."""

    latencies_ms: list[float] = field(default_factory=list)
    short: int = 0
    stopped: int | None = None
    why: str = ""

    @property
    def p99_ms(self) -> float:
        return sorted(self.latencies_ms)[int(0.99 * (len(self.latencies_ms) - 1))]


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice judges what becomes of the stopped one, and nobody's latency."""
    del stage
    full = size is Size.FULL
    live, deltas, pairs = (LIVE, 48, 5) if full else (40, 8, 1)
    # At full size the channel's own bounds, which a hundred deltas a second fill in six seconds.
    knobs: dict[str, object] = {} if full else {"route_items": 32, "route_congested_s": 0.2}
    checks, rounds = Checks(), dict[bool, list[Round]]({False: [], True: []})
    async with echoing(1) as workers, pooled(workers, CALM, **({"keepalive_s": 2.0} | knobs)) as made:
        await made.full()
        if full:
            await played(made, live, 8, with_stopped=False)  # warms both ends up
        for _ in range(pairs):
            for stopped in (False, True):
                before = await workers[0].rest()
                seen = await played(made, live, deltas, with_stopped=stopped)
                rounds[stopped].append(seen)
                await settled(checks, made, workers[0], seen, before, live, len(rounds[stopped]))
    await at_a_worker(checks)
    details: dict[str, JsonValue] = {
        "p99_ms": {"without": [r.p99_ms for r in rounds[False]], "with": [r.p99_ms for r in rounds[True]]},
        "deltas": sum(len(one.latencies_ms) for each in rounds.values() for one in each),
    }
    if full:
        details["noise"] = judge(checks, [r.p99_ms for r in rounds[False]], [r.p99_ms for r in rounds[True]])
    return checks.outcome(details)


async def at_a_worker(checks: Checks) -> None:
    """One stopped consumer and one live one at a worker of ours: its assignment is cancelled, its pages come back."""
    policy = replace(CALM, route_items=16, route_congested_s=0.1)
    async with offering(policy) as (worker, router, dropped):
        stopped = await router.offer((1, 2, 3), 3_500, name="stopped")
        live = await router.offer((4, 5, 6), 200, name="live")
        result = await live.finish()
        checks.equal("worker: tokens of the live one", len(live.tokens), result.usage.generated_tokens)
        await until(lambda: stopped.route.closed is not None)
        closed = stopped.route.closed
        reason = closed.reason.label if closed is not None else ""
        checks.equal("worker: how the stopped one's route ended", reason, CloseReason.RESOURCE_EXHAUSTED.label)
        checks.equal("worker: the owner is told of it alone", dropped, [stopped.route.conn_id])
        machine = worker.worker.interpreter.machine
        await until(lambda: not len(machine))
        checks.equal("worker: assignments under way", len(machine), 0)
        results = dict(worker.worker.interpreter.results)
        checks.equal("worker: how its assignments ended", results, {"completed": 1, "cancelled": 1})
        checks.equal("worker: pages reserved, loading or pinned", not worker.pages_at_rest(), False)


def judge(checks: Checks, without: list[float], stopped: list[float]) -> float:
    """Medians of the rounds' p99 against the noise between rounds without; the noise."""
    noise = max(without) / min(without)
    checks.check("noise: p99 of rounds without, most over least", round(noise, 3), f"<= {TELLING}", noise <= TELLING)
    ratio, most = median(stopped) / median(without), max(MOST, noise)
    checks.check("p99 with a stopped one over without", round(ratio, 3), f"<= {most:.3f}", ratio <= most)
    return round(noise, 3)


async def played(made: Pooled, live: int, deltas: int, *, with_stopped: bool) -> Round:
    """One round: everybody's deltas, and one more route that nobody consumes."""
    seen = Round()
    stopped: Route | None = None
    if with_stopped:
        stopped = await made.pool.bind(CellTarget("A"), b"paced 1000000 %d" % _STOPPED_TICKS, made.seen.on_closed)
        seen.stopped = stopped.conn_id
    routes = [await made.pool.bind(CellTarget("A"), b"paced %d %d" % (deltas, TICKS)) for _ in range(live)]
    async with asyncio.TaskGroup() as group:
        for route in routes:
            group.create_task(_consume(route, deltas, seen))
    if stopped is not None:
        await until(lambda: stopped.closed is not None)
        try:
            while True:
                await stopped.receive(LIMIT_S)
        except RouteClosedError as error:
            seen.why = error.closed.reason.label
    return seen


async def _consume(route: Route, deltas: int, seen: Round) -> None:
    numbers: list[int] = []
    try:
        while True:
            payload = await route.receive(LIMIT_S)
            now = time.monotonic_ns()
            for number, sent_ns in DELTA.iter_unpack(payload):
                numbers.append(number)
                seen.latencies_ms.append((now - sent_ns) / 1e6)
    except RouteClosedError as error:
        seen.short += error.closed.reason is not CloseReason.DONE or numbers != list(range(deltas))


async def settled(
    checks: Checks,
    made: Pooled,
    worker: EchoProcess,
    seen: Round,
    before: dict[str, object],
    live: int,
    number: int,
) -> None:
    """After a round: nothing held; the stopped one paid, alone, and its worker took everything of it back."""
    where = f"round {number} {'with' if seen.stopped is not None else 'without'} a stopped one"
    held, there = await made.rest(), await worker.rest()
    checks.equal(f"{where}: live consumers that lack a delta", seen.short, 0)
    checks.equal(f"{where}: held by the pool", held, ZERO)
    checks.equal(f"{where}: assignments and pages held by the worker", [there["assignments"], there["pages"]], [0, 0])
    exhausted = CloseReason.RESOURCE_EXHAUSTED
    grown = _ended(there, exhausted) - _ended(before, exhausted)
    done = _ended(there, CloseReason.DONE) - _ended(before, CloseReason.DONE)
    if seen.stopped is None:
        checks.equal(f"{where}: routes that ended, and those dropped", [done, grown], [live, 0])
        return
    told = [closed.reason.label for closed in made.seen.closes[seen.stopped]]
    checks.equal(f"{where}: its end, as its consumer and its owner hear it", [seen.why, *told], [exhausted.label] * 2)
    checks.equal(f"{where}: assignments cancelled at the worker for that", [done, grown], [live, 1])
    checks.equal(f"{where}: dropped routes that the owner is told of", made.seen.dropped[-1:], [seen.stopped])
    checks.equal(f"{where}: all of them", len(made.seen.dropped), number)


def _ended(ledger: dict[str, object], reason: CloseReason) -> int:
    ended = ledger["ended"]
    assert isinstance(ended, dict)
    return int(ended.get(reason.label, 0))
