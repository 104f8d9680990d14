"""What every endpoint works with, and how a request is carried from its first byte to its last.

An `Endpoint` is an ASGI application around one handler: it gives the request an id (`x-request-id` on every answer),
a root span (a child of the caller's `traceparent`, if there is one), a place among the bounded number of requests,
and turns what goes wrong into an OpenAI-shaped error: a status and a body as long as nothing was sent, an error event
and the stream's end without `[DONE]` after that.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from libs.service import telemetry
from libs.service.logs import get_logger
from services.ingress.errors import ApiError, internal, overloaded
from services.ingress.http_io import ClientGoneError, EventStream, JsonAnswer
from services.ingress.memo import TurnMemo
from services.ingress.metrics import RequestMetrics
from services.ingress.model_directory import ModelDirectory
from services.ingress.settings import IngressSettings
from services.ingress.tenants import Tenant, Tenants
from services.ingress.upstream import Upstream

_CLIENT_GONE = 499

log = get_logger(__name__)


def new_request_id() -> str:
    """Never a client's word: it must be unique in the cluster."""
    return f"req-{uuid.uuid4().hex}"


@dataclass
class Api:
    """The parts. `closing` is set when what is running must end now; `why_not_ready` is empty when all is well."""

    settings: IngressSettings
    directory: ModelDirectory
    upstream: Upstream
    memo: TurnMemo
    tenants: Tenants
    metrics: RequestMetrics
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    why_not_ready: str = "starting"


@dataclass
class Exchange:
    """One request and the way back to its client."""

    id: str
    request: Request
    receive: Receive
    send: Send
    stream: EventStream | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.id}

    @property
    def wants_token_ids(self) -> bool:
        """Whether the `segue` object shall hold the exact ids of prompt and answer."""
        return self.request.headers.get("x-segue-token-ids", "") == "1"

    def tenant(self, tenants: Tenants) -> Tenant:
        """Raises ApiError (401)."""
        return tenants.of(self.request.headers.get("authorization"))

    def open_stream(self, stall_s: float) -> EventStream:
        self.stream = EventStream(self.send, self.headers, stall_s)
        return self.stream


Handler = Callable[[Api, Exchange], Awaitable[JsonAnswer | None]]
"""Answers, or has streamed its answer and returns None."""


class Endpoint:
    """One handler as an ASGI application."""

    def __init__(self, api: Api, name: str, handler: Handler, *, counts: bool = True) -> None:
        """`counts`: whether it takes a place among `max_requests`."""
        self._api, self._name, self._handler, self._counts = api, name, handler, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        exchange = Exchange(new_request_id(), request, receive, send)
        parent = telemetry.extract(request.headers.get("traceparent", ""), request.headers.get("tracestate", ""))
        attributes = {"http.route": self._name, "segue.request_id": exchange.id}
        with telemetry.span(f"{request.method} {self._name}", attributes, parent=parent, kind=SpanKind.SERVER) as span:
            code = await self._answer(scope, exchange, span)
            span.set_attribute("http.response.status_code", code)
        self._api.metrics.requests.labels(self._name, str(code)).inc()

    async def _answer(self, scope: Scope, exchange: Exchange, span: Span) -> int:
        counters = self._api.metrics.counters
        counters.running += self._counts
        try:
            if self._counts and counters.running > self._api.settings.max_requests:
                raise overloaded(f"{self._api.settings.max_requests} requests are being served already.", 1.0)
            answer = await self._handler(self._api, exchange)
            if answer is None:
                return 200
            await answer(scope, exchange.receive, exchange.send)
            return answer.status
        except ClientGoneError:
            counters.disconnects += 1
            span.set_attribute("segue.client_gone", True)
            return _CLIENT_GONE
        except ApiError as error:
            return await self._refuse(scope, exchange, error, span)
        except Exception as error:
            log.error("request failed", request_id=exchange.id, endpoint=self._name, exc_info=error)
            span.record_exception(error)
            return await self._refuse(scope, exchange, internal(exchange.id), span)
        finally:
            counters.running -= self._counts

    async def _refuse(self, scope: Scope, exchange: Exchange, error: ApiError, span: Span) -> int:
        if error.status >= 500:
            span.set_status(Status(StatusCode.ERROR, error.message))
        stream = exchange.stream
        try:
            if stream is not None and stream.started:
                self._api.metrics.counters.errors_after_start += 1
                await stream.data(error.body())
                await stream.close()
            else:
                answer = JsonAnswer(error.body(), error.status, exchange.headers | error.headers())
                await answer(scope, exchange.receive, exchange.send)
        except ClientGoneError:
            self._api.metrics.counters.disconnects += 1
            return _CLIENT_GONE
        return error.status
