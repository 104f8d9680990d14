"""A checkpoint in its request's trace, as a collector gets it."""

from __future__ import annotations

from dataclasses import replace

from libs.service import telemetry
from tests.fixtures.otlp import otlp_receiver
from tests.worker_storage.rig import draw_tokens, worker

TRACE, REQUEST = "4b" * 16, "1a" * 8


async def test_a_checkpoint_joins_its_requests_trace(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(256 + 32, seed=41)
    async with otlp_receiver() as collector:
        assert telemetry.configure("worker", collector.endpoint)
        try:
            async with worker(model, tmp_path, bucket, catalog.target) as one:
                for route in (1, 2):
                    # The second time all of it is known.
                    ranges = [
                        replace(what, traceparent=f"00-{TRACE}-{REQUEST}-01") for what in model.ranges(tokens, route)
                    ]
                    one.pool.hold(ranges)
                    assert await one.checkpoint(ranges) == 0
                untraced = model.ranges(draw_tokens(256, seed=42))
                one.pool.hold(untraced)
                assert await one.checkpoint(untraced) == 0
                one.storage.checkpointer.offer(replace(model.ranges(draw_tokens(256, seed=43))[0], traceparent="bad"))
                gone = replace(model.ranges(draw_tokens(256, seed=44), 3)[0], traceparent=f"00-{TRACE}-{REQUEST}-01")
                one.storage.checkpointer.offer(gone)
                await one.storage.checkpointer.drain(10)
                assert not len(one.storage.checkpointer._spans)
        finally:
            await telemetry.shutdown()
        spans = [span for span in collector.spans if span.name == "worker.checkpoint"]
        mine = sorted((span for span in spans if span.trace_id == TRACE), key=lambda span: span.end_ns)
        assert {span.parent_id for span in mine} == {REQUEST}
        told = [tuple(span.attributes[f"segue.{name}"] for name in ("start", "tokens", "outcome")) for span in mine]
        assert told == [
            (0, 256, "published"), (256, 32, "published"), (0, 256, "known"), (256, 32, "known"),
            (0, 256, "not resident"),
        ]  # fmt: skip
        assert all((span.attributes["segue.bytes"] > 0) is (index < 2) for index, span in enumerate(mine))
        assert all(span.end_ns >= span.start_ns for span in mine)
        # Of a malformed context comes a trace of its own; without one there is no span.
        assert len(spans) == len(mine) + 1
