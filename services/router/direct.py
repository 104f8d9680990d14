"""A requester that is a `Generate` call: its deliveries in order, tokens that wait merged.

What waits is bounded by the request's own budget, for waiting tokens become one delivery.
"""

from __future__ import annotations

import asyncio
from collections import deque

from libs.controller.merging import joined
from libs.controller.protocol import Delivery


class DirectSink:
    """See Sink. One consumer."""

    def __init__(self) -> None:
        self._waiting: deque[Delivery] = deque()
        self._news = asyncio.Event()

    def deliver(self, delivery: Delivery) -> None:
        """See Sink."""
        merged = joined(self._waiting[-1], delivery) if self._waiting else None
        if merged is not None:
            self._waiting[-1] = merged
        else:
            self._waiting.append(delivery)
        self._news.set()

    async def receive(self) -> Delivery:
        """The next delivery. Ends with the request at the latest, which has a deadline."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()
