"""What a tier costs, measured: time before the first byte and bytes per millisecond, of late.

Reads overlap, and what matters to a restore is how fast its bytes come in all together. So the meter measures *busy
periods*: from the moment a first read starts until none is under way (or a second has passed). Over the periods of n
bytes and t ms it fits t = latency + n / rate by least squares of the relative error, so that short and long periods
count alike, each observation weighing less than the next one by a constant factor. Relative to what was expected: by
what was measured, quick reads would count more than slow ones of the same size, and the fit would be one of good luck.
(Where the two are far apart it is half or twice the measured time, so that neither one stall nor a bad guess decides.)
The guess stands in the fit as two faint observations, which decide as long as nothing else does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_KEEP = 0.85
_GUESS_WEIGHT = 0.01
_GUESSED_SIZES = (1, 8 << 20)
_APART = 2.0
_SHORTEST_MS = 0.01
_FASTEST = 1e9  # bytes per ms
_LONGEST_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Price:
    """Expected cost of reading from a tier. `samples` 0 = not measured, the numbers are a guess."""

    latency_ms: float
    bytes_per_ms: float
    samples: int = 0

    def ms(self, size: int) -> float:
        """Expected milliseconds for `size` bytes."""
        return self.latency_ms + size / self.bytes_per_ms


class Read:
    """One read under way; `bytes` is set by the reader when it is known, and stays 0 for a read that failed."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class CostMeter:
    """Thread-safe. `guess` is used until the first measurement."""

    def __init__(self, guess: Price, clock: Callable[[], float] = time.monotonic) -> None:
        self._price = guess
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._bytes = 0
        # Sums of the weights w, and of w·n, w·t, w·n², w·n·t.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        for size in _GUESSED_SIZES:
            self._add(size, guess.ms(size), _GUESS_WEIGHT, guess.ms(size))

    def price(self) -> Price:
        with self._lock:
            return self._price

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """Around one read that goes to the medium."""
        read = Read()
        with self._lock:
            if self._active == 0:
                self._since, self._bytes = self._clock(), 0
            self._active += 1
        try:
            yield read
        finally:
            with self._lock:
                now = self._clock()
                self._active -= 1
                self._bytes += read.bytes
                elapsed = now - self._since
                if self._bytes and (self._active == 0 or elapsed >= _LONGEST_PERIOD_S):
                    self._observe(self._bytes, elapsed * 1e3)
                    self._since, self._bytes = now, 0

    def observe(self, size: int, ms: float) -> None:
        """One read of `size` bytes that took `ms` in all."""
        with self._lock:
            self._observe(size, ms)

    def _observe(self, size: int, ms: float) -> None:
        if size <= 0 or ms <= 0:
            return
        expected_ms = self._price.ms(size)
        self._add(size, ms, 1.0, min(max(expected_ms, ms / _APART), ms * _APART))
        w, n, t, nn, nt = self._sums
        spread = w * nn - n * n
        slope = (w * nt - n * t) / spread if spread > 0 else 0.0
        latency = (t - slope * n) / w
        if slope <= 0:  # no visible cost per byte: all of it within the latency
            slope, latency = 1 / _FASTEST, t / w
        elif latency < _SHORTEST_MS:
            slope, latency = nt / nn, _SHORTEST_MS
        self._price = Price(latency, 1 / slope, self._price.samples + 1)

    def _add(self, size: int, ms: float, weight: float, relative_ms: float) -> None:
        weight /= relative_ms * relative_ms
        terms = (1.0, size, ms, size * size, size * ms)
        w, n, t, nn, nt = (_KEEP * old + weight * term for old, term in zip(self._sums, terms, strict=True))
        self._sums = (w, n, t, nn, nt)
