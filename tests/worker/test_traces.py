"""What of a request's trace goes on with its checkpoints, and where its own spans end."""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.controller.protocol import (
    AssignmentId,
    Candidate,
    GenerationRequest,
    Offer,
    Result,
    ResultStatus,
    Tier,
    TraceContext,
)
from libs.service import telemetry
from services.worker.endpoint.spans import Spans
from services.worker.handlers import CheckpointRange
from services.worker.unstored import NoCheckpointer, NoChunks, NoMemory, NoRestorer, NoTiers
from tests.fixtures.otlp import otlp_receiver
from tests.worker.rig import routing, running

PROMPT = tuple(range(600))
PARENT = "00-" + "4b" * 16 + "-" + "1a" * 8 + "-01"


class Offers(NoCheckpointer):
    """Notes what it is offered."""

    def __init__(self, leases: object) -> None:
        super().__init__(leases)  # type: ignore[arg-type]
        self.seen: list[CheckpointRange] = []

    def offer(self, what: CheckpointRange) -> None:
        self.seen.append(what)
        super().offer(what)


@dataclass
class Bytes:
    checkpointer: Offers
    restorer: NoRestorer = field(default_factory=NoRestorer)
    local: NoChunks = field(default_factory=NoChunks)
    memory: NoMemory = field(default_factory=NoMemory)
    measurements: NoTiers = field(default_factory=NoTiers)

    async def aclose(self) -> None: ...


async def test_every_range_names_the_trace_of_the_request_that_computed_it() -> None:
    made: list[Bytes] = []

    def handlers(pool: object) -> Bytes:
        made.append(Bytes(Offers(pool)))
        return made[0]

    async with running(handlers) as worker, routing(worker) as router:  # type: ignore[arg-type]
        await (await router.offer(PROMPT, 3, traceparent=PARENT)).finish()
        await worker.rest()
        seen = made[0].checkpointer.seen
        # Two chunks while it computed, and the tail after its result.
        assert [(what.start, what.end) for what in seen] == [(0, 256), (256, 512), (512, 592)]
        assert {what.traceparent for what in seen} == {PARENT}
        seen.clear()
        await (await router.offer(tuple(range(1_000, 1_300)), 3, name="r2")).finish()
        await worker.rest()
        assert [what.traceparent for what in seen] == ["", ""]
        assert not worker.worker.interpreter._spans._open


async def test_nothing_is_recorded_after_the_result() -> None:
    """A device loop may grant a lane to what was cancelled meanwhile."""
    async with otlp_receiver() as collector:
        assert telemetry.configure("worker", collector.endpoint)
        try:
            spans, assignment = Spans(), AssignmentId("r", 1)
            request = GenerationRequest("r", "m", (1, 2), 2, 1, trace=TraceContext(PARENT))
            with spans.reserving(Offer(assignment, 1, request, "f", Candidate("w", 1, "f", Tier.NONE))):
                pass
            spans.ended(Result(assignment, 1, ResultStatus.CANCELLED))
            spans.lane(assignment)
            spans.prefilled(assignment)
            assert spans.traceparent(assignment) == PARENT
            spans.forget(assignment)
            assert spans.traceparent(assignment) == ""
        finally:
            await telemetry.shutdown()
        assert [span.name for span in collector.spans] == ["worker.reserve", "worker.queue"]
