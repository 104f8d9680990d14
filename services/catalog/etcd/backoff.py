"""Exponential backoff with full jitter, so that what failed together does not come back together."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Pauses of a random length up to a ceiling that doubles from `first` to `limit` seconds."""

    def __init__(self, first: float = 0.1, limit: float = 1.0) -> None:
        self._first, self._limit = first, limit
        self._ceiling = first

    def reset(self) -> None:
        self._ceiling = self._first

    def next_pause(self) -> float:
        """Seconds. Never quite zero: a retry that always failed at once would spin."""
        pause = self._ceiling * random.uniform(0.05, 1.0)  # noqa: S311 - spread, not secrecy
        self._ceiling = min(self._ceiling * 2, self._limit)
        return pause

    async def pause(self) -> None:
        await asyncio.sleep(self.next_pause())
