"""A span per traced range, `worker.checkpoint`, from its offer to its settlement, in the trace of its request.

The request may be over by then: the span is a sibling of its other phases and ends after them. A range that several
requests computed has one in each of their traces; `segue.bytes` is what was written for this one, 0 where its range was
known or travelled for another's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from libs.service import telemetry
from services.worker.checkpoint.ledger import Settlement
from services.worker.handlers import CheckpointRange


@dataclass(slots=True)
class _Open:
    since_ns: int
    bytes: int = 0


class Spans:
    """Of every traced offer under way; one that is not traced costs a look at an empty string."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def offered(self, what: CheckpointRange) -> None:
        """It begins."""
        if what.traceparent:
            self._open[what.route, what.hash] = _Open(time.time_ns())

    def captured(self, what: CheckpointRange, bytes: int) -> None:
        """It is on its way, in objects of that many bytes."""
        if (found := self._open.get((what.route, what.hash))) is not None:
            found.bytes = bytes

    def settled(self, settlement: Settlement) -> None:
        """It has ended."""
        what = settlement.what
        if (found := self._open.pop((what.route, what.hash), None)) is None:
            return
        about: telemetry.Attributes = {
            "segue.request_id": what.assignment.request_id,
            "segue.attempt": what.assignment.attempt,
            "segue.start": what.start,
            "segue.tokens": what.end - what.start,
            "segue.bytes": found.bytes,
            "segue.outcome": settlement.end.value,
        }
        parent = telemetry.extract(what.traceparent)
        telemetry.record("worker.checkpoint", found.since_ns, time.time_ns(), about, parent=parent)
