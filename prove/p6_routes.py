"""Ten thousand routes over eight writers while everything under them is killed, swapped and reconfigured.

The workers are processes and die by SIGKILL; writers die by a reset of their own connection. Trouble comes at even
steps of the work done, in an order drawn from the seed, and each piece of it is waited for until it has happened. A
token carries its number, so a lost, doubled or displaced one shows at the route that it belongs to.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from pydantic import JsonValue

from libs.pool.errors import NoCoverageError
from libs.pool.knobs import PickMode, PoolPolicy
from libs.pool.model import CellTarget, WorkerTarget
from libs.pool.pool import TunnelPool
from libs.tunnel import ChannelFullError, Closed, CloseReason, OnClosed, Registry, Route, RouteClosedError
from libs.tunnel.channel import Channel, Put
from prove.checks import Checks
from prove.echo_worker import TOKEN
from prove.pooled import LIMIT_S, ZERO, Pooled, echoing, pooled, until
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from tests.pool.rig import CALM

CLAIM = Claim(
    "6-routes",
    "10,000 routes over 8 writers on real sockets, writers and endpoints killed at random, 20 map swaps, 3 policy "
    "changes: routes = permits = bindings = 0 at rest, no duplicate, no lost token on a route not closed with an error",
    seed=66,
)
_ENDS = frozenset({CloseReason.PEER_LOST, CloseReason.RETIRED})
"""What a killed worker, a broken writer and a commit that closes end a route with."""


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    routes: int
    tokens: int
    workers: int
    at_once: int
    maps: int
    kills: int
    breaks: int
    operator_swaps: int


FULL = Plan(routes=10_000, tokens=24, workers=4, at_once=160, maps=20, kills=8, breaks=40, operator_swaps=4)
SLICE = Plan(routes=300, tokens=24, workers=2, at_once=40, maps=2, kills=1, breaks=3, operator_swaps=1)
POLICIES = (
    replace(CALM, close_covered=True),
    replace(CALM, writers_per_endpoint=3, pick_mode=PickMode.ROUND_ROBIN),
    CALM,
)


@dataclass
class Done:
    """What became of the routes."""

    started: int = 0
    ended: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    conn_ids: set[int] = field(default_factory=set)
    trouble_over: bool = False


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    plan = FULL if size is Size.FULL else SLICE
    checks = Checks()
    details = await played(checks, plan, CLAIM.seed)
    for name in PLANTED if size is Size.FULL else ():
        found = await planted(name)
        checks.check(f"noticed: {name}", [*found[:3]], "something", bool(found))
    return checks.outcome(details)


async def played(checks: Checks, plan: Plan, seed: int, patience_s: float = LIMIT_S) -> dict[str, JsonValue]:
    """The whole play, judged; its figures. `patience_s`: how long is waited for what is held at the end."""
    done = Done()
    async with echoing(plan.workers, proxied=True) as workers, pooled(workers, CALM, seed=seed) as made:
        await made.full()
        checks.equal("writers at the start", len(made.pool.writers()), 2 * plan.workers)
        happened = Counter[str]()
        async with asyncio.TaskGroup() as group:
            trouble = group.create_task(_trouble(made, plan, seed, done, happened))
            for number in range(plan.at_once):
                group.create_task(_requests(made, plan, random.Random(seed + number), done))
        assert trouble.done()
        held = await made.rest(patience_s)
        await made.full()
        ledgers = [await worker.rest(patience_s) for worker in workers]
        status = made.pool.status()
        made.pool._core.books.check_integrity()
        judge(checks, plan, done, happened, held, ledgers, made)
    return {
        "ends": dict(done.ends),
        "trouble": dict(happened),
        "commits": dict(status.pool.commits),
        "reconnects": status.pool.reconnects,
        "items_without_a_route": dict(status.dropped),
        "workers": [{"accepted": one["accepted"], "ended": one["ended"]} for one in ledgers],
    }


def judge(
    checks: Checks,
    plan: Plan,
    done: Done,
    happened: Counter[str],
    held: dict[str, int],
    ledgers: list[dict[str, Any]],
    made: Pooled,
) -> None:
    """Nothing held anywhere, nothing doubled, nothing lost; and all that was to happen has."""
    checks.check("routes", done.started, f">= {plan.routes}", done.started >= plan.routes)
    checks.equal("held by the pool at rest", held, ZERO)
    checks.equal("bound according to the core", made.pool.status().pool.bound, 0)
    for number, ledger in enumerate(ledgers):
        there = {name: ledger[name] for name in ("assignments", "pages", "routes", "bindings", "permits")}
        checks.equal(f"held by worker {number} at rest", there, dict.fromkeys(there, 0))
        checks.equal(f"conn_ids that worker {number} was given twice", ledger["twice"], 0)
    checks.equal("tokens lost, doubled, out of order, or an end of no known reason", [*done.wrong[:5]], [])
    closes = Counter(len(each) for each in made.seen.closes.values())
    bound = done.started - done.ends["refused"]
    checks.equal("routes by how often their end was told", dict(closes), {1: bound})
    checks.equal("conn_ids", len(done.conn_ids), bound)
    checks.check("routes that came whole", done.ends["done"], f"> {bound // 2}", done.ends["done"] > bound // 2)
    cut = done.ends[CloseReason.PEER_LOST.label]
    checks.check("routes that a killed worker or writer cut", cut, "> 0", cut > 0)
    retired = done.ends[CloseReason.RETIRED.label]
    # In a short play a commit that closes may find nothing open.
    least = 1 if plan is FULL else 0
    checks.check("routes that a commit closed", retired, f">= {least}", retired >= least)
    due = {
        "worker killed": plan.kills,
        "writer broken": plan.breaks,
        "map swapped": plan.maps,
        "operator's swap": plan.operator_swaps,
        "policy changed": len(POLICIES),
    }
    checks.equal("what happened meanwhile", dict(happened), {name: count for name, count in due.items() if count})
    checks.equal("errors in callbacks", made.registry.counters.handler_errors, 0)


async def _requests(made: Pooled, plan: Plan, chance: random.Random, done: Done) -> None:
    """One client after the other, until there were enough and the trouble is over."""
    while done.started < plan.routes or not done.trouble_over:
        done.started += 1
        try:
            done.ends[await _request(made, plan.tokens, chance, done)] += 1
        finally:
            done.ended += 1


async def _request(made: Pooled, tokens: int, chance: random.Random, done: Done) -> str:
    """How it ended; what is wrong with it is noted."""
    worker = chance.choice(made.workers)
    target = WorkerTarget(worker.name) if chance.random() < 0.5 else CellTarget("A")
    try:
        route = await made.pool.bind(target, b"stream %d" % tokens, made.seen.on_closed)
    except (NoCoverageError, ChannelFullError):
        return "refused"
    done.conn_ids.add(route.conn_id)
    received, reason = bytearray(), CloseReason.DONE
    try:
        while True:
            received += await route.receive(LIMIT_S)
    except RouteClosedError as error:
        reason = error.closed.reason
    numbers = [number for (number,) in TOKEN.iter_unpack(received)]
    whole = list(range(tokens)) if reason is CloseReason.DONE else list(range(len(numbers)))
    if numbers != whole or len(numbers) > tokens or not (reason is CloseReason.DONE or reason in _ENDS):
        done.wrong.append(f"route {route.conn_id} ended {reason.label} with {numbers}")
    return reason.label


async def _trouble(made: Pooled, plan: Plan, seed: int, done: Done, happened: Counter[str]) -> None:
    """One piece after the other, each at its share of the work."""
    chance = random.Random(seed)
    policies = iter(POLICIES)
    kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
        "worker killed": (plan.kills, lambda: _kill(made, chance)),
        "writer broken": (plan.breaks, lambda: _break(made, chance)),
        "map swapped": (plan.maps, lambda: _map(made, chance)),
        "operator's swap": (plan.operator_swaps, lambda: _swap(made)),
        "policy changed": (len(POLICIES), lambda: _policy(made, next(policies))),
    }
    order = [name for name, (count, _) in kinds.items() for _ in range(count)]
    chance.shuffle(order)
    for number, name in enumerate(order, 1):
        due = number * plan.routes // (len(order) + 1)
        await until(lambda due=due: done.ended >= due)
        await kinds[name][1]()
        happened[name] += 1
    made.observe_all()
    await made.enough()
    done.trouble_over = True


async def _kill(made: Pooled, chance: random.Random) -> None:
    worker = chance.choice(made.workers)
    await worker.kill()
    await until(lambda: all(writer.endpoint.worker != worker.name for writer in made.pool.writers()))
    await worker.start()
    made.observe(*made.listed)
    if worker in made.listed:
        await until(lambda: made.active(worker) > 0)


async def _break(made: Pooled, chance: random.Random) -> None:
    before = len(made.seen.lost)
    while len(made.seen.lost) == before:
        await until(lambda: any(worker.break_one(chance) for worker in chance.sample(made.workers, len(made.workers))))
        # A connection on which no writer was published yet is nobody's loss: then another.
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await until(lambda: len(made.seen.lost) > before)


async def _map(made: Pooled, chance: random.Random) -> None:
    """Another map than the one before, committed."""
    if len(made.listed) < len(made.workers):
        listed = list(made.workers)
    else:
        listed = chance.sample(made.workers, len(made.workers) - 1)
    made.observe(*listed)
    await until(lambda: made.pool.status().pool.map.committed_revision == made.revision)


async def _swap(made: Pooled) -> None:
    commits = made.pool.status().pool.commits.get("operator", 0)
    made.pool.swap()
    await until(lambda: made.pool.status().pool.commits.get("operator", 0) > commits)


async def _policy(made: Pooled, policy: PoolPolicy) -> None:
    made.pool.set_policy(policy)
    await made.enough(policy.writers_per_endpoint)
    if policy.close_covered:
        await _swap(made)


def _loses_some(self: Channel, payload: bytes, now: float) -> Put:
    """The last token of a payload that holds several is lost, now and then."""
    return _PUT(self, payload[: -TOKEN.size] if payload[3:4] == b"\x07" else payload, now)


def _doubles_some(self: Channel, payload: bytes, now: float) -> Put:
    return _PUT(self, payload + payload if payload[3:4] == b"\x07" else payload, now)


def _tells_twice(self: TunnelPool, writer: int, on_closed: OnClosed | None) -> OnClosed:
    told = _WATCH(self, writer, on_closed)

    def twice(route: Route, closed: Closed) -> None:
        told(route, closed)
        if on_closed is not None:
            on_closed(route, closed)

    return twice


def _keeps_permits(self: Registry) -> None:
    """One of them, for good."""
    if self._permits > 1:
        _RETURN(self)


_PUT, _WATCH, _RETURN = Channel.put, TunnelPool._watch, Registry._return_permit

PLANTED: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "a channel that loses tokens": (Channel, "put", _loses_some),
    "a channel that doubles tokens": (Channel, "put", _doubles_some),
    "an end that is told twice": (TunnelPool, "_watch", _tells_twice),
    "a permit that is not given back": (Registry, "_return_permit", _keeps_permits),
}
"""Where and instead of what, in the pool's process."""
PLANTED_PLAN = Plan(routes=60, tokens=24, workers=1, at_once=20, maps=0, kills=0, breaks=1, operator_swaps=1)


async def planted(name: str) -> list[str]:
    """The checks that fail over that bug, but for those that say that too little happened."""
    owner, attribute, wrong = PLANTED[name]
    checks = Checks()
    with mock.patch.object(owner, attribute, wrong):
        await played(checks, PLANTED_PLAN, CLAIM.seed, 1.0)
    return [str(one["name"]) for one in checks.failed if not str(one["limit"]).startswith(">")]
