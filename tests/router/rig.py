"""A whole router in this process, on real sockets, between scripted workers and a scripted ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc

from libs.contracts.segue.v1 import pool_pb2, router_pb2, router_pb2_grpc
from libs.controller.protocol import (
    CancelledDelivery,
    CancelRequest,
    CompletedDelivery,
    Delivery,
    ErrorDelivery,
    GenerationRequest,
    Submission,
    TokensDelivery,
)
from libs.controller.wire import AttachCodec
from libs.service.channel import open_channel
from libs.service.lifecycle import Service
from libs.service.transport import Transport
from libs.tunnel import ChannelLimits, Handlers, Registry, Route, RouteClosedError, Side, Tunnel, TunnelConfig
from libs.tunnel.grpc_carrier import dial
from services.router.server import Router, assemble
from services.router.settings import RouterSettings
from tests.router.fake_catalog import FINGERPRINT, FakeCatalog, fake_catalog
from tests.router.fake_worker import LIMIT_S, Script, ScriptedWorker, scripted_worker, token
from tests.router.pki import Identity, plain

_IDS = count(1)
FAST = TunnelConfig(ping_interval_s=0.4, ping_jitter_s=0.1)


async def eventually(holds: Callable[[], bool], what: str) -> None:
    """Returns once it holds; for conditions of objects that signal nothing."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.003)
    except TimeoutError:
        raise AssertionError(f"not in time: {what}") from None


def request(prompt: int = 8, budget: int = 4, **changes: Any) -> GenerationRequest:
    facts: dict[str, Any] = {
        "request_id": f"r{next(_IDS)}",
        "model": "m",
        "tokens": tuple(range(1, prompt + 1)),
        "output_start": prompt,
        "max_new_tokens": budget,
    }
    return GenerationRequest(**{**facts, **changes})


@dataclass
class Stream:
    """One request as its ingress sees it."""

    request_id: str
    route: Route
    codec: AttachCodec
    tokens: list[int] = field(default_factory=list)
    at: int = 0
    """Tokens delivered before, through another router."""

    async def next(self) -> Delivery:
        async with asyncio.timeout(LIMIT_S):
            delivery = self.codec.decode(await self.route.receive())
        assert isinstance(delivery, TokensDelivery | CompletedDelivery | ErrorDelivery | CancelledDelivery)
        assert delivery.request_id == self.request_id
        if isinstance(delivery, TokensDelivery):
            assert delivery.index == self.at + len(self.tokens), "a gap or a repetition"
            assert delivery.fingerprint == FINGERPRINT
            self.tokens += delivery.tokens
        return delivery

    async def until(self, tokens: int) -> None:
        while len(self.tokens) < tokens:
            assert isinstance(await self.next(), TokensDelivery)

    async def end(self) -> CompletedDelivery | ErrorDelivery | CancelledDelivery:
        """The terminal delivery; nothing may follow it but the end of the route."""
        while True:
            delivery = await self.next()
            if not isinstance(delivery, TokensDelivery):
                break
        try:
            async with asyncio.timeout(LIMIT_S):
                raise AssertionError(f"{await self.route.receive()!r} after the terminal delivery")
        except RouteClosedError:
            return delivery

    async def completed(self, tokens: int) -> CompletedDelivery:
        """Ends regularly with exactly the declared tokens, from 0 on or from where an earlier router stopped."""
        end = await self.end()
        assert isinstance(end, CompletedDelivery), end
        assert self.tokens == [token(self.at + i) for i in range(tokens)]
        assert end.usage.generated_tokens == self.at + tokens
        return end

    def cancel(self) -> None:
        self.route.try_send(self.codec.encode(CancelRequest(self.request_id)))


class Ingress:
    """One tunnel to the router."""

    def __init__(self, tunnel: Tunnel, registry: Registry) -> None:
        self.tunnel, self.registry = tunnel, registry
        self.codec = AttachCodec()
        self.run: asyncio.Task[Any] | None = None

    async def submit(
        self, wanted: GenerationRequest | None = None, delivered: int = 0, fingerprint: str = ""
    ) -> Stream:
        wanted = wanted or request()
        route = await self.tunnel.open(self.codec.encode(Submission(wanted, delivered, fingerprint)))
        return Stream(wanted.request_id, route, self.codec, at=delivered)


@asynccontextmanager
async def ingress_to(
    address: str, config: TunnelConfig = FAST, transport: Transport | None = None
) -> AsyncIterator[Ingress]:
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(Registry())
        channel = open_channel(address, transport or Transport())
        stack.push_async_callback(channel.close, None)
        tunnel = Tunnel(dial(channel, address, "segue.v1.Router"), registry, Side.DIALING, Handlers(), config)
        ingress = Ingress(tunnel, registry)
        ingress.run = asyncio.create_task(tunnel.run())
        try:
            await tunnel.ready(LIMIT_S)
            yield ingress
        finally:
            ingress.run.cancel()
            await asyncio.gather(ingress.run, return_exceptions=True)


@dataclass
class Rig:
    router: Router
    service: Service
    catalog: FakeCatalog
    workers: list[ScriptedWorker]
    ingress: Ingress
    stub: Any
    target: str

    @property
    def worker(self) -> ScriptedWorker:
        return self.workers[0]

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(f"segue_router_{name}", labels) or 0.0

    def fenced(self, reason: str) -> float:
        counts = self.router.shell.machine.fence.counts
        return sum(number for (_, fence), number in counts.items() if fence.value == reason)

    async def heard(self, *workers: ScriptedWorker) -> None:
        """The router has a heartbeat of exactly these processes."""
        wanted = {worker.name: worker.epoch for worker in workers}
        views = self.router.observatory.fleet.views

        def holds() -> bool:
            return {name: view.heartbeat.epoch for name, view in views().items()} == wanted

        await eventually(holds, f"heartbeats of {wanted}")

    async def pool(self) -> pool_pb2.PoolStatus:
        """The tunnel pool, as an operator sees it."""
        answer = await self.stub.GetPool(router_pb2.GetPoolRequest(), timeout=LIMIT_S)
        found: pool_pb2.PoolStatus = answer.pool
        return found

    async def at_rest(self) -> None:
        """Nothing is held for any request, anywhere."""
        router = self.router
        await eventually(lambda: not len(router.requests) and not len(router.assignments), "requests and assignments")
        await router.upstream.wait_rest(LIMIT_S)
        await router.downstream.wait_rest(LIMIT_S)
        assert (
            len(router.shell.machine) == router.shell.machine.waiting == router.shell.timers == len(router.spans) == 0
        )
        for view in router.observatory.fleet.views().values():
            assert not [one for one in view.bookings.values() if one.accepted_ms is None]


async def leave(service: Service, drain: bool = True) -> None:
    """What the lifecycle does at the end of a process."""
    if drain:
        for one in service._drains:
            await one(2.0)
    await service._grpc.stop(0.2)
    await service._cancel_background()
    for _, close in reversed(service._closers):
        await close()


@asynccontextmanager
async def running(
    *scripts: Script | None,
    rest: bool = True,
    within_s: float = 30,
    epoch: int = 1,
    identity: Identity = plain,
    **changes: Any,
) -> AsyncIterator[Rig]:
    """A router with one worker per script, w0, w1, …, all heard. `rest`: check at the end that nothing is left."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(within_s))
        strays: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        stack.callback(loop.set_exception_handler, loop.get_exception_handler())
        loop.set_exception_handler(lambda _loop, context: strays.append(context))
        catalog = await stack.enter_async_context(fake_catalog(identity("catalog")))
        workers = []
        for number, script in enumerate(scripts):
            name = f"w{number}"
            worker = await stack.enter_async_context(scripted_worker(name, script, identity(name)))
            worker.epoch = epoch
            catalog.endpoints[worker.name] = worker.endpoint
            workers.append(worker)
        own = identity("router")
        facts = {
            "listen": "127.0.0.1:0",
            "tls_cert_file": own.cert_file,
            "tls_key_file": own.key_file,
            "tls_ca_file": own.ca_file,
            "catalog": catalog.address,
            "names_refresh_s": 0.2,
            "heartbeat_expiry_s": 60.0,
            "pool_keepalive_s": 0.4,
            "pool_keepalive_jitter_s": 0.1,
            **changes,
        }
        service = Service(RouterSettings(**facts), await stack.enter_async_context(asyncio.TaskGroup()))
        router = await assemble(service.settings, service, FAST)  # type: ignore[arg-type]
        try:
            channel = open_channel(service.target, own)
            stack.push_async_callback(channel.close, None)
            ingress = await stack.enter_async_context(ingress_to(service.target, transport=own))
            stub: Any = router_pb2_grpc.RouterStub(channel)
            rig = Rig(router, service, catalog, workers, ingress, stub, service.target)
            await rig.heard(*workers)
            yield rig
            if rest:
                await rig.at_rest()
        finally:
            await leave(service)
        assert not strays, f"errors outside any task: {strays}"


def slow_ingress() -> TunnelConfig:
    """An ingress whose routes hold next to nothing."""
    limits = ChannelLimits(max_items=4, max_bytes=1 << 20, high_items=2, high_bytes=1 << 19, congested_s=0.2)
    return TunnelConfig(ping_interval_s=0.4, ping_jitter_s=0.1, route=limits)


def status(failure: Any) -> grpc.StatusCode:
    """Of what `pytest.raises(grpc.aio.AioRpcError)` caught."""
    code: grpc.StatusCode = failure.value.code()
    return code
