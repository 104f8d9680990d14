"""A worker's own parts in this process, driven without router or tunnel: what the claims about the worker play on.

Nothing is imitated: the engine, the page pool, the interpreter of the controller's machine, the chunk directory, the
object store and the catalog are the real ones. An offer goes to the interpreter as a tunnel would hand it over; what
comes back is collected with its times. A bench can be restarted (another epoch, empty pages) on the same chunk
directory or on a fresh one, so that a claim can choose which tier a restore has to come from, and then see that it did.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from cli.embedded.models import default_cache, prepare
from libs.continuation.chain import TAIL_TOKENS, root
from libs.continuation.tenancy import owner
from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc
from libs.controller.catalog_facts import Node
from libs.controller.knobs import WorkerKnobs
from libs.controller.protocol import (
    AssignmentId,
    Candidate,
    DeclineReason,
    Delta,
    GenerationRequest,
    Offer,
    OfferReply,
    Result,
    ResultStatus,
    Sampling,
    Tier,
    TokenLogprobs,
    Usage,
)
from libs.controller.wire_fields import from_proto, to_proto
from libs.service.channel import open_channel
from libs.service.transport import Transport
from prove.stage import Stage
from prove.stores import s3_settings, stores
from services.worker.assembly import Engine, Handlers, Unstored
from services.worker.endpoint.interpreter import Interpreter
from services.worker.engine import compute_of, engine_of
from services.worker.model.load import LoadedModel, load
from services.worker.pages.route import Continuation
from services.worker.runtime.grammars import MaskFactory
from services.worker.settings import WorkerSettings
from services.worker.storage import Storage

_CALL_S = 10.0
_PATIENCE_S = 600.0
_PATIENT_MS = 60_000


@lru_cache(maxsize=2)
def loaded(folder: Path) -> LoadedModel:
    """A model's weights, shared by every bench of this process."""
    return load(folder, "cpu")


@dataclass(frozen=True)
class Backing:
    """The stores behind a bench, and the model's folder. `own`: nobody else uses this catalog."""

    folder: Path
    catalog: str
    s3: Mapping[str, str]
    scratch: Path
    own: bool


@asynccontextmanager
async def backed(stage: Stage | None, model: str = "gemma3-270m") -> AsyncIterator[Backing]:
    """The given stage's stores and model, or stores of one's own and `model`."""
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as folder:
        scratch = Path(folder)
        if stage is not None:
            s3 = s3_settings(stage.cluster.s3_server)
            yield Backing(stage.folder, stage.cluster.catalog_target, s3, scratch, own=False)
            return
        made = await prepare(model, default_cache(), lambda _doing, _done: None)
        async with stores(None, scratch) as own:
            yield Backing(made, own.catalog, own.s3, scratch, own=True)


async def tiny_folder(stage: Stage | None) -> Path:
    """The tiny model's folder, for claims that need no stores."""
    return stage.folder if stage is not None else await prepare("tiny", default_cache(), lambda _doing, _done: None)


@dataclass(frozen=True)
class Ask:
    """One request. `output_start` None: nothing of `tokens` is output yet. `resident`: computed tokens counted on."""

    tokens: Sequence[int]
    new: int
    salt: str
    sampling: Sampling = field(default_factory=Sampling)
    chain: tuple[Node, ...] = ()
    tier: Tier = Tier.NONE
    resident: int = 0
    output_start: int | None = None
    request: str = ""
    attempt: int = 1
    stops: tuple[int, ...] = ()


class NotInTimeError(RuntimeError):
    """Something awaited did not come about."""


class Exchange:
    """One assignment, as whoever offered it sees it. Implements `endpoint.outlets.Outlet`. Times: perf_counter, s."""

    def __init__(self, bench: Bench, offer: Offer) -> None:
        self.bench, self.offer = bench, offer
        self.offered_at = time.perf_counter()
        self.reply: OfferReply | None = None
        self.result: Result | None = None
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.arrivals: list[float] = []
        self.over = False
        self.usage = Usage()
        self._news = asyncio.Event()

    @property
    def assignment(self) -> AssignmentId:
        return self.offer.assignment

    @property
    def processed(self) -> list[int]:
        """Tokens whose attention state exists when it has ended: all but the last."""
        return [*self.offer.request.tokens, *self.tokens][:-1]

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals[0] - self.offered_at) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Between neighbouring tokens."""
        return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(self.arrivals)]

    def send(self, value: OfferReply | Delta | Result) -> None:
        """See Outlet."""
        match value:
            case OfferReply():
                self.reply = value
            case Delta():
                now = time.perf_counter()
                self.tokens += value.tokens
                self.logprobs += value.logprobs
                self.arrivals += [now] * len(value.tokens)
                self.usage = value.usage
            case Result():
                self.result = value
                self.usage = value.usage
        self._news.set()

    def done(self) -> None:
        """See Outlet."""
        self.over = True
        self._news.set()

    async def until(self, condition: Callable[[], bool], within: float = _PATIENCE_S) -> None:
        """Raises NotInTimeError."""
        try:
            async with asyncio.timeout(within):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise NotInTimeError(f"{self.assignment}: not within {within:g} s ({len(self.tokens)} tokens)") from None

    async def drawn(self, count: int) -> None:
        """Until so many tokens have come, or it is over."""
        await self.until(lambda: len(self.tokens) >= count or self.over)

    async def finished(self, within: float = _PATIENCE_S) -> Exchange:
        """Until nothing follows."""
        await self.until(lambda: self.over, within)
        return self

    async def completed(self) -> Exchange:
        """Until it has completed. Raises RuntimeError for any other end."""
        await self.finished()
        if self.result is None or self.result.status is not ResultStatus.COMPLETED:
            raise RuntimeError(f"{self.assignment} did not complete: {self.result or self.reply}")
        return self

    def cancel(self) -> None:
        self.bench.interpreter.cancel(self.assignment)


@dataclass
class Bench:
    """A worker; an async context manager. `values`: settings by name. Without `backing` it keeps no chunks."""

    folder: Path
    values: Mapping[str, object]
    backing: Backing | None = None
    masks: Mapping[str, MaskFactory] = field(default_factory=dict)
    warm: bool = False
    handlers_of: Callable[[Engine], Handlers] | None = None
    """Other byte handlers than the real storage's."""
    epoch: int = 0
    directories: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        self.engine: Engine
        self.handlers: Handlers
        self.interpreter: Interpreter
        self.channel: grpc.aio.Channel | None = None
        self._names = itertools.count(1)
        self._id = secrets.token_hex(4)
        self._registered = False

    async def __aenter__(self) -> Self:
        if self.backing is not None:
            self.channel = open_channel(self.backing.catalog, Transport())
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()
        if self.channel is not None:
            await self.channel.close(None)

    async def restart(self, *, fresh_directory: bool = False, values: Mapping[str, object] | None = None) -> None:
        """Another process of this worker, as far as its state goes: a new epoch, empty pages. `values`: settings that
        differ from now on.
        """
        await self._close()
        self.values = {**self.values, **(values or {})}
        self.directories += fresh_directory
        self.restarts += 1
        await self._open()

    @property
    def storage(self) -> Storage:
        if not isinstance(self.handlers, Storage):
            raise RuntimeError("this bench keeps no chunks")
        return self.handlers

    @property
    def chunk_dir(self) -> Path:
        assert self.backing is not None
        return self.backing.scratch / f"{self._id}-chunks-{self.directories}"

    def settings(self) -> WorkerSettings:
        given: dict[str, object] = {
            "worker": f"bench-{self._id}", "name": "bench", "model": str(self.folder), "device": "cpu", "threads": 1,
            "kv_bytes": 64 << 20,
        }  # fmt: skip
        if self.backing is not None:
            # No host memory unless a claim says so: what is evicted from pages must come from where the claim means.
            # Nor is a restore given up, or a read overtaken, for a machine that is busy with other things.
            patient = {"restore_loss_ms": _PATIENT_MS, "hedge_ms": _PATIENT_MS}
            own = {"chunk_dir": self.chunk_dir, "chunk_dir_free": 0, "ram_bytes": 0, **patient}
            given |= {**own, **self.backing.s3}
        return WorkerSettings(**{**given, **self.values})  # type: ignore[arg-type]

    async def _open(self) -> None:
        settings, model = self.settings(), loaded(self.folder)
        if self.backing is not None and self.handlers_of is None:
            assert self.channel is not None
            made = await engine_of(
                settings, self.folder, model, self.channel, lambda to: open_channel(to, Transport()), self.masks
            )
            self.engine, self.handlers = made.engine, made.storage
        else:
            self.engine = compute_of(settings, self.folder, model, self.masks).engine
            self.handlers = Unstored(self.engine.pool) if self.handlers_of is None else self.handlers_of(self.engine)
        if self.backing is not None and self.backing.own and not self._registered:
            await self._register()
        self.epoch += 1
        self.interpreter = Interpreter(
            epoch=0,
            contexts={self.engine.model.fingerprint: self.engine.model.max_context},
            knobs=WorkerKnobs(max_control_tasks=settings.max_control_tasks),
            pool=self.engine.pool,
            runtime=self.engine.runtime,
            restorer=self.handlers.restorer,
            checkpointer=self.handlers.checkpointer,
        )
        await self.interpreter.__aenter__()
        if self.warm:
            await self.engine.runtime.warmup()
        self.interpreter.begin(self.epoch)

    async def _close(self) -> None:
        await self.interpreter.__aexit__(None, None, None)
        await self.engine.runtime.aclose()
        await self.handlers.aclose()

    async def _register(self) -> None:
        """The catalog takes chunks of models it knows."""
        assert self.channel is not None
        endpoint = catalog_pb2.Endpoint(worker=f"bench-{self._id}", address="127.0.0.1:9", family="ipv4")
        request = catalog_pb2.RegisterRequest(endpoint=endpoint, names=["bench"])
        request.models.add().MergeFrom(to_proto(self.engine.model))  # type: ignore[arg-type]
        await catalog_pb2_grpc.CatalogStub(self.channel).Register(request, timeout=_CALL_S)  # type: ignore[misc]
        self._registered = True

    # --- requests ---

    def offer(self, ask: Ask) -> Exchange:
        """Offers; the reply is there when it returns."""
        tokens = tuple(ask.tokens)
        name = ask.request or f"{self._id}-{next(self._names)}"
        start = len(tokens) if ask.output_start is None else ask.output_start
        request = GenerationRequest(
            name, "bench", tokens, start, ask.new, tenant_salt=ask.salt, sampling=ask.sampling, deadline_ms=3_600_000,
            stop_token_ids=ask.stops,
        )  # fmt: skip
        fingerprint = self.engine.model.fingerprint
        candidate = Candidate(
            "bench", self.epoch, fingerprint, ask.tier, cached_tokens=ask.resident, queue_ms=float("inf")
        )
        offer = Offer(AssignmentId(name, ask.attempt), self.epoch, request, fingerprint, candidate, ask.chain)
        exchange = Exchange(self, offer)
        self.interpreter.offer(offer, 1, exchange)
        return exchange

    async def accepted(self, ask: Ask, within: float = 60.0) -> Exchange:
        """Offers until there are pages for it: what is not durable yet cannot be evicted. Raises RuntimeError."""
        give_up = time.monotonic() + within
        while True:
            exchange = self.offer(ask)
            reply = exchange.reply
            if reply is not None and reply.accepted:
                return exchange
            if reply is None or reply.reason is not DeclineReason.INSUFFICIENT_PAGES or time.monotonic() > give_up:
                raise RuntimeError(f"declined: {reply}")
            if ask.request:
                ask = replace(ask, attempt=ask.attempt + 1)
            await asyncio.sleep(0.01)

    async def run(self, ask: Ask) -> Exchange:
        """Offers and waits for its completion."""
        return await (await self.accepted(ask)).completed()

    async def lookup(self, tokens: Sequence[int], salt: str) -> tuple[Node, ...]:
        """The chain the catalog knows of these processed tokens, its tail included."""
        assert self.channel is not None
        request = catalog_pb2.LookupRequest(fingerprint=self.engine.model.fingerprint, tenant_salt=salt, tokens=tokens)
        found = await catalog_pb2_grpc.CatalogStub(self.channel).Lookup(request, timeout=_CALL_S)  # type: ignore[misc]
        nodes = [*found.nodes, *([found.tail] if found.HasField("tail") else [])]
        return tuple(from_proto(Node, node) for node in nodes)

    async def durable(self, tokens: Sequence[int], salt: str, within: float = 60.0) -> tuple[Node, ...]:
        """The chain, once it reaches the last multiple of 16. Raises NotInTimeError."""
        wanted = len(tokens) // TAIL_TOKENS * TAIL_TOKENS
        give_up = time.monotonic() + within
        while True:
            nodes = await self.lookup(tokens, salt)
            if (nodes[-1].chunk.end if nodes else 0) >= wanted:
                return nodes
            if time.monotonic() > give_up:
                raise NotInTimeError(f"{wanted} tokens durable: not within {within:g} s")
            await asyncio.sleep(0.02)

    def resident(self, tokens: Sequence[int], salt: str) -> int:
        """How many of the processed tokens are in pages."""
        fingerprint = self.engine.model.fingerprint
        of = Continuation(fingerprint, root(fingerprint, salt), owner(salt))
        return self.engine.pool.lookup(of, tokens, len(tokens))

    # --- at rest ---

    async def rest(self, within: float = 30.0) -> list[str]:
        """Waits until nothing is under way and nothing waits to be durable; what is wrong then, in words."""
        give_up = time.monotonic() + within
        while len(self.interpreter.machine) or self.interpreter.outlets:
            if time.monotonic() > give_up:
                return [f"{len(self.interpreter.machine)} assignments do not end"]
            await asyncio.sleep(0.001)
        await self.handlers.checkpointer.drain(within)
        # A range that stands may still be copied to the directory: its pages are pinned meanwhile.
        while held := self.held():
            if time.monotonic() > give_up:
                return held
            await asyncio.sleep(0.002)
        return self.broken()

    def held(self) -> list[str]:
        """Pages that somebody holds, in words: reserved, loading, pinned, or blocked from eviction."""
        found = []
        for group, pages in self.engine.pool.pages().items():
            states = {"reserved": pages.reserved, "loading": pages.loading, "pinned": pages.evicting}
            found += [f"{count} pages of {group} {state}" for state, count in states.items() if count]
            if pages.evictable != pages.resident:
                found.append(f"{pages.resident - pages.evictable} resident pages of {group} cannot be evicted")
        return [*found, *(f"{assignment} holds a reservation" for assignment in self.engine.pool.held())]

    def broken(self) -> list[str]:
        """Contradictions in the pool's books."""
        try:
            self.engine.pool.check_integrity()
        except AssertionError as error:
            return [str(error)]
        return []

    def evicted(self) -> dict[str, int]:
        """Pages that lost their content, by reason."""
        return {reason.value: count for reason, count in sorted(self.engine.pool.evictions.pages.items())}


def fresh_salt() -> str:
    """A tenant nobody has been yet: nothing of it is cached anywhere."""
    return secrets.token_hex(32)


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """Seconds since its beginning; stands still once left."""
    began, ended = time.perf_counter(), 0.0
    try:
        yield lambda: (ended or time.perf_counter()) - began
    finally:
        ended = time.perf_counter()
