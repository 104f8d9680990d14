"""Traces over OTLP: on by one setting (the collector's endpoint), otherwise nothing is recorded, sent or slowed.

A request's phases begin and end in different tasks, threads and processes, and travel inside frames of one long
stream, so besides the usual `span` block there are `begin`/`finish` for a span held as a value, `record` for a phase
whose times were measured elsewhere, and `inject`/`extract`, which carry a context as W3C traceparent and
tracestate strings. With tracing off, a context that came in still goes out: a hop without a collector cuts no trace.

gRPC instrumentation covers unary calls alone: a stream here lives as long as its connection, and a span per stream (or
per message) says nothing. OpenTelemetry leaves a cancelled span looking successful; `span` and `finish` mark it.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from libs.service.errors import StartError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, str | bool | int | float]

_PROPAGATOR = TraceContextTextMapPropagator()
_EXPORT_EVERY_MS = 1_000
_EXPORT_TIMEOUT_S = 3.0


class TraceHeaders(NamedTuple):
    """W3C trace context as it travels in a message; both empty outside any trace."""

    traceparent: str = ""
    tracestate: str = ""


class _State:
    """The process's one tracer; OpenTelemetry's global provider can be set once only, which ties tests together."""

    provider: TracerProvider | None = None
    tracer: Tracer = NoOpTracer()


def configure(service: str, endpoint: str | None, *, instance: str | None = None) -> bool:
    """Starts sending traces to `endpoint` (http://HOST:PORT, https://HOST:PORT); with None, stays off.

    `instance` tells replicas apart (default: the host's name). Returns whether tracing is on. Raises StartError.
    """
    if not endpoint:
        return False
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        scheme, rest = "http", endpoint
    if scheme not in ("http", "https") or not rest.rpartition(":")[2].rstrip("/").isdigit():
        raise StartError(f"otlp_endpoint is {endpoint!r}", remedy="give http://HOST:PORT or https://HOST:PORT")
    # Imported here: a service without tracing loads none of the SDK.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(
        {
            "service.name": f"segue-{service}",
            "service.namespace": "segue",
            "service.instance.id": instance or platform.node(),
        }
    )
    exporter = OTLPSpanExporter(endpoint=f"{scheme}://{rest}", insecure=scheme == "http", timeout=_EXPORT_TIMEOUT_S)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_EVERY_MS))
    _State.provider, _State.tracer = provider, provider.get_tracer("segue")
    return True


async def shutdown(within: float = 5.0) -> None:
    """Sends what is left, for at most `within` seconds, and switches tracing off."""
    provider, _State.provider, _State.tracer = _State.provider, None, NoOpTracer()
    if provider is None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def flush() -> None:
        provider.force_flush(int(within * 1_000))
        provider.shutdown()
        with suppress(RuntimeError):  # the loop is gone: nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    # Not to_thread: the loop's end waits for its executor's threads, and with them for an absent collector.
    threading.Thread(target=flush, name="trace flush", daemon=True).start()
    with suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), within)


@contextmanager
def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    parent: Context | None = None,
    links: Sequence[Span] = (),
    kind: SpanKind = SpanKind.INTERNAL,
) -> Iterator[Span]:
    """A span around a block, current within it; an exception or cancellation marks it and goes on.

    Not for the body of an async generator: it may be closed in another context. Use `begin` there.
    """
    made = begin(name, attributes, parent=parent, links=links, kind=kind)
    try:
        with trace.use_span(made, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield made
    except BaseException as error:
        finish(made, error)
        raise
    else:
        finish(made)


def begin(
    name: str,
    attributes: Attributes | None = None,
    *,
    parent: Context | None = None,
    links: Sequence[Span] = (),
    kind: SpanKind = SpanKind.INTERNAL,
    started_ns: int | None = None,
) -> Span:
    """A span held as a value; end it with `finish`. Without `parent`, a child of the current span."""
    return _State.tracer.start_span(
        name, parent, kind, dict(attributes or {}), [Link(linked.get_span_context()) for linked in links], started_ns
    )


def finish(made: Span, error: BaseException | None = None, *, ended_ns: int | None = None) -> None:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        made.set_attribute("segue.cancelled", True)
        made.set_status(Status(StatusCode.ERROR, "cancelled"))
    elif error is not None:
        made.record_exception(error)
        made.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
    made.end(ended_ns)


def record(
    name: str, started_ns: int, ended_ns: int, attributes: Attributes | None = None, *, parent: Context | None = None
) -> None:
    """A phase that is over, measured elsewhere (a device thread, say). Times in ns since the Unix epoch."""
    begin(name, attributes, parent=parent, started_ns=started_ns).end(ended_ns)


def record_error(error: BaseException, error_id: str) -> None:
    """Notes an exception on the current span, with the id its caller was given."""
    current = trace.get_current_span()
    current.set_attribute("segue.error_id", error_id)
    current.record_exception(error)


def context_of(made: Span) -> Context:
    """The span as a parent for others."""
    return trace.set_span_in_context(made, Context())


def inject(context: Context | None = None) -> TraceHeaders:
    """The context (default: the current one) as strings for a message."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return TraceHeaders(carrier.get("traceparent", ""), carrier.get("tracestate", ""))


def extract(traceparent: str, tracestate: str = "") -> Context:
    """The context a message carried; an empty one (a new trace) if it carried none or a malformed one."""
    if not traceparent:
        return Context()
    return _PROPAGATOR.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


def client_interceptors() -> list[Any]:
    """For a channel: client spans of unary calls. Empty with tracing off."""
    if _State.provider is None:
        return []
    from opentelemetry.instrumentation.grpc import aio_client_interceptors

    unary = aio_client_interceptors(_State.provider)[0]  # type: ignore[no-untyped-call, unused-ignore]
    return [unary]


def server_interceptors() -> list[Any]:
    """For a server: server spans of unary calls, health checks and reflection excepted. Empty with tracing off."""
    if _State.provider is None:
        return []
    from opentelemetry.instrumentation.grpc import aio_server_interceptor

    inner = aio_server_interceptor(_State.provider)  # type: ignore[no-untyped-call, unused-ignore]
    return [_UnaryOnly(inner)]


class _UnaryOnly(grpc.aio.ServerInterceptor):  # type: ignore[misc, type-arg, unused-ignore]
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or handler.request_streaming or handler.response_streaming or method.startswith("/grpc."):
            return handler

        async def found(_details: Any) -> Any:
            return handler

        return await self._inner.intercept_service(found, handler_call_details)
