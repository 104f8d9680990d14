"""Streams at once through one router's tunnels, generations committed in their midst; what the pool says of each.

A commit is asked for once every stream that still runs has gone on since the last one, so that each has a route again;
it counts if old tunnels had routes when it came. The router says so itself, by the tunnels and counters of `GetPool`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from libs.contracts.segue.v1 import pool_pb2, router_pb2, router_pb2_grpc
from prove.cut_streams import WAYS, Cut, Rounds
from prove.router_pool import CALL_S, router_of, shown, until
from prove.stage import Stage

_WITHIN_S = 120.0
_FURTHER = 4
"""Pieces that every stream must have got since the last commit."""


@dataclass(frozen=True)
class Covered:
    """One commit. `tunnels`: of older generations with routes when it was asked for; `routes`: on them; `draining`: of
    these tunnels, those that were seen to drain after it; `running`: streams that went on after it.
    """

    generation: int
    tunnels: int
    routes: int
    draining: int
    running: int


@dataclass
class Wave:
    """What came of one. `ends`: routes that ended, by why; `removals`: tunnels; `resumes`: attempts that went on from
    tokens of an earlier one. `left`: older generations' tunnels after the last stream's end; `held`: routes, bindings,
    permits and waiting binds then.
    """

    cuts: list[Cut]
    commits: list[Covered] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    removals: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    left: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


class Pool:
    """One router's, as an operator has it."""

    def __init__(self, router: router_pb2_grpc.RouterStub, http: httpx.AsyncClient, metrics_url: str) -> None:
        self._router, self._http, self._metrics_url = router, http, metrics_url

    async def shown(self) -> pool_pb2.PoolStatus:
        """Now."""
        return await shown(self._router)

    async def until(self, holds: Callable[[pool_pb2.PoolStatus], bool]) -> pool_pb2.PoolStatus:
        """Raises TimeoutError."""
        return await until(self._router, holds, _WITHIN_S)

    async def swap(self) -> None:
        """An operator wants every tunnel made anew."""
        await self._router.SwapGeneration(router_pb2.SwapGenerationRequest(), timeout=CALL_S)

    @asynccontextmanager
    async def knobs(self, **knobs: str) -> AsyncIterator[None]:
        """In force inside."""
        before = {name: (await self.shown()).policy[name] for name in knobs}
        await self._set(knobs)
        try:
            yield
        finally:
            await self._set(before)

    async def resumes(self) -> int:
        """So far."""
        text = (await self._http.get(self._metrics_url, timeout=CALL_S)).text
        lines = [line for line in text.splitlines() if line.startswith("segue_router_resumes_total")]
        return round(sum(float(line.rpartition(" ")[2]) for line in lines))

    async def _set(self, knobs: dict[str, str]) -> None:
        await self._router.SetPoolPolicy(router_pb2.SetPoolPolicyRequest(knobs=knobs), timeout=CALL_S)


@asynccontextmanager
async def pool_of(stage: Stage, http: httpx.AsyncClient) -> AsyncIterator[Pool]:
    """The first router's."""
    async with router_of(stage) as router:
        yield Pool(router, http, stage.cluster.router_metrics_urls[0])


class _Load:
    """How far each stream is."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._pieces = dict.fromkeys(range(len(cuts)), 0)
        self._running = set(self._pieces)
        self._moved = asyncio.Event()

    @property
    def running(self) -> set[int]:
        return set(self._running)

    async def play(self, rounds: Rounds, number: int, cut: Cut) -> None:
        async def heard(_request_id: str, pieces: int) -> None:
            self._pieces[number] = pieces
            self._moved.set()

        try:
            cut.seen = await rounds.play(cut, heard)
        finally:
            self._running.discard(number)
            self._moved.set()

    async def further(self) -> bool:
        """Until every stream that runs has got some pieces more; whether any runs. Raises TimeoutError."""
        marks = {number: pieces + _FURTHER for number, pieces in self._pieces.items()}
        async with asyncio.timeout(_WITHIN_S):
            while any(self._pieces[number] < marks[number] for number in self._running):
                self._moved.clear()
                await self._moved.wait()
        return bool(self._running)


async def wave(pool: Pool, rounds: Rounds, group: str, streams: int, commits: int, first: int) -> Wave:
    """Streams of every way in turn, from the `first` on, and at most so many commits in their midst."""
    cuts = [await rounds.planned(group, WAYS[(first + number) % len(WAYS)]) for number in range(streams)]
    seen, load, before = Wave(cuts), _Load(cuts), await pool.shown()
    resumes = await pool.resumes()
    async with asyncio.TaskGroup() as tasks:
        for number, cut in enumerate(cuts):
            tasks.create_task(load.play(rounds, number, cut))
        while len(seen.commits) < commits and await load.further():
            seen.commits.append(await _commit(pool, load))
    try:
        after = await pool.until(lambda now: all(one.generation == now.generation for one in now.writers))
    except TimeoutError:
        after = await pool.shown()
    seen.left = [f"{one.id}: {one.contour}" for one in after.writers if one.generation != after.generation]
    seen.held = [after.routes, after.bindings, after.permits, after.held]
    seen.ends = Counter(after.counters.route_ends) - Counter(before.counters.route_ends)
    seen.removals = Counter(after.counters.removals) - Counter(before.counters.removals)
    seen.resumes = await pool.resumes() - resumes
    return seen


async def _commit(pool: Pool, load: _Load) -> Covered:
    before = await pool.shown()
    bound = {one.id: one.routes for one in before.writers if one.routes}
    running = load.running
    await pool.swap()
    after = await pool.until(lambda now: now.generation > before.generation)
    draining = [one for one in after.writers if one.id in bound and one.contour == "draining" and not one.closing]
    await load.further()
    return Covered(after.generation, len(bound), sum(bound.values()), len(draining), len(running & load.running))


async def settled(pool: Pool) -> None:
    """Until nothing is bound and nothing drains: what follows is not what came before. Raises TimeoutError."""
    await pool.until(lambda now: not now.routes and all(one.contour == "active" for one in now.writers))
