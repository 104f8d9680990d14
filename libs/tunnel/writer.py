"""The sending half of a tunnel: a bounded command channel and the one task that writes.

Whoever has something to send puts it into the command channel without waiting; the writer takes everything that waits
and puts it into one frame, so the more there is to send, the fewer frames it costs. Data and close frames respect the
unacknowledged window; acknowledgements, pings and pongs pass it, or two full windows would wait for each other.

A route that must not be refused (``Route.post``) and finds the command channel full leaves its payloads in its own
bounded, merging channel; the writer drains these routes, one payload each in turn, once the command channel is empty.

A close follows everything its route has sent before it. It may pass data of other routes.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .carrier import Carrier
from .channel import Channel
from .config import TunnelConfig
from .counters import Counters
from .errors import ChannelFullError, Closed, FrameKind, PayloadTooLargeError, TunnelClosedError
from .frames import CONTROL, FRAME_OVERHEAD, ITEM_OVERHEAD, Item, encode, encode_close, encode_u64, payload_limit
from .health import Degraded, Health
from .sequence import SendWindow

_MAX_PONGS = 8
# A member looked up by name costs as much as an item.
_DATA, _CLOSE = FrameKind.DATA, FrameKind.CLOSE


class Backlogged(Protocol):
    """A route with payloads that found the command channel full."""

    conn_id: int
    outbound: Channel


class Sent:
    """Follows one payload: ``seq`` is the number of the frame that carried it, 0 while it still waits."""

    __slots__ = ("seq",)

    def __init__(self) -> None:
        self.seq = 0


class Writer:
    """Owned by a tunnel; everything but ``run`` is non-blocking and called from the same event loop."""

    def __init__(
        self, carrier: Carrier, config: TunnelConfig, counters: Counters, health: Health, clock: Callable[[], float]
    ) -> None:
        self._carrier = carrier
        self._config = config
        self._largest = payload_limit(config.max_frame_bytes)
        self._counters = counters
        self._health = health
        self._clock = clock
        # What `run` waits on while there is nothing to send; None while it is at work.
        self._idle: asyncio.Future[None] | None = None
        self._space = asyncio.Event()
        self._space.set()
        self._data: deque[Item] = deque()
        self._data_bytes = 0
        # Positions in the command channel's history: a close may go once everything before it was taken.
        self._queued = 0
        self._taken = 0
        # Of those that are followed, each with its position.
        self._followed: deque[tuple[int, Sent]] = deque()
        self._closes: deque[tuple[int, int, bytes]] = deque()
        self._backlog: dict[Backlogged, None] = {}
        self._pongs: deque[bytes] = deque()
        self._ping: bytes | None = None
        self._ack: Callable[[], int] | None = None
        self._ending: Closed | None = None
        self._flush = False
        self._say = False
        self.window = SendWindow(config.window_frames, config.window_bytes)
        # When the send in progress began; None between sends.
        self.write_started: float | None = None

    def reconfigure(self, config: TunnelConfig) -> None:
        """Other bounds from here on; what waits already stays."""
        self._config = config
        self._largest = payload_limit(config.max_frame_bytes)
        self.window.resize(config.window_frames, config.window_bytes)
        self._wake()

    @property
    def waiting_items(self) -> int:
        """Payloads in the command channel: outstanding work, for selection."""
        return len(self._data)

    @property
    def waiting_bytes(self) -> int:
        """Their bytes."""
        return self._data_bytes

    def delivered(self, sent: Sent) -> bool:
        """Whether the peer has acknowledged the frame that carried this payload."""
        return 0 < sent.seq <= self.window.acked

    def try_send(self, conn_id: int, payload: bytes, sent: Sent | None = None) -> None:
        """Put one payload into the command channel.

        Raises ChannelFullError, PayloadTooLargeError or TunnelClosedError; then nothing of it was taken.
        """
        config, data, size = self._config, self._data, len(payload)
        if size > self._largest:
            raise PayloadTooLargeError(size, self._largest)
        if self._ending is not None:
            raise TunnelClosedError(self._ending)
        if self._backlog or len(data) >= config.command_items or self._data_bytes + size > config.command_bytes:
            self._counters.channel_full += 1
            self._space.clear()
            if self._health.mark(Degraded.CHANNEL_FULL):
                self._counters.degraded[Degraded.CHANNEL_FULL] += 1
            raise ChannelFullError(len(data), self._data_bytes)
        # As `_append`, which costs a call: this is once per payload.
        data.append((conn_id, payload))
        self._data_bytes += size
        self._queued += 1
        if sent is not None:
            self._followed.append((self._queued, sent))
        if self._idle is not None:
            self._wake()

    async def wait_space(self) -> None:
        """Wait until half of the command channel is free, or the tunnel ends; the caller sets the deadline.

        Half, so that who sends faster than the tunnel carries waits once in a while and not for each payload.
        """
        await self._space.wait()

    def add_backlog(self, route: Backlogged) -> None:
        """Drain this route's outbound channel when there is room."""
        self._backlog[route] = None
        self._wake()

    def send_close(self, conn_id: int, payload: bytes, route: Backlogged | None = None) -> None:
        """Close a route behind everything it has sent. Bounded by the caller: one close per route or tombstone.

        The backlog of ``route`` is moved in front of the close.
        """
        if self._ending is not None:
            return
        if route is not None and route in self._backlog:
            del self._backlog[route]
            for waiting in route.outbound.take_all():
                self._append(conn_id, waiting)
        self._closes.append((self._queued, conn_id, payload))
        self._wake()

    def drop_backlog(self, route: Backlogged) -> None:
        """The route ends without what still waits."""
        self._backlog.pop(route, None)

    @property
    def waiting_closes(self) -> int:
        """Closes not yet sent."""
        return len(self._closes)

    def ack(self, take: Callable[[], int]) -> None:
        """Acknowledge with the next frame; ``take`` yields the number at that time."""
        self._ack = take
        self._wake()

    def on_ack(self, seq: int) -> None:
        """The peer has seen everything up to ``seq``. Raises ProtocolError."""
        self.window.on_ack(seq)
        self._wake()

    def ping(self, nonce: bytes) -> None:
        """Send a ping with the next frame."""
        self._ping = nonce
        self._wake()

    def pong(self, nonce: bytes) -> None:
        """Answer a ping. A peer that pings faster than it is answered loses the oldest answers."""
        if len(self._pongs) >= _MAX_PONGS:
            self._pongs.popleft()
        self._pongs.append(nonce)
        self._wake()

    def end(self, closed: Closed, *, flush: bool, say: bool) -> None:
        """Take nothing more; send what waits if ``flush``, close the tunnel at the peer if ``say``, and finish."""
        if self._ending is None:
            self._ending = closed
            self._flush = flush
            self._say = say
            self._space.set()
            self._wake()

    async def run(self) -> None:
        """Write until ended. Raises CarrierLostError."""
        while True:
            batch = self._next()
            if batch is not None:
                await self._write(*batch)
            elif self._ending is not None and not (self._flush and (self._data or self._closes or self._backlog)):
                if self._say:
                    goodbye = encode_close(self._ending.reason, self._ending.detail)
                    await self._write(_CLOSE, [(CONTROL, goodbye)])
                await self._carrier.finish()
                return
            else:
                # A plain future: an event's wait costs more than the rest of the turn.
                self._idle = asyncio.get_running_loop().create_future()
                try:
                    await self._idle
                finally:
                    self._idle = None

    async def _write(self, kind: FrameKind, items: list[Item]) -> None:
        window = self.window
        seq = window.take()
        data = encode(kind, seq, items)
        if kind is _DATA or kind is _CLOSE:
            window.hold(seq, len(data))
        self.write_started = self._clock()
        await self._carrier.write(data)
        self.write_started = None
        counters = self._counters
        counters.frames_sent += 1
        counters.items_sent += len(items)
        counters.bytes_sent += len(data)

    def _next(self) -> tuple[FrameKind, list[Item]] | None:
        if self._pongs:
            return FrameKind.PONG, [(CONTROL, self._pongs.popleft())]
        if self._ping is not None:
            nonce, self._ping = self._ping, None
            return FrameKind.PING, [(CONTROL, nonce)]
        if self._ack is not None:
            take, self._ack = self._ack, None
            return FrameKind.ACK, [(CONTROL, encode_u64(take()))]
        if (self._ending is not None and not self._flush) or not self.window.has_room():
            return None
        if self._closes and self._closes[0][0] <= self._taken:
            return _CLOSE, self._take_closes()
        if self._data or self._backlog:
            return _DATA, self._take_data()
        return None

    def _take_closes(self) -> list[Item]:
        items: list[Item] = []
        room = self._config.max_frame_bytes - FRAME_OVERHEAD
        closes = self._closes
        while closes and closes[0][0] <= self._taken and len(items) < self._config.max_items:
            room -= len(closes[0][2]) + ITEM_OVERHEAD
            if room < 0:
                break
            _, conn_id, payload = closes.popleft()
            items.append((conn_id, payload))
        return items

    def _take_data(self) -> list[Item]:
        room = self._config.max_frame_bytes - FRAME_OVERHEAD
        max_items = self._config.max_items
        data, whole = self._data, self._data_bytes + len(self._data) * ITEM_OVERHEAD
        if whole <= room and len(data) <= max_items:
            items = list(data)
            data.clear()
            self._data_bytes = 0
            room -= whole
        else:
            items = []
            taken = 0
            while data and len(items) < max_items:
                size = len(data[0][1])
                room -= size + ITEM_OVERHEAD
                if room < 0:
                    break
                taken += size
                items.append(data.popleft())
            self._data_bytes -= taken
        self._taken += len(items)
        followed = self._followed
        while followed and followed[0][0] <= self._taken:
            # The frame's number is taken right after; nothing runs in between.
            followed.popleft()[1].seq = self.window.last_sent + 1
        if not data:
            self._take_backlog(items, room)
        if not self._space.is_set() and not self._backlog and self._half_empty():
            self._space.set()
        return items

    def _take_backlog(self, items: list[Item], room: int) -> None:
        backlog = self._backlog
        while backlog and len(items) < self._config.max_items:
            route = next(iter(backlog))
            room -= route.outbound.peek_size() + ITEM_OVERHEAD
            if room < 0:
                return
            items.append((route.conn_id, route.outbound.take()))
            # Back to the end of the line, if anything is left.
            del backlog[route]
            if len(route.outbound):
                backlog[route] = None

    def _half_empty(self) -> bool:
        config = self._config
        return len(self._data) <= config.command_items // 2 and self._data_bytes <= config.command_bytes // 2

    def _wake(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None and not idle.done():
            idle.set_result(None)

    def _append(self, conn_id: int, payload: bytes) -> None:
        self._data.append((conn_id, payload))
        self._data_bytes += len(payload)
        self._queued += 1
        self._wake()
