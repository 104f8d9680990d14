"""Assignments on the wire: one route per offer on one of the tunnels to its worker, and what comes back on it.

The pool chooses the tunnel. Where it has none that leads to the process, it waits as its policy says, at most until the
machine has given the offer up, or has the assignment go over a call of its own.

A listener of each route hands replies and deltas to the machine: all that one frame holds, for whichever routes, in one
turn. A small task per route waits beside it, for a result to be in order and for the end of the route. A route that
ends without a result is a dropped route. What arrives is handed over in the loop's next turn, and a tunnel takes
several to end: a result that came in with its last bytes still counts.

The tunnels of a process that dies break one after the other. So a route that was lost with its tunnel is dropped only
`settle_s` later: until then it may turn out that the process is lost, and a resume over the next tunnel would have been
lost as well. (What such a loss says against a prompt the machine knows of dropped routes too: `drop_window_ms`.)

An assignment that was cancelled keeps its route a little longer: its worker's last words (a late acceptance, a result)
then reach the machine and are fenced and counted there, and the worker closes the route itself. Past `_LINGER_S` it is
closed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from libs.controller.errors import EncodingError, WireError
from libs.controller.fleet import Fleet
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    Candidate,
    DeclineReason,
    Delta,
    Offer,
    OfferReply,
    Result,
    TraceContext,
    TunnelValue,
)
from libs.controller.router_effects import CloseRoute, SendCancel, SendOffer
from libs.controller.router_events import DeltaReceived, ReplyReceived, ResultReceived, RouteDropped, RouterEvent
from libs.controller.wire import TunnelCodec
from libs.pool.errors import GoDirectError, PoolError
from libs.service.logs import get_logger
from libs.tunnel import (
    ChannelFullError,
    CloseReason,
    PayloadTooLargeError,
    Route,
    RouteClosedError,
    TooManyRoutesError,
)
from services.router.clock import Spawn, now_ms
from services.router.direct_calls import DirectCallError, DirectCalls
from services.router.heartbeat_order import HeartbeatOrder
from services.router.spans import RequestSpans

_LINGER_S = 5.0
SETTLE_S = 0.1
"""The kernel closes all sockets of a process at once; what is between is two turns of a busy event loop."""

log = get_logger(__name__)

Bind = Callable[[str, int, bytes], Awaitable[Route]]
"""Worker, epoch and first payload to a route. Raises PoolError, ChannelFullError, TooManyRoutesError,
PayloadTooLargeError."""


@dataclass(eq=False)
class _Carried:
    """One assignment and its route."""

    assignment: AssignmentId
    candidate: Candidate
    epoch: int
    route: Route | None = None  # once it is open
    opening: asyncio.Task[None] | None = None  # while it waits for one, or does without
    over: bool = False  # the machine wants nothing more of it
    ended: bool = False  # its result is here, and waits for a heartbeat
    cancelled: bool = False  # the worker has been told, or will be when the route opens
    linger: asyncio.TimerHandle | None = None
    told: asyncio.Event = field(default_factory=asyncio.Event)  # that it is over

    @property
    def worker(self) -> str:
        return self.candidate.worker


class Assignments:
    """All of this process."""

    def __init__(
        self,
        codec: TunnelCodec,
        fleet: Fleet,
        spans: RequestSpans,
        feed: Callable[[RouterEvent], None],
        bind: Bind,
        direct: DirectCalls,
        spawn: Spawn,
        order: HeartbeatOrder,
    ) -> None:
        self._codec = codec
        self._fleet = fleet
        self._spans = spans
        self._feed = feed
        self._bind = bind
        self._direct = direct
        self._spawn = spawn
        self._order = order
        self._carried: dict[AssignmentId, _Carried] = {}
        self.settle_s = SETTLE_S

    def __len__(self) -> int:
        """Assignments with a route, or about to have one."""
        return len(self._carried)

    # --- effects ---

    def offer(self, effect: SendOffer) -> None:
        """Opens a route and sends the offer; feeds RouteDropped where that cannot be done."""
        offer = effect.offer
        headers = self._spans.offered(offer)
        request = replace(offer.request, trace=TraceContext(headers.traceparent, headers.tracestate))
        carried = _Carried(offer.assignment, offer.candidate, offer.epoch)
        self._carried[offer.assignment] = carried
        self._spawn(self._carry(carried, replace(offer, request=request)), "assignment")

    def cancel(self, effect: SendCancel) -> None:
        """Tells the worker on the assignment's route; without one there is nobody to tell, or nothing to be told."""
        carried = self._carried.get(effect.cancel.assignment)
        if carried is not None:
            carried.cancelled = True
            if carried.route is not None:
                self._send_cancel(carried.route, effect.cancel)

    def close(self, effect: CloseRoute) -> None:
        """The machine wants nothing more of the assignment."""
        self._spans.answered(effect.assignment, "over")
        carried = self._carried.get(effect.assignment)
        if carried is None or carried.over:
            return
        carried.over = True
        carried.told.set()
        if carried.route is None:
            if carried.opening is not None and carried.opening is not asyncio.current_task():
                carried.opening.cancel()  # nothing was bound, and nothing will be
            return
        if carried.cancelled:
            loop = asyncio.get_running_loop()
            carried.linger = loop.call_later(_LINGER_S, carried.route.close, CloseReason.CANCELLED)
        else:
            carried.route.close(CloseReason.DONE)

    # --- one assignment ---

    async def _carry(self, carried: _Carried, offer: Offer) -> None:
        try:
            route = await self._open(carried, offer)
            if route is not None:
                await self._hear(carried, route)
        finally:
            if carried.linger is not None:
                carried.linger.cancel()
            if carried.route is not None:
                carried.route.close(CloseReason.CANCELLED)
            if self._carried.get(carried.assignment) is carried:
                del self._carried[carried.assignment]

    async def _open(self, carried: _Carried, offer: Offer) -> Route | None:
        if carried.over:
            return None
        carried.opening = asyncio.current_task()
        try:
            route = await self._bind(carried.worker, offer.epoch, self._codec.encode(offer))
        except GoDirectError:
            await self._go_direct(carried, offer)
            return None
        except (PoolError, ChannelFullError, TooManyRoutesError, PayloadTooLargeError) as error:
            self._drop(carried, str(error))
            return None
        except EncodingError as error:
            log.error("offer cannot be encoded", request_id=offer.assignment.request_id, exc_info=error)
            self._drop(carried, str(error))
            return None
        carried.route = route
        return route

    async def _go_direct(self, carried: _Carried, offer: Offer) -> None:
        try:
            async with aclosing(self._direct.run(offer)) as answers:
                async for value in answers:
                    if not self._heard(carried, value):
                        return
        except DirectCallError as error:
            self._drop(carried, f"direct call: {error}")
            return
        self._drop(carried, "the direct call ended without a result")

    async def _hear(self, carried: _Carried, route: Route) -> None:
        """Until the route has ended, or nothing more is wanted of it."""
        behind: list[bytes] = []
        # Ends with the route at the latest: its tunnel watches the peer.
        while (result := await self._overhear(carried, route, behind)) is not None:
            await self._in_order(carried, result)
            if carried.over:
                return
        closed = route.closed
        if closed is None:
            return
        if closed.reason is CloseReason.PEER_LOST:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settle_s):
                    await carried.told.wait()
        self._drop(carried, f"route closed: {closed.reason.label} {closed.detail}".rstrip())

    async def _overhear(self, carried: _Carried, route: Route, behind: list[bytes]) -> Result | None:
        """Hands messages to the machine as they come, up to a result, which may have to wait: what came ``behind`` it
        waits too. None: none is to come.
        """
        found: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()

        def heard(payloads: list[bytes]) -> None:
            if found.done():
                return
            try:
                for index, payload in enumerate(payloads, 1):
                    value = self._decoded(carried, payload)
                    if isinstance(value, Result):
                        behind[:] = payloads[index:]
                        found.set_result(value)
                        break
                    if value is None or not self._heard(carried, value):
                        found.set_result(None)
                        break
                else:
                    if payloads:
                        return
                    found.set_result(None)  # the route has ended
            except Exception as error:
                found.set_exception(error)  # for the task, whose owner must hear of it
            route.hush()

        if behind:
            heard(behind.copy())
        if not found.done():
            route.listen(heard)
        try:
            return await found
        finally:
            route.hush()

    def _decoded(self, carried: _Carried, payload: bytes) -> TunnelValue | None:
        """None: it was refused, and the assignment dropped."""
        try:
            return self._codec.decode(payload)
        except WireError as error:
            log.warning("message of a worker refused", worker=carried.worker, reason=error.reason)
            self._drop(carried, f"a message was refused: {error.reason}")
            return None

    async def _in_order(self, carried: _Carried, result: Result) -> None:
        """A result, once the heartbeat before it was heard."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take() -> None:
            if not taken.done():
                taken.set_result(None)
                carried.ended = False
                self._heard(carried, result)

        carried.ended = True
        self._order.after(carried.worker, carried.epoch, result.heartbeat, take)
        await taken

    def _heard(self, carried: _Carried, value: TunnelValue) -> bool:
        match value:
            case OfferReply():
                self._fleet.replied(carried.worker, value, now_ms())
                if value.reason is DeclineReason.PREFIX_GONE and value.epoch == carried.epoch:
                    self._fleet.missed(carried.candidate)
                reason = "accepted" if value.accepted else value.reason.name.lower()
                self._spans.answered(value.assignment, reason)
                self._feed(ReplyReceived(carried.worker, value))
                # A late acceptance of what is over: the machine has asked for another cancel; its result is awaited.
                return value.accepted or not carried.over
            case Delta():
                self._feed(DeltaReceived(carried.worker, value))
            case Result():
                self._feed(ResultReceived(carried.worker, value))
                return not carried.over
            case _:
                self._codec.counts["out-of-place"] += 1
        return True

    def _drop(self, carried: _Carried, reason: str) -> None:
        if not carried.over and not carried.ended:
            carried.over = True
            self._feed(RouteDropped(carried.assignment, carried.worker, carried.epoch, reason))

    def _send_cancel(self, route: Route, cancel: Cancel) -> None:
        try:
            route.try_send(self._codec.encode(cancel))
        except ChannelFullError:
            route.close(CloseReason.CANCELLED)  # passes a full channel, and says the same
        except RouteClosedError:
            return
