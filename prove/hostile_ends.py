"""The two ends of the wire with something to lose: a router and a worker, each with one request in mid-stream.

Both are the services' own parts in this process, on real sockets. A *ledger* is everything that an end counts of what
it refused or passed over; a *state* is everything that refused frames must not change.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from libs.controller.protocol import Delta, OfferReply
from libs.service.channel import open_channel
from libs.service.transport import Transport
from libs.tunnel.counters import Counters
from prove.checks import Checks
from tests.router import rig as router_rig
from tests.router.fake_worker import Job, ScriptedWorker
from tests.worker import rig as worker_rig

VICTIM = "victim"
ROUTED_TOKENS, WORKED_TOKENS = 50, 2_000
_PROMPT = tuple(range(1, 40))
ROUTER_EPOCH = 7
"""Of the worker process that the router hears."""
_PATIENCE_MS = 3_600_000


class End(Protocol):
    """One end under attack."""

    name: str
    service: str
    """Full name of the service that accepts tunnels."""
    channel: grpc.aio.Channel

    def ledger(self) -> Counter[str]:
        """What it has counted so far."""
        ...

    def state(self) -> dict[str, object]:
        """What must stay as it is, in values that compare."""
        ...

    async def unharmed(self, checks: Checks) -> None:
        """The request goes on to an exact end, and nothing is held after it."""
        ...


def _of_tunnels(counters: Counters) -> Counter[str]:
    found: Counter[str] = Counter({"handler-errors": counters.handler_errors})
    for reason, count in counters.corrupt.items():
        found[f"corrupt/{reason}"] += count
    for reason, count in counters.tunnels_closed.items():
        found[f"tunnel/{reason}"] += count
    return found


@dataclass
class RouterEnd:
    """A router between a scripted worker, which turns hostile, and hostile ingresses."""

    rig: router_rig.Rig
    stream: router_rig.Stream
    job: Job
    channel: grpc.aio.Channel
    name: str = "router"
    service: str = "segue.v1.Router"

    @property
    def worker(self) -> ScriptedWorker:
        return self.rig.worker

    @property
    def heard(self) -> int:
        """The last heartbeat's number."""
        record = self.rig.router.observatory.registry.record(self.worker.name)
        assert record is not None
        return record.sequence

    def ledger(self) -> Counter[str]:
        """See End. Fences by their name alone, whatever the event."""
        router = self.rig.router
        found = _of_tunnels(router.upstream.counters)
        found["handler-errors"] += router.downstream.counters.handler_errors
        for (_, fence), count in router.shell.machine.fence.counts.items():
            found[f"fence/{fence.value}"] += count
        for reason, count in router.observatory.codec.counts.items():
            found[f"worker/{reason}"] += count
        for reason, count in router.attach.codec.counts.items():
            found[f"ingress/{reason}"] += count
        for rejection, count in router.observatory.registry.rejected.items():
            found[f"heartbeat/{rejection.value}"] += count
        return found

    def state(self) -> dict[str, object]:
        """See End."""
        router = self.rig.router
        machine, fleet, registry = router.shell.machine, router.observatory.fleet, router.observatory.registry
        return {
            "requests": {name: repr(state) for name, state in machine._requests.items()},
            "processes": repr(machine._by_process),
            "waiting": machine.waiting,
            "timers": router.shell.timers,
            "requesters": len(router.requests),
            "assignments": len(router.assignments),
            "workers": [
                (r.worker, r.epoch, tuple(r.tunnels), r.elected, r.sequence, r.heartbeat, r.awaiting_snapshot, r.silent)
                for r in registry.records()
            ],
            "newest epochs": dict(registry._newest),
            "losses": dict(router.observatory.losses),
            "views": {name: (view.heartbeat, view.load, repr(view.bookings)) for name, view in fleet.views().items()},
            "resident": len(fleet.index),
            "corrections": fleet.corrections.of(self.worker.name),
            "tunnels to workers": len(router.workers.pool.writers()),
            "tunnels from ingresses": router.upstream.snapshot().tunnels,
            "routes": (router.upstream.snapshot().routes, router.downstream.snapshot().routes),
            "stopped": router.shell.stopped,
        }

    async def unharmed(self, checks: Checks) -> None:
        """See End."""
        self.job.finish()
        end = await self.stream.completed(ROUTED_TOKENS)
        checks.equal("router: the request's tokens after the attack, exact", end.usage.generated_tokens, ROUTED_TOKENS)
        checks.equal("router: attempts it took", end.served.attempts, 1)
        await self.rig.at_rest()


@asynccontextmanager
async def router_end(within_s: float) -> AsyncIterator[RouterEnd]:
    """Its request has two of its tokens when this is handed out."""
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(
            router_rig.running(  # one tunnel, which nothing but the attack ends
                None,
                rest=False,
                within_s=within_s,
                epoch=ROUTER_EPOCH,
                heartbeat_expiry_s=600.0,
                decisions_queue=0,
                pool_writers_per_endpoint=1,
                pool_reinit_interval_s=0,
            )
        )
        wanted = router_rig.request(
            len(_PROMPT), ROUTED_TOKENS, request_id=VICTIM, tenant="victims", deadline_ms=_PATIENCE_MS
        )
        stream = await rig.ingress.submit(wanted)
        job = await rig.worker.next()
        job.accept()
        job.delta(2)
        await stream.until(2)
        channel = open_channel(rig.target, Transport())
        stack.push_async_callback(channel.close, None)
        yield RouterEnd(rig, stream, job, channel)


@dataclass
class WorkerEnd:
    """A worker between its router, whose tunnel carries its request, and hostile routers."""

    running: worker_rig.Running
    exchange: worker_rig.Exchange
    channel: grpc.aio.Channel
    name: str = "worker"
    service: str = "segue.v1.Worker"

    def ledger(self) -> Counter[str]:
        """See End. Fences by their name alone, whatever the event."""
        worker = self.running.worker
        found = _of_tunnels(worker.attach.counters)
        found["passed-over"] = worker.attach.passed_over
        for (_, fence), count in worker.interpreter.fence.counts.items():
            found[f"fence/{fence.value}"] += count
        for reason, count in worker.attach.codec.counts.items():
            found[f"router/{reason}"] += count
        for decline, count in worker.interpreter.machine.declines.items():
            found[f"declined/{decline.name.lower()}"] += count
        return found

    def state(self) -> dict[str, object]:
        """See End. Not how far the request is: its tokens go on meanwhile."""
        worker = self.running.worker
        machine, pool = worker.interpreter.machine, worker.engine.pool
        pool.check_integrity()
        return {
            "assignments": {name: (s.offer, s.tunnel, s.phase) for name, s in machine._assignments.items()},
            "attempts": _highest(machine._attempts),
            "epoch": machine.epoch,
            "draining": machine.draining,
            "accepted": worker.interpreter.accepted,
            "outlets": worker.interpreter.outlets,
            "results": dict(worker.interpreter.results),
            "free pages": {group: pages.free for group, pages in pool.pages().items()},
            "tunnels": worker.attach.registry.snapshot().tunnels,
            "routes": worker.attach.registry.snapshot().routes,
        }

    async def unharmed(self, checks: Checks) -> None:
        """See End."""
        exchange = self.exchange
        drawn = self.running.worker.interpreter.machine._assignments[exchange.offer.assignment].generated
        while len(exchange.tokens) <= drawn:
            assert isinstance(await exchange.next(), Delta)
        echoed = list(itertools.islice(itertools.cycle(_PROMPT), len(exchange.tokens)))
        name = "worker: the request's tokens before, in and after the attack, exact"
        checks.check(name, len(exchange.tokens), "all exact", exchange.tokens == echoed)
        exchange.cancel()
        await exchange.finish()
        await self.running.rest()


@asynccontextmanager
async def worker_end(decode_ms: float) -> AsyncIterator[WorkerEnd]:
    """Its request, the third attempt, has drawn a token when this is handed out; another comes every `decode_ms`."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            worker_rig.running(echo_pages=4_096, lanes=4, echo_decode_ms=decode_ms)
        )
        router = await stack.enter_async_context(worker_rig.routing(running, "router-1"))
        exchange = await router.offer(_PROMPT, WORKED_TOKENS, name=VICTIM, attempt=3, deadline_ms=_PATIENCE_MS)
        reply = await exchange.accepted()
        assert isinstance(reply, OfferReply) and reply.accepted
        while not exchange.tokens:
            await exchange.next()
        channel = open_channel(running.target, Transport())
        stack.push_async_callback(channel.close, None)
        yield WorkerEnd(running, exchange, channel)


def differences(before: dict[str, object], after: dict[str, object]) -> dict[str, Any]:
    """What changed, shortened."""
    return {name: [repr(before[name])[:300], repr(after[name])[:300]] for name in before if before[name] != after[name]}


def _highest(attempts: Mapping[tuple[str, int], int]) -> dict[str, int]:
    """By request, whatever tunnel it came on."""
    found: dict[str, int] = {}
    for (request, _), attempt in attempts.items():
        found[request] = max(attempt, found.get(request, 0))
    return found
