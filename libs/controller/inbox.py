"""Events on their way to a machine, one at a time. What obeying an effect gives rise to waits until all effects of the
event at hand have been obeyed: a machine is never entered twice. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")


class Inbox(Generic[E]):
    """`handle` lets the machine handle one event and obeys it."""

    def __init__(self, handle: Callable[[E], None]) -> None:
        self._handle = handle
        self._events: deque[E] = deque()
        self._feeding = False

    def feed(self, event: E) -> None:
        """Handles the event and all that follows from it; from within, afterwards. Raises what `handle` does."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._feeding = False

    def clear(self) -> None:
        """What waits is forgotten."""
        self._events.clear()
