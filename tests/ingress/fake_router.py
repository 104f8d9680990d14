"""The other end of the ingress's contracts: a router that speaks the real Attach protocol over real sockets and answers
by script, and a catalog that knows one model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc, router_pb2_grpc
from libs.contracts.segue.v1.common_pb2 import FinishReason, Tier, TierTokens, Timings, Usage
from libs.contracts.segue.v1.router_pb2 import (
    AttachMessage,
    CancelledDelivery,
    CompletedDelivery,
    Delivery,
    ErrorDelivery,
    GenerateRequest,
    Served,
    TokensDelivery,
)
from libs.tunnel import Closed, CloseReason, Handlers, Registry, Route, RouteClosedError, Side, Tunnel
from libs.tunnel.grpc_carrier import Carrier, Context, serve_tunnel, with_attach

SERVICE = "segue.v1.Router"
VARIANT = "ab" * 32
SERVED = Served(
    worker="w2", workers=["w1", "w2"], epoch=7, attempts=2, tier=Tier.TIER_OBJECT,
    timings=Timings(restore_ms=3, prefill_ms=5, ttft_ms=11), predicted_ttft_ms=12,
)  # fmt: skip


@dataclass
class Exchange:
    """One submission and what a script can do with it."""

    route: Route
    submit: GenerateRequest
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    closed: Closed | None = None

    @property
    def id(self) -> str:
        return self.submit.request.request_id

    @property
    def prompt(self) -> list[int]:
        return list(self.submit.request.tokens[: self.submit.request.output_start])

    def usage(self, generated: int) -> Usage:
        """A quarter of the prompt resident, a quarter restored, the rest computed."""
        size = len(self.prompt)
        restored = TierTokens(tier=Tier.TIER_OBJECT, tokens=size // 4, bytes=1_000)
        return Usage(
            prompt_tokens=size,
            cached_tokens=size // 4 * 2,
            restored_tokens=size // 4,
            computed_tokens=size - size // 4 * 2,
            generated_tokens=generated,
            restored_by_tier=[restored],
        )

    def tokens(self, tokens: Sequence[int], index: int) -> None:
        usage = self.usage(index + len(tokens))
        self.send(tokens=TokensDelivery(index=index, tokens=tokens, usage=usage, fingerprint=VARIANT))

    def complete(self, reason: FinishReason, generated: int) -> None:
        self.send(completed=CompletedDelivery(finish_reason=reason, usage=self.usage(generated), served=SERVED))
        self.route.close(CloseReason.DONE)

    def fail(self, code: grpc.StatusCode, message: str, retry_after_ms: int = 0) -> None:
        told = ErrorDelivery(code=code.value[0], message=message, retry_after_ms=retry_after_ms)
        self.send(error=told)
        self.route.close(CloseReason.DONE)

    def send(self, **event: Any) -> None:
        delivery = Delivery(request_id=self.id, **event)
        self.route.post(AttachMessage(delivery=delivery).SerializeToString())


Script = Callable[[Exchange], Awaitable[None]]


def answering(answer: Sequence[int], *, batch: int = 1, pause_s: float = 0.0) -> Script:
    """Delivers `answer` from where the submission stands, up to its budget and to the first stop token."""

    async def script(exchange: Exchange) -> None:
        request = exchange.submit.request
        at, last = exchange.submit.delivered, exchange.submit.delivered + request.max_new_tokens
        whole = [*answer[:last]]
        stop = next((i for i, token in enumerate(whole) if token in request.stop_token_ids), None)
        reason = FinishReason.FINISH_REASON_LENGTH
        if stop is not None:
            whole, reason = whole[: stop + 1], FinishReason.FINISH_REASON_STOP
        while at < len(whole):
            exchange.tokens(whole[at : at + batch], at)
            at += batch
            await asyncio.sleep(pause_s)
        exchange.complete(reason, len(whole))

    return script


class FakeRouter:
    """`script` runs for every submission; `exchanges` are all there were. `last_words`: are cancels answered?"""

    def __init__(self, script: Script, registry: Registry) -> None:
        self.script = script
        self.registry = registry
        self.exchanges: list[Exchange] = []
        self.arrived: asyncio.Queue[Exchange] = asyncio.Queue()
        self.address = ""
        self.last_words = True
        self._tunnels: list[Tunnel] = []
        self._server: grpc.aio.Server | None = None
        self._scripts: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        register = with_attach(router_pb2_grpc.add_RouterServicer_to_server, SERVICE, self._attach)
        register(router_pb2_grpc.RouterServicer(), self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()

    async def kill(self) -> None:
        """Gone without a word: every stream breaks."""
        for task in list(self._scripts):
            task.cancel()
        if self._server is not None:
            await self._server.stop(None)

    def shut_down(self) -> None:
        """Gone in order."""
        for tunnel in self._tunnels:
            tunnel.close(CloseReason.SHUTDOWN)

    async def next(self) -> Exchange:
        async with asyncio.timeout(10):
            return await self.arrived.get()

    async def _attach(self, carrier: Carrier, context: Context) -> None:
        tunnel = Tunnel(carrier, self.registry, Side.ACCEPTING, Handlers(accept=self._accept))
        self._tunnels.append(tunnel)
        await serve_tunnel(tunnel, context)

    def _accept(self, route: Route, payload: bytes) -> None:
        exchange = Exchange(route, AttachMessage.FromString(payload).submit)

        def on_closed(_route: Route, closed: Closed) -> None:
            exchange.closed = closed
            exchange.ended.set()

        route.on_closed = on_closed
        self.exchanges.append(exchange)
        self.arrived.put_nowait(exchange)
        for work in (self._run(self.script, exchange), self._listen(exchange)):
            task = asyncio.create_task(work)
            self._scripts.add(task)
            task.add_done_callback(self._scripts.discard)

    async def _run(self, script: Script, exchange: Exchange) -> None:
        try:
            await script(exchange)
        except RouteClosedError:
            return

    async def _listen(self, exchange: Exchange) -> None:
        try:
            while True:
                if AttachMessage.FromString(await exchange.route.receive()).HasField("cancel"):
                    exchange.cancelled.set()
                    if self.last_words:
                        # More was generated meanwhile than the ingress has taken.
                        exchange.send(cancelled=CancelledDelivery(usage=exchange.usage(99), served=SERVED))
        except RouteClosedError:
            return


@asynccontextmanager
async def fake_router(script: Script) -> AsyncIterator[FakeRouter]:
    async with Registry() as registry:
        router = FakeRouter(script, registry)
        await router.start()
        try:
            yield router
        finally:
            await router.kill()


class FakeCatalog(catalog_pb2_grpc.CatalogServicer):
    """Answers ListModels; counts the questions."""

    def __init__(self, names: Sequence[str], max_context: int) -> None:
        self.names = list(names)
        self.asked = 0
        self.address = ""
        self._max_context = max_context
        self._server: grpc.aio.Server | None = None

    async def ListModels(
        self, request: catalog_pb2.ListModelsRequest, context: object
    ) -> catalog_pb2.ListModelsResponse:
        self.asked += 1
        model = catalog_pb2.Model(fingerprint="ab" * 32, max_context=self._max_context, vocab_size=600)
        names = [catalog_pb2.ServedName(name=name, fingerprints=[model.fingerprint]) for name in self.names]
        return catalog_pb2.ListModelsResponse(names=names, models=[model])

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        catalog_pb2_grpc.add_CatalogServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)


@asynccontextmanager
async def fake_catalog(names: Sequence[str] = ("m",), max_context: int = 4_096) -> AsyncIterator[FakeCatalog]:
    catalog = FakeCatalog(names, max_context)
    await catalog.start()
    try:
        yield catalog
    finally:
        await catalog.stop()
