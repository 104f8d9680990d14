"""What happens next: a heap of actions keyed (time, serial). Equal times keep the order they were planned in."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[..., None]


class Agenda:
    """Logical time in ms, from 0. An action that has become void must notice that itself: nothing is taken back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, Action, tuple[object, ...]]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_ms(self) -> float:
        """When the next action is due; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def at(self, time_ms: float, action: Action, *arguments: object) -> None:
        """Plans an action; in the past means now."""
        self._serial += 1
        heappush(self._heap, (time_ms if time_ms > self.now else self.now, self._serial, action, arguments))

    def after(self, delay_ms: float, action: Action, *arguments: object) -> None:
        """Plans an action `delay_ms` from now."""
        self.at(self.now + delay_ms, action, *arguments)

    def step(self) -> bool:
        """Does what is due next; False if nothing is left."""
        if not self._heap:
            return False
        self.now, _, action, arguments = heappop(self._heap)
        action(*arguments)
        return True
