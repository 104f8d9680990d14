"""Traces as a collector gets them: over a real gRPC hop, over strings in messages, failed and cancelled ones too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from libs.service import telemetry
from libs.service.channel import open_channel
from libs.service.errors import StartError
from libs.service.grpc_server import GrpcServer
from libs.service.transport import Transport
from tests.fixtures.otlp import OtlpReceiver, otlp_receiver


@pytest.fixture
async def collector() -> AsyncIterator[OtlpReceiver]:
    async with otlp_receiver() as receiver:
        assert telemetry.configure("test", receiver.endpoint)
        yield receiver
        await telemetry.shutdown()


async def echo(request: bytes, context: Any) -> bytes:
    if request == b"bug":
        raise KeyError("cause")
    with telemetry.span("work", {"segue.size": len(request)}):
        return request


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request


def register(_servicer: object, server: grpc.aio.Server) -> None:
    handlers = {
        "Call": grpc.unary_unary_rpc_method_handler(echo),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))


async def exchange(request: bytes) -> None:
    server = GrpcServer("127.0.0.1:0", Transport())
    server.add(None, register, "test.Echo")
    await server.start()
    try:
        async with open_channel(server.target, Transport()) as channel:
            assert [r async for r in channel.unary_stream("/test.Echo/Stream")(b"s", timeout=5)] == [b"s"]
            await channel.unary_unary("/test.Echo/Call")(request, timeout=5)
    finally:
        await server.stop(0)


async def test_unary_call_over_a_hop(collector: OtlpReceiver) -> None:
    with telemetry.span("request"):
        await exchange(b"abc")
    spans = await collector.wait_for_trace(["request", "work", "/test.Echo/Call"])
    assert [span.name for span in spans] == ["request", "/test.Echo/Call", "/test.Echo/Call", "work"]
    # One chain: request > client > server > work; nothing for the stream.
    assert [span.parent_id for span in spans] == ["", *(span.span_id for span in spans[:3])]
    assert all(span.error is None for span in spans)
    assert spans[3].attributes == {"segue.size": 3}
    assert {span.service for span in spans} == {"segue-test"}
    assert "/test.Echo/Stream" not in {span.name for span in collector.spans}


async def test_escaping_exception_marks_the_server_span(collector: OtlpReceiver) -> None:
    with telemetry.span("request"), pytest.raises(grpc.aio.AioRpcError):
        await exchange(b"bug")
    spans = await collector.wait_for_trace(["request", "/test.Echo/Call"])
    client, server = (span for span in spans if span.name == "/test.Echo/Call")
    assert server.parent_id == client.span_id
    assert server.error is not None and "internal error" in server.error
    assert "exception" in server.events
    assert len(str(server.attributes["segue.error_id"])) == 16
    assert client.error is not None


async def test_context_travels_as_strings(collector: OtlpReceiver) -> None:
    with telemetry.span("here"):
        headers = telemetry.inject()
    assert headers.traceparent.startswith("00-")
    there = telemetry.begin("there", parent=telemetry.extract(*headers))
    telemetry.record("measured", time.time_ns() - 5_000_000, time.time_ns(), parent=telemetry.context_of(there))
    with telemetry.span("linked", links=[there], parent=telemetry.context_of(there)):
        pass
    telemetry.finish(there)
    spans = {span.name: span for span in await collector.wait_for_trace(["here", "there", "measured", "linked"])}
    assert spans["there"].parent_id == spans["here"].span_id
    assert spans["measured"].parent_id == spans["linked"].parent_id == spans["there"].span_id
    assert spans["linked"].links == (spans["there"].span_id,)
    assert 4e6 < spans["measured"].end_ns - spans["measured"].start_ns < 1e9


async def test_failed_and_cancelled_spans_say_so(collector: OtlpReceiver) -> None:
    entered = asyncio.Event()

    async def slow() -> None:
        with telemetry.span("cancelled"):
            entered.set()
            await asyncio.Event().wait()

    with telemetry.span("root"):
        with pytest.raises(ValueError, match="why"), telemetry.span("failed"):
            raise ValueError("why")
        task = asyncio.create_task(slow())
        await entered.wait()
        task.cancel()
        await asyncio.wait({task})
    spans = {span.name: span for span in await collector.wait_for_trace(["root", "failed", "cancelled"])}
    assert spans["failed"].error == "ValueError: why"
    assert spans["failed"].events == ("exception",)
    assert spans["cancelled"].error == "cancelled"
    assert spans["cancelled"].attributes == {"segue.cancelled": True}
    assert spans["root"].error is None


@pytest.mark.parametrize("malformed", ["", "00", "00-zz-zz-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\n" * 100])
def test_malformed_context_starts_a_new_trace(malformed: str) -> None:
    assert telemetry.inject(telemetry.extract(malformed)) == telemetry.TraceHeaders()


def test_switched_off_records_nothing_but_hands_a_context_on() -> None:
    came_in = telemetry.TraceHeaders("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "k=v")
    with telemetry.span("nothing", parent=telemetry.extract(*came_in)) as span:
        assert not span.is_recording()
        assert telemetry.inject() == came_in
    assert telemetry.inject() == telemetry.TraceHeaders()
    assert telemetry.client_interceptors() == telemetry.server_interceptors() == []


async def test_absent_collector_delays_the_end_by_no_more_than_asked(unused_tcp_port: int) -> None:
    telemetry.configure("test", f"http://127.0.0.1:{unused_tcp_port}")
    with telemetry.span("lost"):
        pass
    began = time.monotonic()
    await telemetry.shutdown(within=0.5)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("endpoint", ["ftp://h:1", "http://h", "h", "http://h:port"])
def test_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(StartError, match="otlp_endpoint"):
        telemetry.configure("test", endpoint)


async def test_waterfall_and_the_receivers_own_failure(collector: OtlpReceiver) -> None:
    with pytest.raises(ValueError, match="x"), telemetry.span("outer"), telemetry.span("inner"):
        raise ValueError("x")
    await collector.wait_for_trace(["outer", "inner"])
    text = collector.waterfall()
    outer, inner = (next(line for line in text.splitlines() if name in line) for name in ("outer", "inner"))
    assert outer.index("outer") < inner.index("inner")
    assert "✗ ValueError: x" in inner
    with pytest.raises(AssertionError, match=r"no trace with spans \['other'\](.|\n)*outer"):
        await collector.wait_for_trace(["other"], within=0.05)
