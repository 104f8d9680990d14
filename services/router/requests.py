"""Requests and those who want to hear of them: submissions in, deliveries out, each to the one that submitted.

A requester is a route of an ingress's tunnel or a `Generate` call. Its *origin* is a number that is never used again;
the machine echoes it in every delivery, so that a late delivery of an old submission cannot reach a new one.

The same id submitted again over *another* tunnel means that its ingress has given the first one up (a broken link seen
at one end only): the first is cancelled and the new one goes on from the tokens it brings. Over the same tunnel, or by
another tenant, it is a mistake, and refused by the machine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from libs.controller.protocol import (
    CancelledDelivery,
    CompletedDelivery,
    Delivery,
    ErrorDelivery,
    StatusCode,
    Submission,
    TokensDelivery,
)
from libs.controller.router_effects import Deliver
from libs.controller.router_events import RequestCancelled, RouterEvent, Submitted
from services.router.metrics import RouterMetrics
from services.router.spans import RequestSpans

NO_TENANT = "00" * 32
"""The salt of requests made by hand without a tenant."""

_SALT = re.compile(r"[0-9a-f]{64}")


class Sink(Protocol):
    """Where a request's deliveries go."""

    def deliver(self, delivery: Delivery) -> None:
        """Never blocks, never raises: a requester that has gone hears nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _Requester:
    sink: Sink
    request_id: str
    tenant: str
    tunnel: int  # 0 = a direct call
    input_tokens: int


class Requests:
    """All submissions that have had no terminal delivery."""

    def __init__(self, feed: Callable[[RouterEvent], None], spans: RequestSpans, metrics: RouterMetrics) -> None:
        self._feed = feed
        self._spans = spans
        self._metrics = metrics
        self._requesters: dict[int, _Requester] = {}
        self._by_id: dict[str, int] = {}
        self._origins = count(1)
        self._rest = asyncio.Event()
        self._rest.set()

    def __len__(self) -> int:
        return len(self._requesters)

    async def at_rest(self, within_s: float) -> bool:
        """Waits until every request has ended; whether they did."""
        try:
            async with asyncio.timeout(within_s):
                await self._rest.wait()
        except TimeoutError:
            return False
        return True

    def submit(self, submission: Submission, sink: Sink, tunnel: int = 0) -> int:
        """Takes a request on; returns its origin. The sink may hear of it before this returns."""
        request = submission.request
        origin = next(self._origins)
        if not request.tenant_salt:
            submission = replace(submission, request=replace(request, tenant_salt=NO_TENANT))
        known = self._requesters.get(self._by_id.get(request.request_id, 0))
        if known is not None and tunnel not in (0, known.tunnel) and known.tenant == request.tenant:
            self.cancel(self._by_id[request.request_id])
        self._requesters[origin] = _Requester(sink, request.request_id, request.tenant, tunnel, len(request.tokens))
        self._by_id.setdefault(request.request_id, origin)
        self._rest.clear()
        self._spans.submitted(origin, request, submission.delivered)
        if not _SALT.fullmatch(submission.request.tenant_salt):
            text = f"request {request.request_id}: tenant_salt is not 64 lowercase hex digits: leave it empty for none"
            self.deliver(Deliver(origin, ErrorDelivery(request.request_id, StatusCode.INVALID_ARGUMENT, text)))
            return origin
        self._feed(Submitted(submission, origin))
        return origin

    def cancel(self, origin: int) -> None:
        """The requester wants no more, or is gone. Idempotent; a late one touches nobody else."""
        requester = self._requesters.get(origin)
        if requester is not None:
            self._feed(RequestCancelled(requester.request_id, origin))

    def resumed(self, request_id: str, tokens: int) -> bool:
        """Whether an attempt with that many input tokens goes on from tokens delivered by an earlier one."""
        requester = self._requesters.get(self._by_id.get(request_id, 0))
        return requester is not None and tokens > requester.input_tokens

    def deliver(self, effect: Deliver) -> None:
        """Hands a delivery to its requester; after a terminal one it is forgotten."""
        delivery = effect.delivery
        if isinstance(delivery, TokensDelivery):
            requester = self._requesters.get(effect.origin)
            if requester is not None:
                requester.sink.deliver(delivery)
            return
        requester = self._requesters.pop(effect.origin, None)
        self._spans.delivered(effect.origin, delivery)
        self._metrics.ended(outcome_of(delivery))
        if requester is not None:
            if self._by_id.get(requester.request_id) == effect.origin:
                del self._by_id[requester.request_id]
            requester.sink.deliver(delivery)
        if not self._requesters:
            self._rest.set()


def outcome_of(delivery: CompletedDelivery | ErrorDelivery | CancelledDelivery) -> str:
    """The metric's label: completed, cancelled, or the error's status code in lower case."""
    if isinstance(delivery, ErrorDelivery):
        return delivery.code.name.lower()
    return "completed" if isinstance(delivery, CompletedDelivery) else "cancelled"
