"""The one place where a worker's parts are put together.

An *engine* is what computes: a runtime, its page pool and the identity of what it serves. Beside it stand the handlers
that move bytes (restore, checkpoint, local chunks). `assemble` joins them with the controller, the tunnels and the
calls. Two engines exist: the echo one here, and the model one in `engine`, which is imported only when it is wanted,
since it brings torch.

Closed in order: the endpoint first (nothing new, every assignment cancelled, restores quiesced), then the runtime, then
storage; so nothing is given away while something still touches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from libs.continuation.chain import CHUNK_TOKENS
from libs.controller.catalog_facts import Model
from libs.controller.knobs import WorkerKnobs
from services.worker.deadly import DeadlyRuntime
from services.worker.echo.model import LAYOUT, EchoCosts, echo_model
from services.worker.echo.runtime import EchoRuntime
from services.worker.endpoint.attach import AttachServer
from services.worker.endpoint.draining import Draining
from services.worker.endpoint.interpreter import Interpreter
from services.worker.endpoint.servicer import WorkerServicer
from services.worker.handlers import (
    Checkpointer,
    ComputeMeasurements,
    LocalChunks,
    MemoryResidency,
    Restorer,
    Runtime,
    TierMeasurements,
)
from services.worker.heartbeat import Heartbeats
from services.worker.observation import Identity, Observer
from services.worker.pages.pool import PagePool
from services.worker.pages.sizing import GroupSpec, PageSizes
from services.worker.registration import Registration
from services.worker.settings import WorkerSettings
from services.worker.unstored import NoCheckpointer, NoChunks, NoMemory, NoRestorer, NoTiers


@dataclass(frozen=True)
class Engine:
    """What computes. `bytes_per_token`: attention state over all groups, at full length."""

    model: Model
    name: str
    runtime: Runtime
    compute: ComputeMeasurements
    pool: PagePool
    lanes: int
    bytes_per_token: int


class Handlers(Protocol):
    """What moves bytes."""

    @property
    def restorer(self) -> Restorer: ...
    @property
    def checkpointer(self) -> Checkpointer: ...
    @property
    def local(self) -> LocalChunks: ...
    @property
    def memory(self) -> MemoryResidency: ...
    @property
    def measurements(self) -> TierMeasurements: ...

    async def aclose(self) -> None:
        """Nothing writes to a page or a file afterwards."""
        ...


class Unstored:
    """`Handlers` of a worker without bytes."""

    def __init__(self, pool: PagePool) -> None:
        self.restorer, self.checkpointer = NoRestorer(), NoCheckpointer(pool)
        self.local, self.memory, self.measurements = NoChunks(), NoMemory(), NoTiers()

    async def aclose(self) -> None:
        """See Handlers."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this worker is: id, zone and the address it announces, with its address family."""

    worker: str
    zone: str
    address: str
    family: str


def echo_engine(settings: WorkerSettings) -> Engine:
    """The echo worker's. Inside the event loop that will run it."""
    name = settings.name or "echo"
    context = min(settings.max_context or settings.echo_context, settings.echo_context)
    model = echo_model(name, context, settings.echo_vocab)
    costs = EchoCosts(settings.echo_prefill_ms, settings.echo_decode_ms, settings.lanes, settings.step_tokens)
    runtime = EchoRuntime(costs, context)
    groups = [GroupSpec(group.name, group.window or 0, settings.echo_pages) for group in LAYOUT.groups]
    pool = PagePool(groups, PageSizes(settings.page, CHUNK_TOKENS, settings.step_tokens))
    return Engine(model, name, runtime, runtime, pool, settings.lanes, LAYOUT.bytes_per_token)


class Worker:
    """A whole worker but for its gRPC server. An async context manager.

    Its epoch is 0, which no offer names, until `begin`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        handlers: Handlers,
        registration: Registration,
        place: Callable[[], Place],
    ) -> None:
        self.settings, self.engine, self.handlers, self.registration = settings, engine, handlers, registration
        self._place = place
        runtime = DeadlyRuntime(engine.runtime, settings.crash_on) if settings.crash_on else engine.runtime
        self.interpreter = Interpreter(
            epoch=0,
            contexts={engine.model.fingerprint: engine.model.max_context},
            knobs=WorkerKnobs(max_control_tasks=settings.max_control_tasks),
            pool=engine.pool,
            runtime=runtime,
            restorer=handlers.restorer,
            checkpointer=handlers.checkpointer,
        )
        self.observer = Observer(self._identity(0), engine.pool, engine.compute, handlers.measurements, handlers.memory)
        self.draining = Draining(
            self.interpreter, handlers.checkpointer, registration.deregister, settings.shutdown_grace_s
        )
        self.servicer = WorkerServicer(self.interpreter, self.observer, self.draining, handlers.local)
        self.heartbeats = Heartbeats(self.interpreter, self.observer, interval_s=settings.heartbeat_s)
        self.attach = AttachServer(self.interpreter, self.heartbeats)
        self.interpreter.on_change = self.heartbeats.hurry
        self.interpreter.before_results = self.heartbeats.flush
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        # Requests may be held at routers until what is computed here can be fetched: they are told soon.
        loop = asyncio.get_running_loop()
        self.handlers.memory.listen(lambda: _on(loop, self.heartbeats.hurry))
        self._stack.push_async_callback(self.handlers.aclose)
        self._stack.push_async_callback(self.engine.runtime.aclose)
        await self._stack.enter_async_context(self.interpreter)
        await self._stack.enter_async_context(self.attach)
        self._stack.push_async_callback(self.draining.aclose)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def begin(self) -> None:
        """Warms up, registers and takes offers. The server must be bound. Raises StartError."""
        await self.engine.runtime.warmup()
        identity = self._identity(0)
        epoch = await self.registration.register(
            identity.endpoint(), [identity.model], [identity.name], self.settings.startup_wait_s
        )
        self.observer.identity = self._identity(epoch)
        self.interpreter.begin(epoch)

    async def run(self) -> None:
        """Heartbeats and lease, until cancelled. Raises DuplicateWorkerError, after everything here has been fenced."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.heartbeats.run(), name="heartbeats")
                tasks.create_task(self.registration.run(), name="registration")
        except* Exception as group:
            self.interpreter.drain()
            self.interpreter.expire_drain()
            raise group.exceptions[0] from None

    def _identity(self, epoch: int) -> Identity:
        engine, place = self.engine, self._place()
        return Identity(
            worker=place.worker,
            epoch=epoch,
            address=place.address,
            zone=place.zone,
            family=place.family,
            node=self.handlers.local.node,
            name=engine.name,
            model=engine.model,
            lanes=engine.lanes,
            bytes_per_token=engine.bytes_per_token,
            capacity_pages=engine.pool.largest().total,
        )


def _on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From another thread; a loop that has ended wants no news."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
