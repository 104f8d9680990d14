"""What checkpoints may use, and what they count."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Bounds of checkpointing.

    staging_bytes: captured bytes not yet durable. pending_ranges: offers not settled. patience_s: a range that is not
    durable by then is given up (until then it keeps its route's pages from being evicted). uploads: chunks written at a
    time. put_timeout_s: one object. catalog_timeout_s: one call. batch: chunks per call (each costs the event loop some
    50 µs).
    """

    staging_bytes: int = 256 << 20
    pending_ranges: int = 4_096
    patience_s: float = 60.0
    uploads: int = 2
    put_timeout_s: float = 10.0
    catalog_timeout_s: float = 3.0
    batch: int = 16


def _counter(about: str, kind: str = "counter") -> int:
    found: int = field(default=0, metadata={"help": about, "kind": kind})
    return found


@dataclass
class CheckpointMetrics:
    """Counters of checkpointing. Every offer ends in exactly one of durable, lost."""

    offered: int = _counter("Ranges offered")
    pending: int = _counter("Ranges offered and not settled", "gauge")
    durable: int = _counter("Ranges whose fact stands")
    known: int = _counter("Of them, ranges that somebody else had published already")
    lost: int = _counter("Ranges given up")
    lost_not_resident: int = _counter("Ranges given up because their pages were gone")
    lost_too_late: int = _counter("Ranges given up because they were not durable in time")
    lost_refused: int = _counter("Ranges given up because the catalog refused them")
    lost_orphans: int = _counter("Ranges given up because their parent was")
    lost_queue_full: int = _counter("Ranges given up because too many were pending")
    offered_again: int = _counter("Ranges given up that a drain offered once more")
    dropped: int = _counter("Ranges skipped because staging was full; they are tried again in chain order")
    staged_bytes: int = _counter("Bytes in staging", "gauge")
    captured_bytes: int = _counter("Bytes copied from pages")
    local_failed: int = _counter("Objects not written to the chunk directory: no room, or an error")
    put_failed: int = _counter("Attempts to write an object that failed")
    catalog_failed: int = _counter("Calls to the catalog that failed")
    unasked: int = _counter("Ranges uploaded without knowing whether somebody else had published them")
