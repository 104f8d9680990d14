"""The publication guard: the barriers under which writers are published, replaced, and generations committed.

Taken in one order everywhere: writers -> registry binding -> reinit coordinator. Waiting for any of them may be
cancelled, and then nothing has happened. Whoever holds the guard does what it came for in one plain call and awaits
nothing, so no cancellation falls between publication and retirement. A bind takes the middle one alone.

What only ever removes (a tunnel that broke, a route that ended) waits for nobody.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self


class PublicationGuard:
    """An async context manager, for one task at a time; the next waits."""

    def __init__(self, binding: asyncio.Lock) -> None:
        self.writers = asyncio.Lock()
        self.binding = binding
        self.reinit = asyncio.Lock()
        self._held: AsyncExitStack | None = None

    @property
    def held(self) -> bool:
        """Whether somebody holds all of it."""
        return self._held is not None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as taking:
            for lock in (self.writers, self.binding, self.reinit):
                await taking.enter_async_context(lock)
            self._held = taking.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        assert held is not None
        # Releasing a lock suspends nobody.
        await held.aclose()
