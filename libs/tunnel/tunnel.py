"""A tunnel: one live stream to one peer, carrying the traffic of many short-lived routes. The same class at either
end.

Three tasks, owned by ``run``: the reader, the writer, and the keeper (pings, stalls, congestion that lasts). The
first of them to find the end records it; then what is owed is said (one close frame, with a deadline), the stream is
given up and every route bound here ends, each exactly once. Cancelling ``run`` does the same at once and says
nothing.

The dialing end opens routes; the accepting end takes an item on a conn_id above every one seen before as a new route.
"""

import asyncio
import enum
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from .carrier import Carrier
from .channel import Merge, never_merge
from .config import TunnelConfig
from .errors import (
    EXPECTED_ENDS,
    CarrierLostError,
    Closed,
    CloseReason,
    CorruptFrameError,
    ProtocolError,
    TooManyRoutesError,
    TunnelClosedError,
)
from .frames import CONTROL, Verify, encode_close, encode_u64, payload_limit, verify_checksum
from .health import Health
from .reader import Reader
from .registry import Registry, TunnelEntry, call_user
from .route import OnClosed, Route
from .writer import Writer


class Side(enum.Enum):
    """Which end this is: only the dialing end allocates conn_ids."""

    DIALING = "dialing"
    ACCEPTING = "accepting"


def _hear_all(rung: list[Route]) -> None:
    """From the last to the first; what is left when a listener fails ends with its route."""
    while rung:
        rung[-1].hear()
        rung.pop()


def _ignore_control(_tunnel: "Tunnel", _payload: bytes) -> None:
    """For ends that have no control messages."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What is particular to the tunnel's user. All are called on the event loop and must return at once.

    ``accept`` gets each new route with its first payload (accepting side; None refuses all). ``on_control`` gets data
    for conn_id 0. ``on_route_dropped`` is told of routes dropped here for congestion, before their ``on_closed``.
    ``on_tunnel_lost`` is told once how the tunnel ended, whatever the end.
    """

    merge: Merge = never_merge
    accept: Callable[[Route, bytes], None] | None = None
    on_control: Callable[["Tunnel", bytes], None] = _ignore_control
    on_route_dropped: Callable[[int, CloseReason], None] | None = None
    on_tunnel_lost: Callable[["Tunnel", Closed], None] | None = None


class Tunnel:
    """See the module. ``verify`` and ``clock`` (monotonic seconds) are injectable for tests."""

    def __init__(
        self,
        carrier: Carrier,
        registry: Registry,
        side: Side,
        handlers: Handlers,
        config: TunnelConfig | None = None,
        *,
        verify: Verify = verify_checksum,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config if config is not None else TunnelConfig()
        self.side = side
        self.health = Health(self.config.health)
        self.now = clock
        self._carrier = carrier
        self._registry = registry
        self._handlers = handlers
        self._counters = registry.counters
        self._random = random.Random()  # noqa: S311 - jitter and nonces, not secrets
        self.entry: TunnelEntry = registry.new_entry(clock())
        self.writer = Writer(carrier, self.config, self._counters, self.health, clock)
        self._reader = Reader(carrier, self.config, self._counters, self.health, self.entry, self.writer, self, verify)
        self._highest = 0
        self._closed: Closed | None = None
        self._running = False
        self._stop = asyncio.Event()
        self._up = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._rung: list[Route] = []

    @property
    def tunnel_id(self) -> int:
        """Unique in this process, never reused."""
        return self.entry.tunnel_id

    @property
    def peer(self) -> str:
        """The other end's address, for people."""
        return self._carrier.peer

    @property
    def closed(self) -> Closed | None:
        """How the tunnel ended, or None while it lives."""
        return self._closed

    @property
    def routes(self) -> int:
        """Open routes."""
        return len(self.entry.routes)

    async def ready(self, timeout_s: float) -> None:
        """Wait for the first frame of the peer, the pong to our first ping: connected, and somebody reads.

        Raises TimeoutError or TunnelClosedError. ``run`` must be running in another task.
        """
        async with asyncio.timeout(timeout_s):
            await self._up.wait()
        if self._closed is not None:
            raise TunnelClosedError(self._closed)

    async def open(self, first_payload: bytes, on_closed: OnClosed | None = None) -> Route:
        """Dialing side: bind a new route to this tunnel and send its first payload.

        Suspends only while someone else holds the binding lock. Raises ChannelFullError, PayloadTooLargeError,
        TooManyRoutesError or TunnelClosedError; then nothing was bound.
        """
        async with self._registry.binding_lock:
            return self.open_locked(first_payload, on_closed)

    def open_locked(self, first_payload: bytes, on_closed: OnClosed | None = None) -> Route:
        """``open`` for a caller that holds the registry's binding lock."""
        if self.side is not Side.DIALING:
            raise RuntimeError("only the dialing side opens routes")
        if self._closed is not None or not self._running:
            raise TunnelClosedError(self._closed or Closed(CloseReason.PEER_LOST, "the tunnel is not running"))
        route = self._new_route(self._registry.next_conn_id())
        try:
            route.send_first(first_payload)
            self._registry.bind(self.entry, route)
        except BaseException:
            route.permit.release()
            raise
        route.on_closed = on_closed
        return route

    def try_control(self, payload: bytes) -> None:
        """Send a control message (conn_id 0). Raises ChannelFullError, PayloadTooLargeError, TunnelClosedError."""
        self.writer.try_send(CONTROL, payload)

    def close(self, reason: CloseReason = CloseReason.SHUTDOWN, detail: str = "") -> None:
        """End the tunnel in order: what was accepted for sending goes out first. Idempotent; ``run`` returns."""
        self._end(Closed(reason, detail))

    def reconfigure(self, config: TunnelConfig) -> None:
        """Other timings and bounds from here on; routes that are open keep the bounds of their channels.

        Raises ValueError for other frame limits: those hold for both ends.
        """
        before = self.config
        if (config.max_frame_bytes, config.max_items) != (before.max_frame_bytes, before.max_items):
            raise ValueError(
                f"frame limits of a live tunnel stay {before.max_frame_bytes} bytes and {before.max_items} items:"
                f" not {config.max_frame_bytes} and {config.max_items}; they apply to new tunnels"
            )
        self.config = config
        self.health.reconfigure(config.health)
        self.writer.reconfigure(config)
        self._reader.reconfigure(config)

    async def run(self) -> Closed:
        """Live until the end; how it ended. Call once."""
        if self._running or self._closed is not None:
            raise RuntimeError("a tunnel runs once")
        self._running = True
        self._registry.attach(self.entry)
        self._counters.tunnels_opened += 1
        try:
            async with asyncio.TaskGroup() as group:
                name = f"tunnel-{self.tunnel_id}"
                reader = group.create_task(self._read(), name=f"{name}-reader")
                writer = group.create_task(self._write(), name=f"{name}-writer")
                keeper = group.create_task(self._keep(), name=f"{name}-keeper")
                await self._stop.wait()
                await self._part(reader, writer)
                for task in (reader, writer, keeper):
                    task.cancel()
        finally:
            closed = self._finish()
        return closed

    # What the reader and the routes ask of their tunnel.

    def accept(self, conn_id: int, payload: bytes) -> bool:
        """An item for a conn_id without a route: a new route, if this end takes it."""
        handler = self._handlers.accept
        if handler is None or self.side is not Side.ACCEPTING or conn_id <= self._highest or self._closed is not None:
            return False
        self._highest = conn_id
        try:
            route = self._new_route(conn_id)
        except TooManyRoutesError as error:
            self._reader.refuse(conn_id, CloseReason.RESOURCE_EXHAUSTED, str(error))
            return True
        self._registry.bind(self.entry, route)
        if not call_user(self._counters, handler, route, payload):
            self.end_route(route, Closed(CloseReason.CANCELLED, "the accept handler failed"))
        return True

    def control(self, payload: bytes) -> None:
        """Data for conn_id 0."""
        call_user(self._counters, self._handlers.on_control, self, payload)

    def end_route(self, route: Route, closed: Closed) -> None:
        """End one route for whatever reason, telling the peer unless it told us; idempotent."""
        if route.closed is not None:
            return
        if closed.by_peer or closed.reason is not CloseReason.DONE:
            self.writer.drop_backlog(route)
        if not closed.by_peer:
            self.writer.send_close(route.conn_id, encode_close(closed.reason, closed.detail), route)
        self._reader.tombstones.add(route.conn_id, CloseReason.CHANNEL_CLOSED)
        self._registry.drop(self.entry, route, closed, closed.by_peer, self.now())
        dropped = self._handlers.on_route_dropped
        if closed.reason is CloseReason.RESOURCE_EXHAUSTED and not closed.by_peer and dropped is not None:
            call_user(self._counters, dropped, route.conn_id, closed.reason)

    def ring(self, route: Route) -> None:
        """The route's listener has something to hear: in the next turn, with all others that rang."""
        self._rung.append(route)
        if len(self._rung) == 1:
            asyncio.get_running_loop().call_soon(self._answer)

    def schedule_ack(self, at_once: bool) -> None:
        """A data or close frame came in: acknowledge now, or within the delay."""
        if at_once:
            self.writer.ack(self._reader.sequence.take_ack)
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(self.config.ack_delay_s, self._ack_late)

    # The tunnel's own.

    def _answer(self) -> None:
        rung, self._rung = self._rung, []
        rung.reverse()
        while not call_user(self._counters, _hear_all, rung):
            failed = rung.pop()
            failed.hush()
            self.end_route(failed, Closed(CloseReason.CANCELLED, "the listener failed"))

    def _ack_late(self) -> None:
        self._ack_timer = None
        if self._reader.sequence.unacked:
            self.writer.ack(self._reader.sequence.take_ack)

    def _new_route(self, conn_id: int) -> Route:
        permit = self._registry.lease()
        limit = payload_limit(self.config.max_frame_bytes)
        return Route(conn_id, self, self.config.route, self._handlers.merge, limit, permit)

    def _end(self, closed: Closed) -> None:
        if self._closed is not None:
            return
        self._closed = closed
        # From here on nothing is taken for sending; the peer is told unless it knows, or is gone.
        say = not closed.by_peer and closed.reason is not CloseReason.PEER_LOST
        self.writer.end(closed, flush=say and closed.reason in EXPECTED_ENDS, say=say)
        self._stop.set()
        self._up.set()

    async def _read(self) -> None:
        self._reader.on_first_frame = self._up.set
        try:
            self._end(await self._reader.run())
        except CorruptFrameError as error:
            self._counters.corrupt[error.reason] += 1
            self._end(Closed(CloseReason.CORRUPT, str(error)))
        except ProtocolError as error:
            self._end(Closed(CloseReason.PROTOCOL, str(error)))
        except CarrierLostError as error:
            self._end(Closed(CloseReason.PEER_LOST, str(error)))

    async def _write(self) -> None:
        try:
            await self.writer.run()
        except CarrierLostError as error:
            # A peer that closed in order takes nothing more, and why may still be on its way to the reader.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.goodbye_s):
                    await self._stop.wait()
            self._end(Closed(CloseReason.PEER_LOST, str(error)))

    async def _keep(self) -> None:
        now = next_ping = self.now()
        while True:
            config, limits = self.config, self.config.health
            tick = max(
                0.01,
                min(
                    limits.stall_s / 2,
                    limits.pong_timeout_s / 4,
                    config.route.congested_s / 2,
                    config.ping_interval_s / 4,
                ),
            )
            next_ping = min(next_ping, now + config.ping_interval_s + config.ping_jitter_s)
            before = set(self.health.reasons)
            if not self.health.check(now, self.writer.write_started):
                self._end(Closed(CloseReason.PEER_LOST, f"no pong within {limits.pong_timeout_s} s"))
                return
            for reason in self.health.reasons - before:
                self._counters.degraded[reason] += 1
            self._sweep(now)
            if now >= next_ping and not self.health.awaiting_pong:
                nonce = encode_u64(self._random.getrandbits(64))
                self.health.ping_sent(nonce, now)
                self.writer.ping(nonce)
                jitter = self._random.uniform(-config.ping_jitter_s, config.ping_jitter_s)
                next_ping = now + config.ping_interval_s + jitter
            await asyncio.sleep(tick)
            woke = self.now()
            if woke - now > 2 * tick:
                self.health.forgive(woke - now - tick)
            now = woke

    def _sweep(self, now: float) -> None:
        """Drop the routes that stayed congested although nothing more came for them."""
        late = [r for r in self.entry.routes.values() if r.inbound.expired(now) or r.outbound.expired(now)]
        for route in late:
            side = "inbound" if route.inbound.expired(now) else "outbound"
            self.end_route(route, Closed(CloseReason.RESOURCE_EXHAUSTED, f"{side} channel: congested for too long"))

    async def _part(self, reader: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
        """Wait until the goodbye is written and, where giving up could overtake it, the peer has ended too."""
        closed = self._closed
        assert closed is not None
        if closed.reason is CloseReason.PEER_LOST and not closed.by_peer:
            return
        try:
            async with asyncio.timeout(self.config.goodbye_s):
                await asyncio.wait({writer})
                if not self._carrier.cancel_overtakes:
                    return
                await asyncio.wait({reader})
                while await self._carrier.read() is not None:
                    pass
        except (TimeoutError, CarrierLostError):
            return

    def _finish(self) -> Closed:
        if self._closed is None:
            reason = CloseReason.PEER_LOST if self._carrier.lost() else CloseReason.SHUTDOWN
            self._end(Closed(reason, "the tunnel's task was cancelled"))
        closed = self._closed
        assert closed is not None
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        self._carrier.cancel()
        self._registry.detach(self.entry, closed, self.now())
        self._counters.tunnels_closed[closed.reason.label] += 1
        if self._handlers.on_tunnel_lost is not None:
            call_user(self._counters, self._handlers.on_tunnel_lost, self, closed)
        return closed
