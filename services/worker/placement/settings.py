"""What the promoter may use, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PromoterSettings:
    """copies: objects copied at a time (threads of low priority). limit: their bytes. copy_timeout_s: one object.
    retry_s: after a copy that failed, how long its demand rests. call_timeout_s: one call to the catalog.
    """

    copies: int = 2
    limit: int = 64 << 20
    copy_timeout_s: float = 30.0
    retry_s: float = 30.0
    call_timeout_s: float = 3.0


def _counter(about: str, kind: str = "counter") -> int:
    found: int = field(default=0, metadata={"help": about, "kind": kind})
    return found


@dataclass
class PlacementCounts:
    """Counters of placement."""

    demands: int = _counter("Demands for this worker's chunk directory", "gauge")
    copying: int = _counter("Objects being copied to meet demands", "gauge")
    copying_bytes: int = _counter("Their bytes", "gauge")
    met: int = _counter("Demands met by copying, and withdrawn")
    complete: int = _counter("Demands withdrawn because everything was here already")
    failed: int = _counter("Demands that could not be met at a try")
    unmeetable: int = _counter("Demands withdrawn because their chunk is no fact any more")
    copied: int = _counter("Objects copied to meet demands")
    copied_bytes: int = _counter("Bytes copied to meet demands")
    damaged: int = _counter("Objects found damaged while they were copied")
    removed: int = _counter("Objects removed because their facts are gone")
    used: int = _counter("Uses of chunks told to the catalog")
    unused: int = _counter("Uses of chunks not told: too many waited")
