"""One generation, seen through to its end over any number of routers.

The request is opened as a route on a router's tunnel. If the route or the tunnel is lost, before or after tokens, it
goes to another router (or to the same one, reconnected) with what was delivered; the caller sees one unbroken
sequence of tokens. Tries and waits are bounded. Cancelling the call, for a client that has gone, sends a
CancelRequest and closes the route at once: nothing is left behind here, and the router and its worker stop at their
next boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from libs.contracts.segue.v1.common_pb2 import FinishReason, GenerationRequest, Usage
from libs.contracts.segue.v1.router_pb2 import AttachMessage, CancelRequest, Delivery, Served
from libs.service.logs import get_logger
from libs.tunnel import (
    ChannelFullError,
    CloseReason,
    PayloadTooLargeError,
    Route,
    RouteClosedError,
    TooManyRoutesError,
    Tunnel,
    TunnelClosedError,
)
from services.ingress.errors import (
    ApiError,
    bad_request,
    deadline_exceeded,
    from_router,
    overloaded,
    slow_client,
    unavailable,
)
from services.ingress.progress import DeliveryGapError, Progress
from services.ingress.router_links import NoRouterError, RouterLinks

Take = Callable[[Sequence[int]], Awaitable[bool]]
"""Given new tokens in order; answers whether it wants more."""

# The router is told the deadline too; its own word, with usage, comes first.
_DEADLINE_SLACK_S = 0.5
# How long a caller that wants no more waits for the router to say how it was served: one round trip, else never mind.
_LAST_WORD_S = 0.5

log = get_logger(__name__)


@dataclass(frozen=True)
class Outcome:
    """A generation that has ended regularly."""

    finish_reason: FinishReason
    """UNSPECIFIED if the caller wanted no more."""
    usage: Usage | None
    served: Served | None
    """None if no router told the end: its tokens did, or the caller's wish and the router's last word did not come."""
    routers: int
    """How many routers it was submitted to."""


@dataclass
class UpstreamCounters:
    """Exported as metrics."""

    submissions: int = field(default=0, metadata={"help": "Requests submitted to a router, resubmissions included"})
    resubmissions: int = field(default=0, metadata={"help": "Requests submitted again after the loss of a router"})
    cancels: int = field(default=0, metadata={"help": "Requests cancelled at a router"})
    duplicate_tokens: int = field(default=0, metadata={"help": "Tokens delivered a second time, dropped"})
    slow_clients: int = field(default=0, metadata={"help": "Routes dropped because their client read too slowly"})
    active: int = field(default=0, metadata={"help": "Generations under way", "kind": "gauge"})


class _RouterLostError(Exception):
    """The route ended without a terminal delivery."""


class Upstream:
    """Runs generations over the links."""

    def __init__(self, links: RouterLinks, *, router_wait_s: float, router_losses: int) -> None:
        self.counters = UpstreamCounters()
        self._links = links
        self._wait_s = router_wait_s
        self._losses = router_losses

    async def run(self, request: GenerationRequest, take: Take) -> Outcome:
        """Raises ApiError, or whatever `take` raises."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.deadline_ms / 1_000
        progress = Progress(request)
        self.counters.active += 1
        try:
            async with asyncio.timeout_at(deadline + _DEADLINE_SLACK_S) as limit:
                return await self._over_routers(request, progress, take, deadline)
        except TimeoutError:
            if limit.expired():
                raise deadline_exceeded(request.deadline_ms / 1_000) from None
            raise
        finally:
            self.counters.active -= 1
            self.counters.duplicate_tokens += progress.duplicates

    async def _over_routers(
        self, request: GenerationRequest, progress: Progress, take: Take, deadline: float
    ) -> Outcome:
        lost: Tunnel | None = None
        tries = 0
        while True:
            ended = progress.ended
            if ended is not None:
                return Outcome(ended, progress.usage, None, tries)
            if tries > self._losses:
                raise unavailable(f"The request lost its router {tries} times; it may be tried again.")
            try:
                tunnel = await self._links.pick(self._wait_s, lost)
            except NoRouterError as error:
                raise unavailable(f"No router is connected: {error}.") from None
            tries += 1
            self.counters.submissions += 1
            self.counters.resubmissions += tries > 1
            try:
                remaining_ms = int(1_000 * (deadline - asyncio.get_running_loop().time()))
                route = await self._open(tunnel, progress, remaining_ms)
                return await self._follow(route, request, progress, take, tries)
            except (_RouterLostError, TunnelClosedError) as error:
                log.warning(
                    "request lost its router",
                    request_id=request.request_id,
                    delivered=len(progress.delivered),
                    reason=str(error),
                )
                progress.router_lost()
                lost = tunnel

    async def _open(self, tunnel: Tunnel, progress: Progress, remaining_ms: int) -> Route:
        submission = AttachMessage(submit=progress.submission(remaining_ms))
        try:
            return await tunnel.open(submission.SerializeToString())
        except PayloadTooLargeError as error:
            raise bad_request(f"The prompt is too large: {error}.", code="context_length_exceeded") from None
        except (ChannelFullError, TooManyRoutesError) as error:
            raise overloaded(f"The router's tunnel is full: {error}.", 1.0) from None

    async def _follow(
        self, route: Route, request: GenerationRequest, progress: Progress, take: Take, tries: int
    ) -> Outcome:
        finished = cancelled = False
        try:
            while True:
                delivery = _read(await route.receive())
                event = delivery.WhichOneof("event")
                if event == "tokens":
                    new = progress.take(delivery.tokens)
                    if new and not await take(new):
                        self._cancel(route, request.request_id)
                        cancelled = True
                        served = await _last_word(route)
                        finished = served is not None
                        return Outcome(FinishReason.FINISH_REASON_UNSPECIFIED, progress.usage, served, tries)
                elif event == "completed":
                    finished = True
                    progress.note_usage(delivery.completed.usage)
                    return Outcome(delivery.completed.finish_reason, progress.usage, delivery.completed.served, tries)
                elif event == "error":
                    finished = True
                    told = delivery.error
                    raise from_router(told.code, told.message, told.retry_after_ms, request.request_id, request.model)
                elif event == "cancelled":
                    finished = True
                    raise ApiError(
                        503, "The request was cancelled by an operator.", "service_unavailable_error", code="cancelled"
                    )
        except RouteClosedError as error:
            finished = True
            raise self._end_of(error, bool(progress.delivered)) from None
        except (DecodeError, DeliveryGapError) as error:
            raise _RouterLostError(str(error)) from None
        finally:
            if not finished and not cancelled:
                self._cancel(route, request.request_id)
            route.close(CloseReason.DONE if finished else CloseReason.CANCELLED)

    def _end_of(self, error: RouteClosedError, began: bool) -> Exception:
        if error.closed.reason is not CloseReason.RESOURCE_EXHAUSTED:
            return _RouterLostError(str(error))
        if not began and error.closed.by_peer:
            return overloaded("The router has no room for another request.", 1.0)
        self.counters.slow_clients += 1
        return slow_client()

    def _cancel(self, route: Route, request_id: str) -> None:
        self.counters.cancels += 1
        message = AttachMessage(cancel=CancelRequest(request_id=request_id))
        try:
            route.try_send(message.SerializeToString())
        except (RouteClosedError, ChannelFullError):
            return  # the close of the route says it too


async def _last_word(route: Route) -> Served | None:
    """How a request that has just been cancelled was served; tokens that were under way are passed over."""
    try:
        async with asyncio.timeout(_LAST_WORD_S):
            while True:
                delivery = _read(await route.receive())
                for end in (delivery.cancelled, delivery.completed, delivery.error):
                    if end.HasField("served"):
                        return end.served
                if delivery.WhichOneof("event") not in ("tokens", None):
                    return None
    except (TimeoutError, RouteClosedError, DecodeError):
        return None


def _read(payload: bytes) -> Delivery:
    """An unset delivery for a message type this version does not know. Raises DecodeError."""
    return AttachMessage.FromString(payload).delivery
