"""Nobody hangs, nothing grows, nothing healthy is closed: outages, a hundred swaps, a map that empties, idle routes.

Sockets and processes where the claim is about them; a logical clock where hours are meant. The logical ones are the
pool's own tests, over its whole core or over whole tunnels, run again here with what they find.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

from pydantic import JsonValue

from libs.pool.contours import Contour
from libs.pool.errors import GoDirectError, NoCoverageError
from libs.pool.knobs import NoCoverage, PoolPolicy
from libs.pool.model import CellTarget, WorkerTarget
from libs.pool.readiness import State
from libs.tunnel import CloseReason, Route, RouteClosedError
from prove.checks import Checks
from prove.pool_worker import break_elected, hearing
from prove.pooled import LIMIT_S, ZERO, EchoProcess, Pooled, echoing, pooled, until
from prove.processes import resident_bytes
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from tests.pool import test_logical_hours as hours
from tests.pool.logical import logically
from tests.pool.rig import CALM
from tests.pool.test_idle_routes import ten_minutes
from tests.pool.world import World

CLAIM = Claim(
    "6-nobody-hangs",
    "a cell without a live writer answers within the policy's wait (hold, direct, fail); a pool that never came up "
    "says so and is not ready; 100 swaps: bounded draining writers and memory; 6 logical hours of incomplete coverage "
    "are visible and never half-activate; a map N -> 0 -> 1 -> N closes no healthy tunnel; an idle open route of 10 "
    "logical minutes does not end, ending either side ends it; heartbeats stay single through the loss of the elected "
    "tunnel",
    seed=67,
)
_WAIT_S = 0.3
_SLACK_S = 5.0
"""For a busy machine; a bind that hangs is found all the same."""
_BINDS = 64


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    full = size is Size.FULL
    checks, details = Checks(), dict[str, JsonValue]()
    async with echoing(2) as workers:
        await outage(checks, workers[0])
        await emptied_map(checks, workers)
        await either_side(checks, workers[0])
        details["swaps"] = await swaps(checks, workers, 100 if full else 6)
    await logical_hours(checks, full)
    details["heartbeats"] = await heartbeats(checks, 20 if full else 2)
    return checks.outcome(details)


# --- no live writer ---


async def outage(checks: Checks, worker: EchoProcess) -> None:
    """Before the pool ever came up, and after it has: every bind is answered, as its policy says."""
    await worker.kill()
    async with pooled([worker], CALM, no_coverage_wait_s=_WAIT_S) as made:
        ready = await made.pool.wait_ready(_WAIT_S)
        state = made.pool.readiness.state.value
        checks.equal("never came up: ready, and why not", [ready, state], [False, State.STARTING.value])
        await answers(checks, made, "never came up")
        waiting = asyncio.create_task(_hold_for_ever(made, worker))
        await worker.start()
        made.observe_all()
        route = await waiting
        checks.equal("a held bind gets the worker that comes", route.closed, None)
        route.close()
        await made.full()
        await worker.kill()
        await until(lambda: not made.pool.writers())
        checks.equal("after its loss: ready", made.pool.readiness.ready, False)
        await answers(checks, made, "after its loss")
        checks.equal("held by the pool in the end", await made.rest(), ZERO)
        checks.equal("binds still held", made.pool.status().held, 0)
    await worker.start()


async def _hold_for_ever(made: Pooled, worker: EchoProcess) -> Route:
    made.pool.set_policy(replace(CALM, no_coverage_wait_s=LIMIT_S))
    return await made.pool.bind(WorkerTarget(worker.name), b"hold")


async def answers(checks: Checks, made: Pooled, when: str) -> None:
    """Many at once under each policy."""
    policies: dict[str, tuple[PoolPolicy, type[Exception], float]] = {
        "hold": (replace(CALM, no_coverage_wait_s=_WAIT_S), NoCoverageError, _WAIT_S),
        "direct": (replace(CALM, no_coverage=NoCoverage.DIRECT), GoDirectError, 0.0),
        "fail": (replace(CALM, no_coverage=NoCoverage.FAIL), NoCoverageError, 0.0),
        "hold, nobody more": (replace(CALM, no_coverage_wait_s=LIMIT_S, hold_max=0), NoCoverageError, 0.0),
    }
    for name, (policy, due, least_s) in policies.items():
        made.pool.set_policy(policy)
        loop = asyncio.get_running_loop()
        began = loop.time()
        binds = [
            made.pool.bind(CellTarget("A") if i % 2 else WorkerTarget(made.workers[0].name), b"x")
            for i in range(_BINDS)
        ]
        try:
            async with asyncio.timeout(least_s + _SLACK_S):
                found = await asyncio.gather(*binds, return_exceptions=True)
        except TimeoutError:
            checks.check(f"{when}, {name}: answered", "not all", "all", False)
            continue
        took = loop.time() - began
        kinds = sorted({type(one).__name__ for one in found})
        checks.equal(f"{when}, {name}: answers", kinds, [due.__name__])
        checks.check(f"{when}, {name}: seconds", round(took, 3), f">= {least_s}", took >= least_s)


# --- swaps and maps ---


async def swaps(checks: Checks, workers: list[EchoProcess], count: int) -> JsonValue:
    """One after the other, with routes that never end on each generation."""
    draining, leaving, memory = 0, 0, list[int]()
    async with pooled(workers, CALM) as made:
        await made.full()
        routes: list[Route] = []
        for number in range(1, count + 1):
            routes = [route for route in routes if route.closed is None]
            for worker in workers:
                routes.append(await made.pool.bind(WorkerTarget(worker.name), b"hold", made.seen.on_closed))
            made.pool.swap()
            await until(lambda due=number: made.pool.status().pool.commits.get("operator", 0) >= due)
            writers = made.pool.status().pool.writers
            held = [one for one in writers if one.contour is Contour.DRAINING and one.closing is None]
            draining = max(draining, len(held))
            leaving = max(leaving, sum(one.closing is not None for one in writers))
            # What is noted of them here is not the pool's.
            made.seen.up.clear()
            made.seen.lost.clear()
            memory.append(resident_bytes(os.getpid()))
        made.pool._core.books.check_integrity()
        limit, full = CALM.drain_threshold, 2 * len(workers)
        checks.check("most draining writers", draining, f"<= {limit}", 0 < draining <= limit)
        # A generation's worth at a time: each ends in order, which takes a moment.
        checks.check("most on their way out", leaving, f"<= {4 * full}", leaving <= 4 * full)
        if count >= 100:
            reasons = {closes[0].reason.label for closes in made.seen.closes.values()}
            checks.equal("how routes past the threshold ended", [*reasons], [CloseReason.RETIRED.label])
            # From where the draining writers have reached their bound.
            first, last = memory[count // 2], memory[-1]
            checks.check("memory, last over middle", round(last / first, 3), "<= 1.1", last <= 1.1 * first)
        for route in routes:
            route.close()
        checks.equal("held by the pool after the swaps", await made.rest(), ZERO)
        await until(lambda: len(made.pool.writers()) == full)
    for worker in workers:
        left = await worker.rest()
        checks.equal(f"held by worker {worker.name} after the swaps", [left["assignments"], left["permits"]], [0, 0])
    return {
        "most_draining": draining,
        "most_leaving": leaving,
        "resident_mib": [round(one / 2**20, 1) for one in memory[::10]],
    }


async def emptied_map(checks: Checks, workers: list[EchoProcess]) -> None:
    """N -> 0 -> 1 -> N, each long enough to be taken if it could be."""
    async with pooled(workers, CALM, vanish_grace_s=60.0) as made:
        await made.full()
        before = {writer.writer for writer in made.pool.writers()}
        routes = [await made.pool.bind(WorkerTarget(worker.name), b"hold") for worker in workers]
        made.observe()
        await until(lambda: "empty-map-refused" in made.seen.warnings)
        checks.equal("map of none: ready", made.pool.readiness.ready, True)
        for listed in (workers[:1], workers):
            made.observe(*listed)
            await until(lambda: made.pool.status().pool.map.committed_revision == made.revision)
        checks.equal("warned of the endpoint that went and came", "endpoint-returned" in made.seen.warnings, True)
        after = {writer.writer for writer in made.pool.writers()}
        checks.equal("N -> 0 -> 1 -> N: tunnels lost", [len(made.seen.lost), len(before - after)], [0, 0])
        checks.equal("N -> 0 -> 1 -> N: routes that ended", [route.closed for route in routes], [None] * len(routes))
        for route in routes:
            route.close()
        checks.equal("held by the pool after the maps", await made.rest(), ZERO)


# --- routes without traffic ---


async def either_side(checks: Checks, worker: EchoProcess) -> None:
    """The request's side gives up, or the delivery's ends: the other hears of it, the permit comes back."""
    async with pooled([worker], CALM) as made:
        await made.full()
        before = await worker.rest()

        async def request(route: Route) -> None:
            async with route:
                await route.receive(LIMIT_S)

        given_up = await made.pool.bind(WorkerTarget(worker.name), b"hold", made.seen.on_closed)
        task = asyncio.create_task(request(given_up))
        await asyncio.sleep(0)
        checks.equal("an idle open route holds its permit", made.held()["permits"], 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        checks.equal("the request's side ends: held by the pool", await made.rest(), ZERO)
        there = await worker.rest()
        cancelled = there["ended"].get("cancelled", 0) - before["ended"].get("cancelled", 0)
        checks.equal("the request's side ends: at the worker", [cancelled, there["permits"]], [1, 0])

        delivered = await made.pool.bind(WorkerTarget(worker.name), b"hold", made.seen.on_closed)
        consumer = asyncio.create_task(delivered.receive(LIMIT_S))
        delivered.try_send(b"end")
        found = (await asyncio.gather(consumer, return_exceptions=True))[0]
        reason = found.closed.reason.label if isinstance(found, RouteClosedError) else repr(found)
        checks.equal("the delivery's side ends: its consumer hears", reason, CloseReason.DONE.label)
        checks.equal("the delivery's side ends: held by the pool", await made.rest(), ZERO)
        told = [len(made.seen.closes[route.conn_id]) for route in (given_up, delivered)]
        checks.equal("each end told", told, [1, 1])


# --- hours ---


async def logical_hours(checks: Checks, full: bool) -> None:
    """Of the core, and of whole tunnels."""
    played: dict[str, Callable[[], object]] = {
        "six hours of incomplete coverage": lambda: _world(
            hours.test_six_hours_of_incomplete_coverage_are_visible_and_never_half_activate, 20
        ),
        "an idle open route of ten minutes, the core": lambda: _world(hours.test_ten_idle_minutes_end_no_open_route, 1),
        "a map that is empty for an hour": lambda: _world(
            hours.test_outage_of_the_map_and_its_recovery_close_nothing, 20
        ),
        "a hundred swaps": lambda: _world(hours.test_a_hundred_swaps_in_a_row_stay_bounded, 1),
    }
    for name, play in played.items() if full else list(played.items())[:2]:
        await _plays(checks, f"logical clock: {name}", asyncio.to_thread(play))
    frames = asyncio.to_thread(logically, lambda: ten_minutes(PoolPolicy(reinit_interval_s=0)))
    found = await _plays(checks, "logical clock: an idle open route of ten minutes, whole tunnels", frames)
    checks.check("frames of keepalive meanwhile", found, ">= 120", isinstance(found, int) and found >= 120)


async def _plays(checks: Checks, name: str, play: Awaitable[object]) -> object:
    try:
        found = await play
    except AssertionError as error:
        checks.check(name, str(error)[:500] or "an assertion", "holds", False)
        return None
    checks.check(name, "holds", "holds", True)
    return found


def _world(test: Callable[[World], None], tick_s: float) -> None:
    world = World(hours.STATIC, tick_s=tick_s)
    try:
        test(world)
    finally:
        world.close()


# --- heartbeats ---


async def heartbeats(checks: Checks, losses: int) -> JsonValue:
    """Over four tunnels, of which the elected one is lost again and again."""
    async with hearing(replace(CALM, writers_per_endpoint=4)) as found:
        await until(lambda: len(found.tunnels) == 4 and len(found.taken) >= 5)
        for _ in range(losses):
            await break_elected(found)
            taken = len(found.taken)
            await until(lambda due=taken + 5: len(found.taken) >= due)
            await until(lambda: len(found.tunnels) == 4)
        checks.equal("heartbeats twice, out of order, or missing without a loss", faults(found.taken), [])
        checks.equal("heartbeats heard and not taken", len(found.heard) - len(found.taken), 0)
        tunnels = [tunnel for tunnel, _ in found.taken]
        runs = [tunnel for before, tunnel in zip([None, *tunnels], tunnels, strict=False) if tunnel != before]
        checks.equal("tunnels that carried them, one after the other, none again", len(runs), len(set(runs)))
        checks.check("elections", len(runs), f"== {losses + 1}", len(runs) == losses + 1)
        return {"taken": len(found.taken), "tunnels": len(runs)}


def faults(taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Heartbeats, as (tunnel, number), that are not the next: what was under way on a lost tunnel may be missing."""
    return [
        (tunnel, number)
        for (before, last), (tunnel, number) in pairwise(taken)
        if number <= last or (tunnel == before and number != last + 1)
    ]
