"""The pool's shell: obeys what ``PoolCore`` decides, over tunnels. Decides nothing itself.

Everything that changes the core is a plain call on the event loop. What takes time has a task of its own (a dial and
the tunnel it came to, a probe, the wait for the publication guard before a commit) and comes back as an event.

``bind`` takes the registry's binding lock, picks and binds in one plain call, and only then waits, without the lock, if
there was nothing to pick. So a bind sees every publication and every retirement either wholly or not at all.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from libs.tunnel import (
    EXPECTED_ENDS,
    ChannelFullError,
    Closed,
    CloseReason,
    Handlers,
    OnClosed,
    Registry,
    Route,
    Tunnel,
    TunnelClosedError,
    TunnelConfig,
)
from libs.tunnel.registry import call_user

from .core import PoolCore
from .dialling import Dialler
from .effects import Dial as DialEffect
from .effects import Ready
from .errors import GoDirectError, NoCoverageError, PoolClosingError
from .events import (
    BeginShutdown,
    Bound,
    CommitGeneration,
    Connected,
    DrainWorker,
    End,
    Ended,
    HealthChanged,
    Identified,
    MapRead,
    PoolEvent,
    SetPolicy,
    SwapGeneration,
    Tick,
    Unbound,
    Wanted,
)
from .generation import GenerationKey
from .guard import PublicationGuard
from .hooks import Dial, Hooks, Loss, Writer
from .knobs import PoolPolicy
from .model import Endpoint, Target, WriterId
from .readiness import Direct, Hold, Readiness, Refusal, Refuse
from .replacement import Reservation
from .telemetry import PoolSnapshot
from .tuning import tunnel_config

_GOODBYE_S = 3.0  # after the deadline of a shutdown: for tunnels to end in order
_LEAVING = frozenset({CloseReason.SHUTDOWN, CloseReason.RETIRED, CloseReason.DONE})


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The core's snapshot, and what the data plane knows."""

    pool: PoolSnapshot
    routes: int
    bindings: int
    permits: int
    held: int  # binds that wait for a tunnel
    route_ends: dict[str, int]  # by reason; monotonic
    dropped: dict[str, int]  # inbound items without a route, by why; monotonic


class TunnelPool:
    """An async context manager; enter the registry first. ``config``: what no knob of the pool sets. ``clock``:
    monotonic seconds, of the pool and of its tunnels.
    """

    def __init__(
        self,
        registry: Registry,
        dial: Dial,
        hooks: Hooks | None = None,
        policy: PoolPolicy | None = None,
        *,
        config: TunnelConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        policy = policy or PoolPolicy()
        self._registry = registry
        self._hooks = hooks or Hooks()
        self._base = config or TunnelConfig()
        self._clock = clock
        self._core = PoolCore(policy, chance or random.Random(), clock())  # noqa: S311 - jitter and choice, no secrets
        self._config = tunnel_config(policy, self._base)
        self._guard = PublicationGuard(registry.binding_lock)
        self._dialler = Dialler(dial, registry, self._guard, self, clock)
        self._handlers = Handlers(
            merge=self._hooks.merge,
            on_control=self._control,
            on_route_dropped=self._hooks.on_route_dropped,
            on_tunnel_lost=self._lost,
        )
        self._writers: dict[WriterId, Writer] = {}
        self._by_tunnel: dict[int, Writer] = {}
        self._dials: dict[WriterId, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._committing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._released = asyncio.Event()
        self._held = 0
        self._crashed = False
        registry.max_connections = policy.max_connections

    async def __aenter__(self) -> Self:
        self.feed(Tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever is left ends at once; ``shutdown`` first for an end in order."""
        if not self._crashed:
            self.feed(BeginShutdown(0.0))
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._dials.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    # --- what the user does ---

    def observe(self, endpoints: Sequence[Endpoint], revision: int) -> None:
        """The desired map as its source has it now; call it again whenever it is read."""
        self.feed(MapRead(tuple(endpoints), revision))

    async def bind(
        self,
        target: Target,
        first_payload: bytes,
        on_closed: OnClosed | None = None,
        *,
        wait_s: float = float("inf"),
    ) -> Route:
        """A new route to the target, its first payload on the way.

        Waits for a tunnel within the policy's wait, and no longer than ``wait_s``: who has another candidate waits
        for none. Raises NoCoverageError, PoolClosingError, GoDirectError, and what
        ``Tunnel.open`` does: ChannelFullError if every tunnel's command channel is full, PayloadTooLargeError,
        TooManyRoutesError. Then nothing was bound.
        """
        began = self._clock()
        while True:
            async with self._registry.binding_lock:
                route = self._try_bind(target, first_payload, on_closed)
            if route is not None:
                return route
            waited = self._clock() - began
            admission = self._core.admit(self._held, waited)
            match admission:
                case Direct():
                    raise GoDirectError(target)
                case Refuse(why):
                    kind = PoolClosingError if why is Refusal.CLOSING else NoCoverageError
                    raise kind(target, why, self._core.readiness, waited)
                case Hold() if waited >= wait_s:
                    raise NoCoverageError(target, Refusal.NO_COVERAGE, self._core.readiness, waited)
                case Hold(longest_s):
                    await self._hold(target, min(longest_s, wait_s - waited))

    def takes(self, target: Target) -> bool:
        """Whether a bind to this target would find a tunnel now."""
        return bool(self._core.candidates(target, self._work))

    def drained(self, worker: str) -> frozenset[str]:
        """Addresses at which an operator has taken the worker out of use."""
        return self._core.drained(worker)

    def identify(self, tunnel: Tunnel, incarnation: int) -> None:
        """The process behind the tunnel has said which it is."""
        writer = self._by_tunnel.get(tunnel.tunnel_id)
        if writer is not None:
            self.feed(Identified(writer.writer, incarnation))

    def drain(self, worker: str, address: str = "", *, drained: bool = True) -> None:
        """Takes a worker (at one address, or all) out of use: its tunnels take no new routes and go when empty."""
        self.feed(DrainWorker(worker, address, drained))

    def swap(self) -> None:
        """Makes every tunnel anew, as one generation."""
        self.feed(SwapGeneration())

    def set_policy(self, policy: PoolPolicy) -> None:
        """Other knobs from here on, for live tunnels too. Breaks no bound session."""
        self._config = tunnel_config(policy, self._base)
        self._registry.max_connections = policy.max_connections
        for writer in self._writers.values():
            writer.tunnel.reconfigure(self._config)
        self.feed(SetPolicy(policy))

    @property
    def policy(self) -> PoolPolicy:
        """The knobs in force."""
        return self._core.policy

    @property
    def readiness(self) -> Readiness:
        """Whether traffic should come, and if not why."""
        return self._core.readiness

    def status(self) -> PoolStatus:
        """All of the telemetry."""
        held, counters = self._registry.snapshot(), self._registry.counters
        return PoolStatus(
            self._core.snapshot(self._clock()),
            held.routes,
            held.bindings,
            held.permits,
            self._held,
            dict(counters.routes_closed),
            {
                "no_route": counters.no_route,
                "channel_closed": counters.channel_closed,
                "channel_full": counters.channel_full,
                "too_many_routes": counters.too_many_routes,
            },
        )

    def writers(self) -> tuple[Writer, ...]:
        """All published tunnels that have not ended."""
        return tuple(self._writers.values())

    async def wait_ready(self, within_s: float) -> bool:
        """Waits until traffic may come; whether it may."""
        try:
            async with asyncio.timeout(within_s):
                while not self._core.readiness.ready:
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def shutdown(self, grace_s: float) -> bool:
        """Stop admission, let routes end for that long, close every tunnel in order. Whether nothing is left."""
        self.feed(BeginShutdown(grace_s))
        try:
            async with asyncio.timeout(grace_s + _GOODBYE_S):
                await self._released.wait()
        except TimeoutError:
            return False
        return True

    # --- what dials ask ---

    def reservation(self, writer: WriterId) -> Reservation:
        """See Dialler."""
        return self._core.reservation(writer)

    def handlers(self) -> Handlers:
        """Of every tunnel."""
        return self._handlers

    def tunnel_config(self) -> TunnelConfig:
        """Of a tunnel made now."""
        return self._config

    def connect_s(self) -> float:
        """See PoolPolicy."""
        return self._core.policy.connect_s

    def publish(self, dial: DialEffect, tunnel: Tunnel) -> bool:
        """Under the guard: in one step with what it replaces. Nothing here may await."""
        assert self._guard.held
        if tunnel.closed is not None:
            raise TunnelClosedError(tunnel.closed)
        writer = Writer(dial.writer, tunnel, dial.endpoint, dial.generation)
        self._writers[dial.writer] = self._by_tunnel[tunnel.tunnel_id] = writer
        ready = self._handle(Connected(dial.writer))
        if dial.writer in ready.refused:
            del self._writers[dial.writer], self._by_tunnel[tunnel.tunnel_id]
        elif self._hooks.on_writer_up is not None:
            call_user(self._registry.counters, self._hooks.on_writer_up, writer)
        self._obey(ready)
        return dial.writer not in ready.refused

    def feed(self, event: PoolEvent) -> None:
        """Lets the core handle an event and obeys it."""
        if not self._crashed:
            self._obey(self._handle(event))

    # --- the pool's own ---

    def _handle(self, event: PoolEvent) -> Ready:
        try:
            return self._core.handle(event, self._clock())
        except BaseException as error:
            self._crashed = True
            if self._hooks.crashed is not None:
                self._hooks.crashed(error)
            raise

    def _obey(self, ready: Ready) -> None:
        hooks = self._hooks
        for close in ready.closes:
            writer = self._writers.get(close.writer)
            if writer is not None:
                reason = CloseReason.SHUTDOWN if self._core.stopping else CloseReason.RETIRED
                writer.tunnel.close(reason, f"the pool retires it: {close.why.value}")
        for cancelled in ready.cancels:
            task = self._dials.get(cancelled)
            if task is not None and not task.cancelling():
                task.cancel()
        for dial in ready.dials:
            task = asyncio.create_task(self._dialler.hold(dial), name=f"writer {dial.writer}")
            self._dials[dial.writer] = task
            task.add_done_callback(lambda _task, writer=dial.writer: self._dials.pop(writer))  # type: ignore[misc]
        for probed in ready.probes:
            self._spawn(self._dialler.probe(probed), f"probe of {probed.worker}")
        if ready.commit is not None and (self._committing is None or self._committing.done()):
            self._committing = self._spawn(self._commit(ready.commit), "generation commit")
        counters = self._registry.counters
        if hooks.on_warning is not None:
            for warning in ready.warnings:
                call_user(counters, hooks.on_warning, warning)
        if ready.readiness is not None and hooks.on_readiness is not None:
            call_user(counters, hooks.on_readiness, ready.readiness)
        if ready.bindable or ready.readiness is not None:
            self._news.set()
            self._news = asyncio.Event()
        if ready.released:
            self._released.set()
        if ready.wake_at is not None:
            self._set_timer(ready.wake_at)

    async def _commit(self, key: GenerationKey) -> None:
        async with self._guard:
            self.feed(CommitGeneration(key))

    def _try_bind(self, target: Target, first_payload: bytes, on_closed: OnClosed | None) -> Route | None:
        """Under the binding lock; nothing here may await."""
        full: ChannelFullError | None = None
        for record in self._core.candidates(target, self._work):
            writer = self._writers[record.writer]
            try:
                route = writer.tunnel.open_locked(first_payload, self._watch(writer.writer, on_closed))
            except ChannelFullError as error:
                full = error
                continue
            except TunnelClosedError:
                continue  # its end is on its way
            self._core.taken(target, writer.writer)
            self.feed(Bound(writer.writer))
            return route
        if full is not None:
            raise full
        return None

    def _work(self, writer: WriterId) -> int:
        tunnel = self._writers[writer].tunnel
        return tunnel.routes + tunnel.writer.waiting_items

    def _watch(self, writer: WriterId, on_closed: OnClosed | None) -> OnClosed:
        def closed_here(route: Route, closed: Closed) -> None:
            self.feed(Unbound(writer))
            if on_closed is not None:
                on_closed(route, closed)

        return closed_here

    async def _hold(self, target: Target, wait_s: float) -> None:
        news = self._news
        self._held += 1
        try:
            self.feed(Wanted(target))
            async with asyncio.timeout(wait_s):
                await news.wait()
        except TimeoutError:
            return
        finally:
            self._held -= 1

    def _control(self, tunnel: Tunnel, payload: bytes) -> None:
        if self._hooks.on_control is not None and tunnel.tunnel_id in self._by_tunnel:
            self._hooks.on_control(tunnel, payload)

    def _lost(self, tunnel: Tunnel, closed: Closed) -> None:
        writer = self._by_tunnel.pop(tunnel.tunnel_id, None)
        if writer is None:
            return  # never published
        del self._writers[writer.writer]
        why, superseded = self._core.parting(writer.writer)
        self.feed(Ended(writer.writer, _end_of(closed)))
        if self._hooks.on_writer_lost is not None:
            call_user(self._registry.counters, self._hooks.on_writer_lost, writer, Loss(closed, why, superseded))

    def _set_timer(self, wake_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.001, wake_at - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for writer in tuple(self._writers.values()):
            reasons = frozenset(reason.value for reason in writer.tunnel.health.reasons)
            if reasons != self._core.degraded(writer.writer):
                self.feed(HealthChanged(writer.writer, reasons))
        self.feed(Tick())

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task


def _end_of(closed: Closed) -> End:
    if not closed.by_peer:
        return End.CLOSED if closed.reason in EXPECTED_ENDS else End.LOST
    if closed.reason is CloseReason.IDLE:
        return End.IDLE
    return End.LEAVING if closed.reason in _LEAVING else End.LOST
