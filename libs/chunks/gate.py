"""Admission by bytes: first come, first served, on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteGate:
    """At most `limit` bytes at a time; something larger than the limit passes alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def acquire(self, size: int) -> None:
        """Waits for room. Cancelled, it takes none."""
        if not self._waiting and self._fits(size):
            self.used += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)
            else:
                self._waiting = deque(item for item in self._waiting if item[1] is not turn)
                self._admit()
            raise

    def release(self, size: int) -> None:
        self.used -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return self.used + size <= self.limit or self.used == 0

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self.used += size
                turn.set_result(None)
