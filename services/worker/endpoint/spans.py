"""One span per phase of an assignment, under the request's own trace: reserve, queue, prefill, decode.

The phases begin and end in different callbacks, so their times are kept and the spans recorded when a phase is over. A
request that is not traced costs a dictionary look-up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.context import Context

from libs.controller.protocol import AssignmentId, Offer, Result
from libs.service import telemetry


@dataclass(slots=True)
class _Phases:
    traceparent: str
    parent: Context
    since_ns: int
    phase: str = "worker.queue"
    """Empty once the result is out."""


class Spans:
    """Of every traced assignment under way. Times in ns since the Unix epoch, as OpenTelemetry has them."""

    def __init__(self) -> None:
        self._open: dict[AssignmentId, _Phases] = {}

    @contextmanager
    def reserving(self, offer: Offer) -> Iterator[None]:
        """Around the reservation of pages."""
        trace = offer.request.trace
        if not trace.traceparent:
            yield
            return
        parent = telemetry.extract(trace.traceparent, trace.tracestate)
        attributes: telemetry.Attributes = {
            "segue.request_id": offer.assignment.request_id,
            "segue.attempt": offer.assignment.attempt,
        }
        with telemetry.span("worker.reserve", attributes, parent=parent):
            yield
        self._open[offer.assignment] = _Phases(trace.traceparent, parent, time.time_ns())

    def lane(self, assignment: AssignmentId) -> None:
        """The job has a lane."""
        self._next(assignment, "worker.prefill")

    def prefilled(self, assignment: AssignmentId) -> None:
        """The input is computed."""
        self._next(assignment, "worker.decode")

    def traceparent(self, assignment: AssignmentId) -> str:
        """For work that comes of the assignment and outlives it, until `forget`; empty = not traced."""
        phases = self._open.get(assignment)
        return "" if phases is None else phases.traceparent

    def ended(self, result: Result) -> None:
        """The result is out."""
        usage = result.usage
        self._next(
            result.assignment,
            "",
            {
                "segue.cached_tokens": usage.cached_tokens,
                "segue.restored_tokens": usage.restored_tokens,
                "segue.computed_tokens": usage.computed_tokens,
                "segue.generated_tokens": usage.generated_tokens,
                "segue.status": result.status.name,
            },
        )

    def forget(self, assignment: AssignmentId) -> None:
        """Its pages are released: nothing more comes. Idempotent."""
        self._open.pop(assignment, None)

    def _next(self, assignment: AssignmentId, phase: str, attributes: telemetry.Attributes | None = None) -> None:
        phases = self._open.get(assignment)
        if phases is None or not phases.phase:
            return
        now = time.time_ns()
        telemetry.record(phases.phase, phases.since_ns, now, attributes, parent=phases.parent)
        phases.phase, phases.since_ns = phase, now
