"""The receiving half of a tunnel: the one task that reads, checks and dispatches, and never waits for a consumer.

Per frame: decode and check the whole of it, demand the next sequence number, then per item one look-up by conn_id and
one bounded put. Anything wrong with the frame raises before a single item is delivered. An item for a conn_id without
a route is dropped and counted: ``channel_closed`` if the route was closed here lately (the peer has been told), else
``no_route``, answered with one close. Which were closed or answered lately is remembered in a bounded map.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from .carrier import Carrier
from .channel import Put
from .config import TunnelConfig
from .counters import Counters
from .errors import Closed, CloseReason, FrameKind
from .frames import CONTROL, Frame, Verify, decode, decode_close, decode_u64, encode_close, verify_checksum
from .health import Health
from .registry import TunnelEntry
from .route import Route
from .sequence import ReceiveSequence
from .writer import Writer

# A member looked up by name costs as much as the put itself.
_STORED, _MERGED = Put.STORED, Put.MERGED
_DATA, _ACK, _CLOSE, _PING = FrameKind.DATA, FrameKind.ACK, FrameKind.CLOSE, FrameKind.PING


class Tombstones:
    """The conn_ids that ended most lately; whether an item for one of them still needs an answer."""

    __slots__ = ("_ended", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ended: OrderedDict[int, CloseReason] = OrderedDict()

    def add(self, conn_id: int, reason: CloseReason) -> None:
        """Remember one, forgetting the oldest past the limit."""
        self._ended[conn_id] = reason
        while len(self._ended) > self.limit:
            self._ended.popitem(last=False)

    def get(self, conn_id: int) -> CloseReason | None:
        """NO_ROUTE or CHANNEL_CLOSED if remembered."""
        return self._ended.get(conn_id)


class Dispatch(Protocol):
    """What the reader asks of its tunnel. All of it returns at once."""

    def now(self) -> float: ...

    def accept(self, conn_id: int, payload: bytes) -> bool:
        """Open a route for an item on a conn_id not seen before; false if this end takes none."""
        ...

    def control(self, payload: bytes) -> None: ...

    def end_route(self, route: Route, closed: Closed) -> None: ...

    def schedule_ack(self, at_once: bool) -> None: ...


class Reader:
    """Owned by a tunnel."""

    def __init__(
        self,
        carrier: Carrier,
        config: TunnelConfig,
        counters: Counters,
        health: Health,
        entry: TunnelEntry,
        writer: Writer,
        dispatch: Dispatch,
        verify: Verify = verify_checksum,
    ) -> None:
        self._carrier = carrier
        self._config = config
        self._counters = counters
        self._health = health
        self._entry = entry
        self._writer = writer
        self._dispatch = dispatch
        self._verify = verify
        self.sequence = ReceiveSequence(config.ack_every)
        self.tombstones = Tombstones(config.tombstones)
        self.on_first_frame: Callable[[], None] | None = None

    def reconfigure(self, config: TunnelConfig) -> None:
        """Other bounds from here on."""
        self._config = config
        self.sequence.ack_every = config.ack_every
        self.tombstones.limit = config.tombstones

    async def run(self) -> Closed:
        """Read until the peer ends the tunnel; how it did. Raises what the codec and the carrier raise."""
        read, counters = self._carrier.read, self._counters
        while True:
            data = await read()
            config = self._config
            if data is None:
                return Closed(CloseReason.PEER_LOST, "the stream ended without a close")
            frame = decode(data, config.max_frame_bytes, config.max_items, self._verify)
            self.sequence.accept(frame.seq)
            now = self._dispatch.now()
            self._entry.last_activity = now
            counters.frames_received += 1
            counters.bytes_received += len(data)
            if self.on_first_frame is not None:
                self.on_first_frame()
                self.on_first_frame = None
            if frame.kind is _DATA:
                self._on_data(frame, now)
            elif frame.kind is _ACK:
                self._writer.on_ack(decode_u64(frame.items[0][1]))
            elif frame.kind is _CLOSE:
                end = self._on_close(frame)
                if end is not None:
                    return end
            elif frame.kind is _PING:
                self._writer.pong(frame.items[0][1])
            else:
                self._health.pong(frame.items[0][1], now)

    def _on_data(self, frame: Frame, now: float) -> None:
        lookup = self._entry.routes.get
        self._counters.items_received += len(frame.items)
        for conn_id, payload in frame.items:
            route = lookup(conn_id)
            if route is not None:
                put = route.deliver(payload, now)
                if put is not _STORED and put is not _MERGED:
                    closed = Closed(CloseReason.RESOURCE_EXHAUSTED, f"inbound channel: {put.name.lower()}")
                    self._dispatch.end_route(route, closed)
            elif conn_id == CONTROL:
                self._dispatch.control(payload)
            else:
                self._on_unbound(conn_id, payload)
        self._dispatch.schedule_ack(self.sequence.needs_ack())

    def _on_unbound(self, conn_id: int, payload: bytes) -> None:
        ended = self.tombstones.get(conn_id)
        if ended is CloseReason.CHANNEL_CLOSED:
            self._counters.channel_closed += 1
        elif ended is not None:
            self._counters.no_route += 1
        elif not self._dispatch.accept(conn_id, payload):
            self._counters.no_route += 1
            self.refuse(conn_id, CloseReason.NO_ROUTE, "no such route here")

    def refuse(self, conn_id: int, reason: CloseReason, detail: str) -> None:
        """Answer an item that has no route with one close, unless too many such answers wait already."""
        if self._writer.waiting_closes >= self._config.tombstones + len(self._entry.routes):
            self._counters.answers_suppressed += 1
            return
        self.tombstones.add(conn_id, CloseReason.NO_ROUTE)
        self._writer.send_close(conn_id, encode_close(reason, detail))

    def _on_close(self, frame: Frame) -> Closed | None:
        for conn_id, payload in frame.items:
            closed = decode_close(payload)
            if conn_id == CONTROL:
                return closed
            route = self._entry.routes.get(conn_id)
            if route is not None:
                self._dispatch.end_route(route, closed)
        self._dispatch.schedule_ack(self.sequence.needs_ack())
        return None
