"""A route: one exchange on a tunnel, the same object at either end.

Inbound payloads wait in a bounded, merging channel for one consumer: a task that waits (``receive``, or ``async for``),
or a listener that is called (``listen``), which costs a fraction where many routes get little each. Outbound there are
three ways, by what a full command channel should mean: ``try_send`` refuses (an offer goes to the next
candidate), ``send`` waits with a deadline, ``post`` never refuses and never waits (a worker's deltas): it keeps and
merges payloads within the route's own bounds, past which the route alone is dropped with RESOURCE_EXHAUSTED.

A route ends once, for one reason: closed here, closed by the peer, dropped for congestion, or lost with its tunnel.
What was received before a close by the peer or a loss can still be consumed; then ``receive`` raises
RouteClosedError. ``async for`` ends quietly after DONE only, so a cut stream never looks like a finished one.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from .channel import Channel, Merge, Put
from .config import ChannelLimits
from .errors import ChannelFullError, Closed, CloseReason, RouteClosedError, TunnelClosedError
from .writer import Sent, Writer

OnClosed = Callable[["Route", Closed], None]
# Given what has come, oldest first; nothing once the route has ended and all of it was given.
Listener = Callable[[list[bytes]], None]


class Owner(Protocol):
    """What a route asks of its tunnel."""

    @property
    def tunnel_id(self) -> int: ...

    @property
    def writer(self) -> Writer: ...

    def now(self) -> float: ...

    def end_route(self, route: "Route", closed: Closed) -> None: ...

    def ring(self, route: "Route") -> None:
        """Call ``route.hear`` in the loop's next turn, with all others that rang."""
        ...


class Permit:
    """One unit of cleanup capacity, held from the lease of a route until its cleanup is done."""

    __slots__ = ("_release",)

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Give the unit back; idempotent."""
        if self._release is not None:
            release, self._release = self._release, None
            release()


class Route:
    """See the module. Created by ``Tunnel.open`` or handed to the accept handler; one consumer, many senders."""

    __slots__ = (
        "_first", "_listener", "_owner", "_rung", "_waiter", "closed", "conn_id", "inbound", "on_closed", "outbound",
        "permit",
    )  # fmt: skip

    def __init__(
        self, conn_id: int, owner: Owner, limits: ChannelLimits, merge: Merge, max_payload: int, permit: Permit
    ) -> None:
        self.conn_id = conn_id
        self._owner = owner
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Listener | None = None
        # The listener's turn is on its way.
        self._rung = False
        self._first = Sent()
        self.inbound = Channel(limits, merge, max_payload)
        self.outbound = Channel(limits, merge, max_payload)
        self.permit = permit
        # How it ended; None while open.
        self.closed: Closed | None = None
        # Called exactly once, from the registry's cleanup task, whatever the end. Set it before the first await.
        self.on_closed: OnClosed | None = None

    @property
    def tunnel_id(self) -> int:
        """The tunnel this route is bound to, for life."""
        return self._owner.tunnel_id

    @property
    def first_delivered(self) -> bool:
        """Whether the peer has acknowledged the payload that opened this route: a lost offer from a delivered one."""
        return self._owner.writer.delivered(self._first)

    def try_send(self, payload: bytes) -> None:
        """Send now or not at all. Raises ChannelFullError, PayloadTooLargeError, RouteClosedError."""
        if self.closed is not None:
            raise RouteClosedError(self.conn_id, self.closed)
        try:
            self._owner.writer.try_send(self.conn_id, payload)
        except TunnelClosedError as error:
            raise RouteClosedError(self.conn_id, error.closed) from None

    def send_first(self, payload: bytes) -> None:
        """Like ``try_send``, for the payload that opens the route; a closed tunnel raises TunnelClosedError."""
        self._owner.writer.try_send(self.conn_id, payload, self._first)

    async def send(self, payload: bytes, timeout_s: float) -> None:
        """Send, waiting for room. Raises TimeoutError, PayloadTooLargeError, RouteClosedError."""
        try:
            self.try_send(payload)
        except ChannelFullError:
            await self._send_later(payload, timeout_s)

    def post(self, payload: bytes) -> None:
        """Send without waiting and without being refused, merging under pressure: this route pays for its slow peer.

        Raises PayloadTooLargeError, or RouteClosedError: with RESOURCE_EXHAUSTED when this payload was one too many.
        """
        try:
            self.try_send(payload)
            return
        except ChannelFullError:
            put = self.outbound.put(payload, self._owner.now())
        if put is Put.OVERFLOW or put is Put.EXPIRED:
            closed = Closed(CloseReason.RESOURCE_EXHAUSTED, f"outbound channel: {put.name.lower()}")
            self._owner.end_route(self, closed)
            raise RouteClosedError(self.conn_id, closed)
        self._owner.writer.add_backlog(self)

    async def receive(self, timeout_s: float | None = None) -> bytes:
        """The next payload.

        Raises RouteClosedError once the route has ended and nothing waits, TimeoutError past the deadline. Without a
        deadline the wait ends with the route at the latest, whose tunnel watches its peer.
        """
        inbound = self.inbound
        while not len(inbound):
            await self._arrival(timeout_s)
        return inbound.take()

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with all that has come, in the turn after it came, instead of waking a task.

        It is the same turn for all routes of the tunnel, so that the lanes of a frame cost one wake-up. The listener
        must return at once; one that raises ends the route with CANCELLED. It is called no more after ``hush``, or once
        it was given nothing, for then the route has ended.
        """
        if self._listener is not None or (self._waiter is not None and not self._waiter.done()):
            raise RuntimeError(f"route {self.conn_id} has a consumer already")
        self._listener = listener
        if len(self.inbound) or self.closed is not None:
            self._wake()

    def hush(self) -> None:
        """Call the listener no more; what waits and what comes is for ``receive`` again. Idempotent."""
        self._listener = None

    def hear(self) -> None:
        """Tunnel only: the listener's turn."""
        self._rung = False
        listener = self._listener
        if listener is None:
            return
        payloads = self.inbound.take_all()
        if payloads:
            listener(payloads)
        if self.closed is not None and self._listener is not None:
            self._listener = None
            listener([])

    def close(self, reason: CloseReason = CloseReason.DONE, detail: str = "") -> None:
        """End the route here and tell the peer, behind everything sent before; idempotent."""
        if self.closed is None:
            self._owner.end_route(self, Closed(reason, detail))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.receive()
        except RouteClosedError as error:
            if error.closed.reason is CloseReason.DONE:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(CloseReason.DONE if error is None else CloseReason.CANCELLED)

    def deliver(self, payload: bytes, now: float) -> Put:
        """Reader only: store an inbound payload without waiting."""
        put = self.inbound.put(payload, now)
        # One wake-up, whatever comes until the consumer has its turn.
        if self._waiter is not None or (self._listener is not None and not self._rung):
            self._wake()
        return put

    def finish(self, closed: Closed, keep: bool) -> bool:
        """Registry only: mark the end, once; what waits inbound is kept for the consumer if ``keep``."""
        if self.closed is not None:
            return False
        self.closed = closed
        if not keep:
            self.inbound.clear()
        self.outbound.clear()
        self._wake()
        return True

    async def _send_later(self, payload: bytes, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while True:
                await self._owner.writer.wait_space()
                try:
                    return self.try_send(payload)
                except ChannelFullError:
                    continue

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        elif self._listener is not None and not self._rung:
            self._rung = True
            self._owner.ring(self)

    def _arrival(self, timeout_s: float | None) -> asyncio.Future[None]:
        """To be awaited: something comes, or the route ends. A plain future, for this is once per payload."""
        if self.closed is not None:
            raise RouteClosedError(self.conn_id, self.closed)
        if self._listener is not None or (self._waiter is not None and not self._waiter.done()):
            raise RuntimeError(f"route {self.conn_id} has a consumer already")
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        if timeout_s is not None:
            # asyncio.timeout costs more than the rest of the wait.
            expiry = loop.call_later(timeout_s, self._expire, waiter)
            waiter.add_done_callback(lambda _waiter: expiry.cancel())
        return waiter

    def _expire(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(TimeoutError(f"nothing came on route {self.conn_id} within the deadline"))
