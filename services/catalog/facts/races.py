"""Optimistic concurrency: read, decide, write if nothing changed, else read again."""

from __future__ import annotations

from collections.abc import AsyncIterator

from services.catalog.etcd.backoff import Backoff
from services.catalog.facts.errors import ContendedError

ATTEMPTS = 12


async def attempts(what: str) -> AsyncIterator[int]:
    """Yields before each attempt, with a jittered pause between them; ContendedError after ATTEMPTS.

    Each attempt must start from a new read: only that tells what the last one left behind.
    """
    backoff = Backoff(first=0.005, limit=0.25)
    for attempt in range(ATTEMPTS):
        if attempt:
            await backoff.pause()
        yield attempt
    raise ContendedError(what, ATTEMPTS)
