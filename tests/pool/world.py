"""A world for the pool's core under logical time: endpoints that come and go, tunnels, routes in a real registry.

Everything the core asks for is obeyed here; what takes time in life takes logical time. The registry, routes and
channels are the real ones of libs.tunnel, so bindings, permits and closes are counted by those who own them.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from libs.pool.contours import Contour
from libs.pool.core import PoolCore
from libs.pool.effects import Ready
from libs.pool.events import (
    Bound,
    CommitGeneration,
    Connected,
    DialAbandoned,
    DialFailed,
    End,
    Ended,
    MapRead,
    PoolEvent,
    ProbeEnded,
    Tick,
    Unbound,
)
from libs.pool.inventory import WriterRecord
from libs.pool.knobs import PoolPolicy
from libs.pool.model import Endpoint, EndpointKey, Target, WriterId
from libs.tunnel import ChannelLimits, Closed, CloseReason, Registry, Route, TunnelEntry
from libs.tunnel.channel import Put

LOST = Closed(CloseReason.PEER_LOST)
LIMITS = ChannelLimits(max_items=8, max_bytes=32, high_items=6, high_bytes=16, congested_s=2.0)


def endpoint(index: int, *cells: str, host: str = "127.0.0.1", incarnation: int = 1) -> Endpoint:
    """A worker's address."""
    return Endpoint(f"w{index}", f"{host}:{7000 + index}", cells or ("A",), incarnation)


def record(writer: int, of: Endpoint | None = None, contour: Contour = Contour.ACTIVE, **more: object) -> WriterRecord:
    """A writer as an inventory would have it."""
    found = WriterRecord(writer, of or endpoint(0), 1, 0.0, 1)
    found.contour = contour
    for name, value in more.items():
        setattr(found, name, value)
    return found


def merge(first: bytes, second: bytes) -> bytes | None:
    """Payloads are runs of one-byte tokens: joined, order and content kept."""
    return first + second


@dataclass(eq=False)
class FakeTunnel:
    """What a route asks of its tunnel, and what the registry keeps of it."""

    world: "World"
    writer_id: WriterId
    entry: TunnelEntry
    endpoint: Endpoint
    orderly: bool = False

    @property
    def tunnel_id(self) -> int:
        return self.entry.tunnel_id

    def now(self) -> float:
        return self.world.now

    def end_route(self, route: Route, closed: Closed) -> None:
        self.world.registry.drop(self.entry, route, closed, closed.by_peer, self.world.now)


@dataclass(eq=False)
class Session:
    """One bound route and what its two ends think of it."""

    route: Route
    tunnel: FakeTunnel
    stopped: bool = False  # its consumer takes nothing any more
    sent: bytes = b""
    received: bytes = b""
    closes: list[Closed] = field(default_factory=list)


class World:
    """See the module. ``tick_s``: how seldom the core may look; an endpoint that is down refuses dials."""

    def __init__(self, policy: PoolPolicy | None = None, seed: int = 1, tick_s: float = 1.0) -> None:
        self.now = 1000.0
        self.core = PoolCore(policy or PoolPolicy(), Random(seed), self.now, tick_s)
        self.loop = asyncio.new_event_loop()
        self.registry = Registry()
        self.loop.run_until_complete(self.registry.__aenter__())
        self.latency_s = 0.01
        self.up: dict[EndpointKey, bool] = {}
        self.map: tuple[Endpoint, ...] = ()
        self.revision = 0
        self.tunnels: dict[WriterId, FakeTunnel] = {}
        self.dials: dict[WriterId, Endpoint] = {}
        self.sessions: list[Session] = []
        self.ready: list[Ready] = []
        self.warnings: Counter[str] = Counter()
        self.closed_writers: list[WriterId] = []
        self.watch: Callable[[PoolEvent, Callable[[], Ready]], Ready] = lambda _event, handle: handle()
        self.auto_commit = True
        self.cancel_s = 0.0  # how long a dial goes on after it was given up
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self._wake_at: float | None = None

    def close(self) -> None:
        """The registry's task ends."""
        self.loop.run_until_complete(self.registry.__aexit__(None, None, None))
        self.loop.close()

    # --- time ---

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do this then."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._serial), what))

    def run(self, seconds: float) -> None:
        """Let time pass: what is due happens, the core is woken when it asked to be."""
        end = self.now + seconds
        while True:
            moments = [at for at, _, _ in self._agenda[:1]] + ([self._wake_at] if self._wake_at is not None else [])
            soonest = min(moments, default=end)
            if soonest > end:
                break
            self.now = max(self.now, soonest)
            if self._agenda and self._agenda[0][0] <= self.now:
                heapq.heappop(self._agenda)[2]()
            else:
                self.feed(Tick())
        self.now = end
        self.settle()

    def settle(self) -> None:
        """The registry's cleanup worker has its turn."""
        while self.registry.snapshot().cleanups:
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))

    # --- the core ---

    def feed(self, event: PoolEvent) -> Ready:
        """Hands over an event and obeys what comes of it."""
        ready = self.watch(event, lambda: self.core.handle(event, self.now))
        self._obey(ready)
        return ready

    def _obey(self, ready: Ready) -> None:
        self.ready.append(ready)
        del self.ready[:-500]
        if ready.wake_at is not None:
            self._wake_at = ready.wake_at
        for warning in ready.warnings:
            self.warnings[warning.kind.value] += 1
        for close in ready.closes:
            self.closed_writers.append(close.writer)
            self.after(self.latency_s, lambda writer=close.writer: self.end(writer, End.CLOSED, CloseReason.RETIRED))
        for writer in ready.cancels:
            if writer in self.dials:
                self.after(self.cancel_s, lambda writer=writer: self.give_up(writer))
        for dial in ready.dials:
            self.dials[dial.writer] = dial.endpoint
            self.after(self.latency_s, lambda writer=dial.writer: self.finish_dial(writer))
        for probed in ready.probes:
            self.after(
                self.latency_s,
                lambda key=probed.key: self.feed(ProbeEnded(key, self.up.get(key, True))),
            )
        if ready.commit is not None and self.auto_commit:
            self.after(0.0, lambda key=ready.commit: self.feed(CommitGeneration(key)))

    # --- the outside ---

    def read(self, *endpoints: Endpoint) -> None:
        """The source of the map says this (and stays silent)."""
        self.map = endpoints
        self.revision += 1
        self.feed(MapRead(endpoints, self.revision))

    def finish_dial(self, writer: WriterId) -> None:
        """A dial comes to whatever it must."""
        found = self.dials.pop(writer, None)
        if found is None:
            return
        if not self.up.get(found.key, True):
            self.feed(DialFailed(writer))
            return
        entry = self.registry.new_entry(self.now)
        self.registry.attach(entry)
        self.tunnels[writer] = FakeTunnel(self, writer, entry, found)
        ready = self.feed(Connected(writer))
        if writer in ready.refused:
            self.registry.detach(self.tunnels.pop(writer).entry, LOST, self.now)

    def give_up(self, writer: WriterId) -> None:
        """A dial is cancelled."""
        if self.dials.pop(writer, None) is not None:
            self.feed(DialAbandoned(writer))

    def end(self, writer: WriterId, end: End = End.LOST, reason: CloseReason = CloseReason.PEER_LOST) -> None:
        """A tunnel is gone."""
        tunnel = self.tunnels.pop(writer, None)
        if tunnel is None:
            return
        self.registry.detach(tunnel.entry, Closed(reason), self.now)
        self.feed(Ended(writer, end))
        self.settle()

    def fail(self, key: EndpointKey, up: bool = False) -> None:
        """The endpoint is down: its tunnels break, dials are refused."""
        self.up[key] = up
        if not up:
            for writer in [w for w, tunnel in self.tunnels.items() if tunnel.endpoint.key == key]:
                self.end(writer)

    # --- routes ---

    def bind(self, target: Target) -> Session | None:
        """What the shell does under the binding lock."""
        found = self.core.candidates(target, lambda writer: len(self.tunnels[writer].entry.routes))
        if not found:
            return None
        writer = found[0].writer
        tunnel = self.tunnels[writer]
        permit = self.registry.lease()
        route = Route(self.registry.next_conn_id(), tunnel, LIMITS, merge, 4096, permit)  # type: ignore[arg-type]
        self.registry.bind(tunnel.entry, route)
        session = Session(route, tunnel)
        route.on_closed = lambda _route, closed: self._closed(session, closed)
        self.sessions.append(session)
        self.core.taken(target, writer)
        self.feed(Bound(writer))
        return session

    def _closed(self, session: Session, closed: Closed) -> None:
        session.closes.append(closed)
        self.feed(Unbound(session.tunnel.writer_id))

    def finish(self, session: Session, reason: CloseReason = CloseReason.DONE) -> None:
        """The request is over."""
        if session.route.closed is None:
            session.tunnel.end_route(session.route, Closed(reason, by_peer=True))
        self.settle()

    def deliver(self, tokens: Iterable[tuple[Session, bytes]]) -> None:
        """One frame of a tunnel's reader: an item for each route, none of them waited for."""
        for session, payload in tokens:
            if session.route.closed is not None:
                continue
            session.sent += payload
            put = session.route.deliver(payload, self.now)
            if put in (Put.OVERFLOW, Put.EXPIRED):
                session.tunnel.end_route(session.route, Closed(CloseReason.RESOURCE_EXHAUSTED))

    def consume(self, session: Session) -> None:
        """Its consumer takes what waits."""
        if not session.stopped:
            session.received += b"".join(session.route.inbound.take_all())

    # --- looking ---

    @property
    def records(self) -> list[WriterRecord]:
        return list(self.core.books.inventory)

    def contours(self) -> Counter[Contour]:
        return Counter(record.contour for record in self.records if record.live)

    def active(self, key: EndpointKey | None = None) -> list[WriterRecord]:
        return [record for record in self.records if record.active and key in (None, record.key)]

    def assert_rest(self) -> None:
        """Nothing is held."""
        self.settle()
        held = self.registry.snapshot()
        assert (held.routes, held.bindings, held.permits, held.cleanups) == (0, 0, 0, 0)
        assert self.core.books.inventory.bound() == 0
