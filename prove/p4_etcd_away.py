"""etcd goes away under load, twice for a minute: first it hangs, then it is gone. Nobody who is served notices.

Streams that outlast both outages run all the time, and short requests come all the time. Every token is checked (the
echo workers' are known beforehand). Meanwhile the router is asked again and again which tunnels it has; afterwards
every worker must be listed again, the same processes under the same epochs, and not all at one moment.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
from pydantic import JsonValue

from cli.embedded.children import Supervisor
from cli.embedded.cluster import Cluster
from libs.contracts.segue.v1 import router_pb2, router_pb2_grpc
from prove import endpoint_map
from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.routed import Tenant, wanted
from prove.stage import Stage, staged

CLAIM = Claim(
    "4-etcd-away",
    "etcd away for 60 s under load: no stream broken, no worker fenced, map recovery closes no tunnel, all re-attach "
    "by themselves with jitter",
    seed=43,
)
_WORKERS, _STREAMS = 6, 12
_CALL_S = 10.0
_BACK_S = 60.0
_DEADLINE_MS = 900_000
_TENANT = Tenant("load", "ab" * 32)


@dataclass
class Found:
    """What happened, in all and while etcd was away."""

    streamed: int = 0
    broken: list[str] = field(default_factory=list)
    short: int = 0
    short_away: int = 0
    slowest_ms: float = 0.0
    fewest_tunnels: int = 1 << 30
    unheard: int = 0
    looks: int = 0
    attached_s: list[dict[str, float]] = field(default_factory=list)
    """By outage and worker: from its end to the worker's registering again."""
    ended: float = 0.0
    lost: list[str] = field(default_factory=list)
    """What the router said of tunnels that ended."""
    same_epochs: bool = False
    same_processes: bool = False
    over: bool = False

    def heard(self, name: str, line: str) -> None:
        """A line of a service's log."""
        if self.over:
            return
        if name == "router" and "worker disconnected" in line:
            self.lost.append(line)
        if "registered again" in line and self.attached_s:
            self.attached_s[-1].setdefault(name, round(time.monotonic() - self.ended, 3))


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. A slice is one kill -9 of the shared cluster's etcd."""
    found = Found()
    async with AsyncExitStack() as stack:
        full = stage is None
        if stage is None:
            settings = {"echo_decode_ms": "20", "heartbeat_s": "1"}
            stage = await stack.enter_async_context(
                staged(echo=True, workers=_WORKERS, worker_settings=settings, sink=found.heard)
            )
        cluster = stage.cluster
        outages: list[Callable[[], Awaitable[None]]] = (
            [lambda: _hung(cluster, 60.0), lambda: _gone(cluster, 60.0, stack)] if full else [lambda: _killed(cluster)]
        )
        await _play(stage, outages, found, known=full)
    return judged(found, full=full)


async def _hung(cluster: Cluster, seconds: float) -> None:
    cluster.etcd.kill(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        cluster.etcd.kill(signal.SIGCONT)


async def _gone(cluster: Cluster, seconds: float, stack: AsyncExitStack) -> None:
    await cluster.etcd.stop()
    await asyncio.sleep(seconds)
    await (await stack.enter_async_context(Supervisor())).start(cluster.etcd.spec)


async def _killed(cluster: Cluster) -> None:
    before = cluster.etcd.restarts
    cluster.etcd.kill()
    await cluster.etcd.wait_restarted(before + 1)


async def _play(stage: Stage, outages: list[Callable[[], Awaitable[None]]], found: Found, *, known: bool) -> None:
    cluster, router = stage.cluster, stage.facts.router
    processes = {name: (worker.child.pid, worker.child.restarts) for name, worker in cluster.workers.items()}
    epochs = await endpoint_map.newest(stage.facts.catalog)
    over, away = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for number in range(_STREAMS if known else 2):
            tasks.create_task(_stream(stage, number, over, found, known=known))
        tasks.create_task(_short(stage, over, away, found, known=known))
        tasks.create_task(_look(router, set(cluster.workers), over, found))
        for outage in outages:
            before = found.short
            await _until(lambda: found.short >= before + 5)  # noqa: B023 - awaited in the same turn
            found.attached_s.append({})
            away.set()
            await outage()
            away.clear()
            found.ended = time.monotonic()
            await _back(stage, epochs)
            if known:
                await _until(lambda: len(found.attached_s[-1]) == len(epochs))
        found.over = True
        over.set()
    found.same_epochs = await endpoint_map.newest(stage.facts.catalog) == epochs
    found.same_processes = processes == {n: (w.child.pid, w.child.restarts) for n, w in cluster.workers.items()}


async def _stream(stage: Stage, number: int, over: asyncio.Event, found: Found, *, known: bool) -> None:
    """One stream after the other until it is over; each long enough to be cut by whatever cuts streams."""
    draw = random.Random(f"{CLAIM.seed} {number}")
    while not over.is_set():
        prompt = [draw.randrange(6, 500) for _ in range(300)]
        length = 12_000 if known else 400
        try:
            async with aclosing_call(
                stage.facts.router, wanted(stage.model, _TENANT, prompt, length, _DEADLINE_MS)
            ) as call:
                tokens: list[int] = []
                async for delivery in call:
                    if delivery.WhichOneof("event") == "tokens":
                        tokens += delivery.tokens.tokens
                        found.streamed += len(delivery.tokens.tokens)
                    elif delivery.WhichOneof("event") == "error":
                        found.broken.append(str(delivery.error)[:200])
                    if over.is_set():
                        break
            if known and tokens != [token for token, _ in zip(itertools.cycle(prompt), tokens, strict=False)]:
                found.broken.append(f"stream {number}: not the tokens it should be")
        except grpc.aio.AioRpcError as error:
            found.broken.append(f"stream {number}: {error.code().name} {error.details()}")


@asynccontextmanager
async def aclosing_call(
    router: router_pb2_grpc.RouterStub, request: router_pb2.GenerateRequest
) -> AsyncIterator[grpc.aio.UnaryStreamCall]:
    """The call, cancelled at the end."""
    call = router.Generate(request, timeout=900)
    try:
        yield call
    finally:
        call.cancel()


async def _short(stage: Stage, over: asyncio.Event, away: asyncio.Event, found: Found, *, known: bool) -> None:
    """New requests, one after the other: while etcd is away they are routed by what is remembered."""
    draw = random.Random(CLAIM.seed)
    while not over.is_set():
        prompt = [draw.randrange(6, 500) for _ in range(draw.randint(20, 600))]
        began, count = time.perf_counter(), 0
        try:
            async with aclosing_call(stage.facts.router, wanted(stage.model, _TENANT, prompt, 4, _DEADLINE_MS)) as call:
                async for delivery in call:
                    count += len(delivery.tokens.tokens)
                    if delivery.WhichOneof("event") == "error":
                        found.broken.append(str(delivery.error)[:200])
        except grpc.aio.AioRpcError as error:
            found.broken.append(f"a short request: {error.code().name} {error.details()}")
        if known and count != 4:
            found.broken.append(f"a short request got {count} tokens of 4")
        found.short += 1
        found.short_away += away.is_set()
        found.slowest_ms = max(found.slowest_ms, (time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.1)


async def _look(router: router_pb2_grpc.RouterStub, workers: set[str], over: asyncio.Event, found: Found) -> None:
    """Whether the router has a tunnel to each worker, and hears it, all the time."""
    while not over.is_set():
        known = await router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_CALL_S)
        tunnels = {one.heartbeat.worker: one.tunnels for one in known.workers}
        found.fewest_tunnels = min(found.fewest_tunnels, *(tunnels.get(name, 0) for name in workers))
        found.unheard += sum(one.heard_ms > 10_000 for one in known.workers)
        found.looks += 1
        await asyncio.sleep(0.2)


async def _back(stage: Stage, epochs: dict[str, int]) -> None:
    """Until every endpoint is in the catalog's map."""
    async with asyncio.timeout(_BACK_S):
        while True:
            with suppress(grpc.aio.AioRpcError):
                if (await endpoint_map.newest(stage.facts.catalog)).keys() >= epochs.keys():
                    return
            await asyncio.sleep(0.02)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_BACK_S):
        while not holds():  # noqa: ASYNC110 - a count that other tasks raise
            await asyncio.sleep(0.05)


def judged(found: Found, *, full: bool) -> Outcome:
    """Everything went on; and (where leases have lapsed) everybody came back, at different times."""
    checks = Checks()
    checks.check("broken streams and requests", [*found.broken[:5]], [], not found.broken)
    checks.check("tokens streamed", found.streamed, "> 0", found.streamed > 0)
    checks.check("fewest tunnels to a worker", found.fewest_tunnels, ">= 1", 1 <= found.fewest_tunnels < 1 << 30)
    checks.equal("tunnels lost", len(found.lost), 0)
    checks.equal("looks at an unheard worker", found.unheard, 0)
    checks.equal("same epochs", found.same_epochs, True)
    checks.equal("same processes", found.same_processes, True)
    if full:
        checks.check("requests served while away", found.short_away, ">= 50", found.short_away >= 50)
        for kind, attached in zip(("hung", "gone"), found.attached_s, strict=True):
            checks.check(f"{kind}: workers attached again", len(attached), f"{_WORKERS}", len(attached) == _WORKERS)
        # Calls that hung are answered together when etcd wakes up; calls that were refused come back when they choose.
        last = sorted(found.attached_s[-1].values())
        spread = last[-1] - last[0] if last else 0.0
        checks.check("gone: spread of their return, s", round(spread, 2), ">= 0.3", spread >= 0.3)
    return checks.outcome(
        {
            "attached_s": [dict[str, JsonValue](one) for one in found.attached_s],
            "tunnels_lost": [*found.lost],
            "slowest_request_ms": round(found.slowest_ms),
            "requests": found.short,
            "looks": found.looks,
        }
    )
