"""A worker over real sockets in this process, and the router's end of a tunnel to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from libs.contracts.segue.v1 import worker_pb2_grpc
from libs.controller.catalog_facts import Endpoint, Model, Node
from libs.controller.merging import merge_deltas
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    Candidate,
    Delta,
    ElectTunnel,
    GenerationRequest,
    Heartbeat,
    Offer,
    OfferReply,
    Result,
    Sampling,
    SnapshotRequest,
    Tier,
    TraceContext,
)
from libs.controller.wire import TunnelCodec
from libs.service.channel import open_channel
from libs.service.grpc_server import GrpcServer
from libs.service.transport import Transport
from libs.tunnel import Closed, CloseReason, Handlers, Registry, Route, RouteClosedError, Side, Tunnel, TunnelConfig
from libs.tunnel.grpc_carrier import dial, with_attach
from services.worker.assembly import Handlers as ByteHandlers
from services.worker.assembly import Place, Unstored, Worker, echo_engine
from services.worker.registration import Registration
from services.worker.settings import WorkerSettings

SALT = "ab" * 32
EPOCH = 1_000
SERVICE = "segue.v1.Worker"


class Unlisted(Registration):
    """A registration without a catalog, for tests about everything else."""

    def __init__(self, epoch: int = EPOCH) -> None:
        self.epoch, self.deregistered = epoch, 0

    @property
    def listed(self) -> bool:
        return not self.deregistered

    async def register(self, endpoint: Endpoint, models: object, names: object, within_s: float) -> int:
        self.endpoint = endpoint
        return self.epoch

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def deregister(self) -> None:
        self.deregistered += 1


def settings(**values: object) -> WorkerSettings:
    """Fast costs: a request of a few tokens takes milliseconds."""
    given: dict[str, object] = {
        "echo": True, "worker": "w", "echo_prefill_ms": 0.0, "echo_decode_ms": 1.0, "lanes": 2, "step_tokens": 256,
        "echo_pages": 256, "heartbeat_s": 0.2,
    }  # fmt: skip
    return WorkerSettings(**{**given, **values})  # type: ignore[arg-type]


@dataclass
class Running:
    """A worker that serves."""

    worker: Worker
    registration: Unlisted
    target: str
    channel: grpc.aio.Channel
    stub: worker_pb2_grpc.WorkerStub
    life: asyncio.Task[None]

    @property
    def model(self) -> Model:
        return self.worker.engine.model

    def pages_at_rest(self) -> bool:
        """Nothing reserved, loading, evicting or unevictable."""
        self.worker.engine.pool.check_integrity()
        return all(
            pages.reserved == pages.loading == pages.evicting == 0 and pages.evictable == pages.resident
            for pages in self.worker.engine.pool.pages().values()
        )

    async def rest(self) -> None:
        """Until nothing is under way; then the books must balance."""
        await until(lambda: not len(self.worker.interpreter.machine))
        assert self.pages_at_rest(), self.worker.engine.pool.pages()
        assert not self.worker.interpreter.outlets


async def until(condition: Callable[[], bool], within: float = 5.0) -> None:
    """Polls; for states that announce themselves nowhere."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(handlers: Callable[[Worker], ByteHandlers] | None = None, **values: object) -> AsyncIterator[Running]:
    """An echo worker on a free loopback port."""
    chosen = settings(**values)
    engine = echo_engine(chosen)
    registration = Unlisted()
    made = handlers(engine.pool) if handlers else Unstored(engine.pool)  # type: ignore[arg-type]
    server = GrpcServer("127.0.0.1:0", Transport())
    worker = Worker(chosen, engine, made, registration, lambda: Place("w", "", server.target, "ipv4"))
    register = with_attach(worker_pb2_grpc.add_WorkerServicer_to_server, SERVICE, worker.attach.serve)
    server.add(worker.servicer, register, SERVICE)
    async with worker:
        await server.start()
        await worker.begin()
        channel = open_channel(server.target, Transport())
        life = asyncio.create_task(worker.run())
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        try:
            yield Running(worker, registration, server.target, channel, stub, life)
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            await channel.close()
            worker.attach.close()
            await server.stop(1.0)


@dataclass
class Exchange:
    """One assignment as its router sees it."""

    route: Route
    codec: TunnelCodec
    offer: Offer
    reply: OfferReply | None = None
    deltas: list[Delta] = field(default_factory=list)
    result: Result | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    async def next(self) -> OfferReply | Delta | Result:
        value = self.codec.decode(await self.route.receive(5.0))
        match value:
            case OfferReply():
                self.reply = value
            case Delta():
                self.deltas.append(value)
            case Result():
                self.result = value
        return value  # type: ignore[return-value]

    async def accepted(self) -> OfferReply:
        value = await self.next()
        assert isinstance(value, OfferReply)
        return value

    async def finish(self) -> Result:
        while self.result is None:
            await self.next()
        return self.result

    async def ended(self) -> CloseReason:
        """How the route was closed, after everything on it was read."""
        while True:
            try:
                await self.next()
            except RouteClosedError as error:
                return error.closed.reason

    def cancel(self, epoch: int = EPOCH) -> None:
        self.route.try_send(self.codec.encode(Cancel(self.offer.assignment, epoch)))


class Router:
    """The dialing end: one tunnel, as many exchanges as wanted."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.codec = TunnelCodec()
        self.beats: list[Heartbeat] = []
        self.heard = asyncio.Event()
        self.tunnel: Tunnel
        self.lost: Closed | None = None

    def control(self, _tunnel: Tunnel, payload: bytes) -> None:
        value = self.codec.decode(payload)
        assert isinstance(value, Heartbeat)
        self.beats.append(value)
        self.heard.set()

    async def beat(self, within: float = 5.0) -> Heartbeat:
        """The next heartbeat."""
        self.heard.clear()
        async with asyncio.timeout(within):
            await self.heard.wait()
        return self.beats[-1]

    def elect(self, term: int = 1) -> None:
        self.tunnel.try_control(self.codec.encode(ElectTunnel(term)))

    def ask_snapshot(self) -> None:
        self.tunnel.try_control(self.codec.encode(SnapshotRequest()))

    async def offer(
        self,
        tokens: tuple[int, ...],
        max_new: int = 4,
        *,
        name: str = "r1",
        attempt: int = 1,
        epoch: int = EPOCH,
        fingerprint: str | None = None,
        tier: Tier = Tier.NONE,
        cached: int = 0,
        chain: tuple[Node, ...] = (),
        deadline_ms: int = 60_000,
        queue_ms: float = 1e6,
        output_start: int | None = None,
        stops: tuple[int, ...] = (),
        traceparent: str = "",
    ) -> Exchange:
        print_name = fingerprint or self.running.model.fingerprint
        request = GenerationRequest(
            name, "echo", tokens, len(tokens) if output_start is None else output_start, max_new, tenant_salt=SALT,
            deadline_ms=deadline_ms, sampling=Sampling(seed=1), stop_token_ids=stops, trace=TraceContext(traceparent),
        )  # fmt: skip
        candidate = Candidate("w", epoch, print_name, tier, cached_tokens=cached, queue_ms=queue_ms)
        offer = Offer(AssignmentId(name, attempt), epoch, request, print_name, candidate, chain)
        return Exchange(await self.tunnel.open(self.codec.encode(offer)), self.codec, offer)


@asynccontextmanager
async def routing(running: Running, router: str = "", config: TunnelConfig | None = None) -> AsyncIterator[Router]:
    """A tunnel to the worker, ready; closed in order at the end."""
    end = Router(running)
    channel = open_channel(running.target, Transport())
    metadata = [("segue-router", router)] if router else []
    async with Registry() as registry:
        handlers = Handlers(
            merge=merge_deltas,
            on_control=end.control,
            on_tunnel_lost=lambda _tunnel, closed: setattr(end, "lost", closed),
        )
        carrier = dial(channel, running.target, SERVICE, metadata=metadata)
        end.tunnel = Tunnel(carrier, registry, Side.DIALING, handlers, config)
        life = asyncio.create_task(end.tunnel.run())
        await end.tunnel.ready(5.0)
        try:
            yield end
        finally:
            end.tunnel.close()
            await asyncio.gather(life, return_exceptions=True)
            await channel.close()
