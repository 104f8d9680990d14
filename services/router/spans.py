"""The router's spans: `route` around a whole request, `plan` and `offer` below it.

`route` is the child of the context the request came with. `offer` lasts from the offer to its answer; its context goes
out with the offer, so that the worker's spans hang below the attempt they belong to. Without a collector the caller's
context is passed on as it came.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span

from libs.controller.protocol import (
    AssignmentId,
    CancelledDelivery,
    CompletedDelivery,
    Delivery,
    ErrorDelivery,
    GenerationRequest,
    Offer,
    TokensDelivery,
)
from libs.service import telemetry


class RequestSpans:
    """Of every live request. A request that was refused as a duplicate has none of its own."""

    def __init__(self) -> None:
        self._routes: dict[int, tuple[str, Span]] = {}  # by origin
        self._contexts: dict[str, tuple[int, Context]] = {}  # by request id: whose, and the context
        self._offers: dict[AssignmentId, Span] = {}

    def __len__(self) -> int:
        return len(self._routes) + len(self._contexts) + len(self._offers)

    def submitted(self, origin: int, request: GenerationRequest, delivered: int) -> None:
        """A request arrived."""
        attributes: dict[str, str | bool | int | float] = {
            "segue.request_id": request.request_id,
            "segue.model": request.model,
            "segue.prompt_tokens": request.output_start,
            "segue.delivered_before": delivered,
        }
        parent = telemetry.extract(request.trace.traceparent, request.trace.tracestate)
        span = telemetry.begin("route", attributes, parent=parent)
        self._routes[origin] = (request.request_id, span)
        self._contexts.setdefault(request.request_id, (origin, telemetry.context_of(span)))

    @contextmanager
    def planning(self, request_id: str, plan_id: int) -> Iterator[Span]:
        """Around one plan."""
        attributes: dict[str, str | bool | int | float] = {"segue.request_id": request_id, "segue.plan": plan_id}
        with telemetry.span("plan", attributes, parent=self._context(request_id)) as span:
            yield span

    def offered(self, offer: Offer) -> telemetry.TraceHeaders:
        """An offer goes out; the context to send with it."""
        request_id, candidate = offer.assignment.request_id, offer.candidate
        attributes: dict[str, str | bool | int | float] = {
            "segue.request_id": request_id,
            "segue.attempt": offer.assignment.attempt,
            "segue.worker": candidate.worker,
            "segue.epoch": candidate.epoch,
            "segue.tier": candidate.tier.name.lower(),
            "segue.cached_tokens": candidate.cached_tokens,
            "segue.predicted_ttft_ms": candidate.ttft_ms,
        }
        span = telemetry.begin("offer", attributes, parent=self._context(request_id))
        self._offers[offer.assignment] = span
        return telemetry.inject(telemetry.context_of(span))

    def answered(self, assignment: AssignmentId, answer: str) -> None:
        """`accepted`, a decline's reason, or `over` if the attempt ended without an answer. Idempotent."""
        span = self._offers.pop(assignment, None)
        if span is not None:
            span.set_attribute("segue.answer", answer)
            telemetry.finish(span)

    def delivered(self, origin: int, delivery: Delivery) -> None:
        """The terminal delivery of a request."""
        entry = self._routes.pop(origin, None)
        if entry is None:
            return
        request_id, span = entry
        if self._contexts.get(request_id, (0,))[0] == origin:
            del self._contexts[request_id]
        span.set_attribute("segue.generated_tokens", delivery.usage.generated_tokens)
        span.set_attribute("segue.cached_tokens", delivery.usage.cached_tokens)
        if not isinstance(delivery, TokensDelivery) and (served := delivery.served).attempts:
            span.set_attribute("segue.worker", served.worker)
            span.set_attribute("segue.attempts", served.attempts)
            span.set_attribute("segue.tier", served.tier.name.lower())
        match delivery:
            case CompletedDelivery():
                span.set_attribute("segue.finish_reason", delivery.finish_reason.name.lower())
                telemetry.finish(span)
            case ErrorDelivery():
                telemetry.finish(span, RequestFailedError(f"{delivery.code.name}: {delivery.message}"))
            case CancelledDelivery():
                span.set_attribute("segue.cancelled", True)
                telemetry.finish(span)
            case _:
                telemetry.finish(span)

    def _context(self, request_id: str) -> Context:
        entry = self._contexts.get(request_id)
        return entry[1] if entry is not None else Context()


class RequestFailedError(Exception):
    """What a failed request's span records."""
