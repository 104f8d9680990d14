"""How long to wait for a read before another source is asked as well: measured, per medium.

A read is late when it has taken longer than nearly all reads of late did, each in relation to what was expected of it:
the delay is the expectation times the 95th percentile of measured over expected (Dean and Barroso, "The Tail at Scale",
2013). Only reads that delivered count, so that a stall does not teach patience.
"""

from __future__ import annotations

import threading
from collections import deque

_KEPT = 64
_QUANTILE = 0.95
_LEAST_RATIO = 2.0
_UNMEASURED_RATIO = 4.0


class Patience:
    """Thread-safe. floor_ms: never late before; most_ms: late by then, if that is later than floor_ms."""

    def __init__(self, floor_ms: float = 100.0, most_ms: float = 1_000.0) -> None:
        self._floor_ms, self._most_ms = floor_ms, most_ms
        self._ratios: deque[float] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def observe(self, expected_ms: float, ms: float) -> None:
        """A read that delivered."""
        with self._lock:
            self._ratios.append(ms / max(expected_ms, 1e-3))

    def delay_ms(self, expected_ms: float) -> float:
        """From the beginning of a read until it is late."""
        with self._lock:
            ordered = sorted(self._ratios)
        ratio = max(_LEAST_RATIO, ordered[int(_QUANTILE * (len(ordered) - 1))]) if ordered else _UNMEASURED_RATIO
        return max(self._floor_ms, min(self._most_ms, expected_ms * ratio))
