"""A worker by script over the real Attach protocol: it heartbeats when elected, and does with offers what a test says.

Token `i` of a request is always `100 + i`, whoever draws it, so a requester can tell at once whether a stream is exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc

from libs.contracts.segue.v1 import catalog_pb2
from libs.controller.protocol import (
    Cancel,
    DeclineReason,
    Delta,
    ElectTunnel,
    FinishReason,
    Heartbeat,
    Load,
    Offer,
    OfferReply,
    Pages,
    PrefillCost,
    Resident,
    Result,
    ResultStatus,
    SnapshotRequest,
    Timings,
    TunnelValue,
    Usage,
)
from libs.controller.wire import TunnelCodec
from libs.service.transport import Transport
from libs.tunnel import (
    Closed,
    CloseReason,
    Handlers,
    Registry,
    Route,
    RouteClosedError,
    Side,
    Tunnel,
    TunnelClosedError,
)
from libs.tunnel.grpc_carrier import Carrier, serve_tunnel
from tests.fixtures.attach_server import attach_server
from tests.router.fake_catalog import FINGERPRINT
from tests.router.pki import bind

LIMIT_S = 10.0
TIMINGS = Timings(prefill_ms=2.0, first_token_ms=1.0, ttft_ms=3.0)
ROOMY = Load(pages=Pages(total=1_000, free=1_000))


def token(index: int) -> int:
    return 100 + index


class Job:
    """One offer, and what a script can answer."""

    def __init__(self, worker: ScriptedWorker, route: Route, offer: Offer) -> None:
        self.worker, self.route, self.offer = worker, route, offer
        self.index = len(offer.request.tokens) - offer.request.output_start
        self.drawn = 0
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()
        self.closed: Closed | None = None

    @property
    def usage(self) -> Usage:
        request, cached = self.offer.request, self.offer.candidate.cached_tokens
        return Usage(
            request.output_start,
            min(cached, request.output_start),
            computed_tokens=len(request.tokens) - cached,
            generated_tokens=self.drawn,
        )

    def accept(self) -> None:
        self.send(OfferReply(self.offer.assignment, self.worker.epoch, True, load=self.worker.load))

    def decline(self, reason: DeclineReason) -> None:
        reply = OfferReply(self.offer.assignment, self.worker.epoch, False, reason, "by script", self.worker.load)
        self.send(reply)
        self.route.close(CloseReason.DONE)

    def delta(self, count: int = 1) -> None:
        at = self.index + self.drawn
        self.drawn += count
        tokens = tuple(token(at + i) for i in range(count))
        timings = TIMINGS if self.drawn == count else Timings()
        self.send(Delta(self.offer.assignment, self.worker.epoch, at, tokens, usage=self.usage, timings=timings))

    def result(self, status: ResultStatus = ResultStatus.COMPLETED, error: str = "", *, heartbeat: int = 0) -> None:
        finish = FinishReason.LENGTH if status is ResultStatus.COMPLETED else FinishReason.UNSPECIFIED
        end = Result(self.offer.assignment, self.worker.epoch, status, finish, error, self.usage, TIMINGS, heartbeat)
        self.send(end)
        self.route.close(CloseReason.DONE)

    def finish(self) -> None:
        """The rest of the budget and the result."""
        left = self.offer.request.max_new_tokens - self.drawn
        if left:
            self.delta(left)
        self.result()

    def run(self) -> None:
        self.accept()
        self.finish()

    def send(self, value: TunnelValue) -> None:
        self.route.post(self.worker.codec.encode(value))


Script = Callable[[Job], None]


class ScriptedWorker:
    """`script` is called with every offer; `next()` gives the offers in order to a test that answers by hand."""

    def __init__(self, name: str, registry: Registry, script: Script | None = None, **beat: Any) -> None:
        self.name, self.script = name, script
        self.epoch = 1
        self.transport = Transport()
        """What its next `start` uses."""
        self.load = ROOMY
        self.codec = TunnelCodec()
        self.jobs: list[Job] = []
        self.routers: list[str] = []
        self.snapshots_asked = 0
        self.resident: tuple[Resident, ...] = ()
        self.beat = Heartbeat(
            name, 0, 0, lanes=4, page_tokens=16, max_context=8_192, models=(FINGERPRINT,),
            prefill=(PrefillCost(100_000, 0.1),), bytes_per_token=32,
        )  # fmt: skip
        self.beat = replace(self.beat, **beat)
        self.mute = False
        self.tunnels: list[Tunnel] = []
        self._registry = registry
        self._arrived: asyncio.Queue[Job] = asyncio.Queue()
        self._elected: tuple[int, Tunnel] | None = None
        self._sequence = 0
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._hearing: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def endpoint(self) -> catalog_pb2.Endpoint:
        return catalog_pb2.Endpoint(
            worker=self.name, epoch=self.epoch, address=self.address, family="ipv4", models=[FINGERPRINT],
            node=self.beat.node,
        )  # fmt: skip

    async def start(self) -> None:
        """Also again after `kill`, at the same address and with the next epoch."""
        self._sequence, self._elected = 0, None
        self._server = attach_server(self._attach)
        self._port = bind(self._server, f"127.0.0.1:{self._port}", self.transport)
        await self._server.start()

    async def kill(self) -> None:
        """Gone without a word."""
        for task in tuple(self._hearing):
            task.cancel()
        if self._server is not None:
            await self._server.stop(None)

    async def restart(self) -> None:
        await self.kill()
        self.epoch += 1
        await self.start()

    async def next(self) -> Job:
        async with asyncio.timeout(LIMIT_S):
            return await self._arrived.get()

    def say(self, **changes: Any) -> None:
        """A heartbeat now (with everything resident)."""
        if self._elected is None or self.mute:
            return
        self._sequence += 1
        beat = replace(
            self.beat, epoch=self.epoch, sequence=self._sequence, load=self.load, resident=self.resident, snapshot=True,
            **changes,
        )  # fmt: skip
        # Told on a tunnel that ends, it is lost; the router elects another.
        with suppress(TunnelClosedError):
            self._elected[1].try_control(self.codec.encode(beat))

    async def _attach(self, carrier: Carrier, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.routers.append(str(metadata.get("segue-router", "")))
        tunnel = Tunnel(
            carrier, self._registry, Side.ACCEPTING, Handlers(accept=self._accept, on_control=self._control)
        )
        self.tunnels.append(tunnel)
        await serve_tunnel(tunnel, context)

    def _control(self, tunnel: Tunnel, payload: bytes) -> None:
        match self.codec.decode(payload):
            case ElectTunnel(term):
                if self._elected is None or term > self._elected[0]:
                    self._elected = (term, tunnel)
                    self.say()
            case SnapshotRequest():
                self.snapshots_asked += 1
                self.say()

    def _accept(self, route: Route, payload: bytes) -> None:
        offer = self.codec.decode(payload)
        assert isinstance(offer, Offer)
        job = Job(self, route, offer)

        def on_closed(_route: Route, closed: Closed) -> None:
            job.closed = closed
            job.ended.set()

        route.on_closed = on_closed
        self.jobs.append(job)
        self._arrived.put_nowait(job)
        task = asyncio.create_task(self._hear(job))
        self._hearing.add(task)
        task.add_done_callback(self._hearing.discard)
        if self.script is not None:
            self.script(job)

    async def _hear(self, job: Job) -> None:
        try:
            while True:
                value = self.codec.decode(await job.route.receive())
                assert isinstance(value, Cancel) and value.assignment == job.offer.assignment
                job.cancelled.set()
        except RouteClosedError:
            return


@asynccontextmanager
async def scripted_worker(
    name: str, script: Script | None = None, transport: Transport | None = None, **beat: Any
) -> AsyncIterator[ScriptedWorker]:
    async with Registry() as registry:
        worker = ScriptedWorker(name, registry, script, **beat)
        worker.transport = transport or Transport()
        await worker.start()
        try:
            yield worker
        finally:
            await worker.kill()
