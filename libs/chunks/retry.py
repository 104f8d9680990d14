"""Retries with full jitter, bounded by attempts and by a deadline.

AWS Architecture Blog, "Exponential Backoff And Jitter".
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from libs.chunks.errors import AbortedError, SlowTierError, TierError

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class Deadline:
    """A moment on the monotonic clock, and perhaps an event that ends the wait before."""

    def __init__(self, within: float, abort: threading.Event | None = None) -> None:
        self._end = time.monotonic() + within
        self._abort = abort

    @property
    def left(self) -> float:
        """Seconds; never negative."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Raises SlowTierError past the deadline, AbortedError once aborted."""
        if self._abort is not None and self._abort.is_set():
            raise AbortedError(f"{what} was aborted", remedy="nobody waits for it")
        if self.left <= 0:
            raise SlowTierError(f"{what} took too long", remedy="check the store's load, or allow more time")

    def pause(self, seconds: float) -> None:
        """Sleeps, at most until the deadline or the abort."""
        seconds = min(seconds, self.left)
        if self._abort is None:
            time.sleep(seconds)
        else:
            self._abort.wait(seconds)


def pause_before(attempt: int) -> float:
    """Seconds to wait before attempt 1, 2, … (0 is the first try)."""
    return random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt))  # noqa: S311


def with_retries(work: Callable[[], T], deadline: Deadline, what: str, attempts: int) -> T:
    """Runs `work`, again after a retryable error, until it succeeds, the attempts are used up or the time is."""
    for attempt in range(attempts):
        deadline.check(what)
        try:
            return work()
        except TierError as error:
            pause = pause_before(attempt + 1)
            if not error.retryable or attempt + 1 == attempts or pause >= deadline.left:
                raise
            deadline.pause(pause)
    raise AssertionError("attempts is at least 1")
