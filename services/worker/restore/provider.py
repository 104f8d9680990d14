"""The content provider: objects in place, each fetched once however many want it, bounded in number and in bytes.

`admit` waits for room in the byte budget for all objects of a node at once, and holds nothing of the node meanwhile. A
restore admits its nodes in chain order and releases each when it is on the device. So whatever is held belongs to a
node that is wholly admitted, behind nodes that are too, and is given back without waiting for anybody: no two restores,
and no two objects of one, can wait for each other. Bytes count from admission until the last user has released the
object; one from the object store that is still to be written to the chunk directory is counted by the keeper from then
on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.chunks.gate import ByteGate
from libs.chunks.tier import TierKind
from libs.chunks.verified import check_tokens
from libs.continuation.errors import TokenMismatchError
from libs.continuation.keys import ObjectKey
from services.worker.handlers import RestoreEnd
from services.worker.restore.keeper import Keeper
from services.worker.restore.needs import Identity, ObjectNeed
from services.worker.restore.settings import RestoreCounts, RestoreSettings
from services.worker.restore.sources import Fetch, Localized, NotLocalized, Sources, Tiers


@dataclass(eq=False, slots=True)
class _Shared:
    """One fetch and those who wait for it or use what it brought."""

    need: ObjectNeed
    size: int
    fetch: Fetch
    users: int = 0
    task: asyncio.Task[Localized | NotLocalized] | None = None
    dropped: bool = False


class Ticket:
    """One user's hold on an object; `release` exactly once, whether or not it ever came."""

    def __init__(self, provider: ContentProvider, shared: _Shared, need: ObjectNeed) -> None:
        self._provider, self._shared, self._need = provider, shared, need
        self._released = False

    async def localized(self) -> Localized | NotLocalized:
        """Waits for the fetch; cancelling the wait leaves it running for the others."""
        assert self._shared.task is not None
        found = await asyncio.shield(self._shared.task)
        if isinstance(found, Localized) and self._need is not self._shared.need:
            try:
                check_tokens(found.opened.view, self._need.tokens)
            except TokenMismatchError as error:
                return NotLocalized(RestoreEnd.CORRUPT, str(error))
        return found

    def release(self) -> None:
        """Idempotent."""
        if not self._released:
            self._released = True
            self._provider._left(self._shared)


class ContentProvider:
    """Event-loop side of fetching. `kept`: called from a thread for each object newly in the chunk directory."""

    def __init__(
        self, tiers: Tiers, settings: RestoreSettings, counts: RestoreCounts, kept: Callable[[ObjectKey], None]
    ) -> None:
        self.sources = Sources(tiers, settings, counts)
        self._counts = counts
        self._gate = ByteGate(settings.fetch_bytes)
        self._keeper = Keeper(tiers.memory, tiers.local, settings.persist_bytes, counts, kept)
        self._shared: dict[Identity, _Shared] = {}
        self._tasks: set[asyncio.Task[Localized | NotLocalized]] = set()

    async def admit(self, needs: Sequence[ObjectNeed]) -> list[Ticket]:
        """Waits for room for all of a node's objects, then starts each fetch or joins the one under way."""
        sizes = [need.bytes for need in needs]
        if all(need.identity in self._shared for need in needs):
            return [self._joined(need) for need in needs]
        self._counts.waiting += 1
        try:
            await self._gate.acquire(sum(sizes))
        finally:
            self._counts.waiting -= 1
        tickets: list[Ticket] = []
        for need, size in zip(needs, sizes, strict=True):
            if need.identity in self._shared:
                self._gate.release(size)
                tickets.append(self._joined(need))
            else:
                tickets.append(self._started(need, size))
        self._counts.fetch_bytes = self._gate.used
        return tickets

    def _joined(self, need: ObjectNeed) -> Ticket:
        shared = self._shared[need.identity]
        shared.users += 1
        self._counts.shared += 1
        return Ticket(self, shared, need)

    def _started(self, need: ObjectNeed, size: int) -> Ticket:
        shared = _Shared(need, size, Fetch(self.sources, need), users=1)
        self._shared[need.identity] = shared
        shared.task = asyncio.create_task(self._fetch(shared), name=f"fetch {need.metadata.hash[:12]}")
        self._tasks.add(shared.task)
        shared.task.add_done_callback(lambda task: self._ended(shared, task))
        return Ticket(self, shared, need)

    async def _fetch(self, shared: _Shared) -> Localized | NotLocalized:
        self._counts.fetching += 1
        try:
            found = await shared.fetch.run()
        finally:
            self._counts.fetching -= 1
        self._counts.corrupt += found.damaged
        if isinstance(found, Localized):
            if found.kind is TierKind.SSD:
                self._keeper.remember(found.wanted.key, found.wanted.size)
            elif found.kind is not TierKind.RAM:
                self._keeper.keep(found.wanted.key, found.opened.held.data)
        elif shared.users:
            self._counts.gone += found.end is RestoreEnd.GONE
            self._counts.unavailable += found.end is RestoreEnd.UNAVAILABLE
        return found

    def _ended(self, shared: _Shared, task: asyncio.Task[Localized | NotLocalized]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is not None or isinstance(task.result(), NotLocalized):
            self._forget(shared)  # the next one tries again
        if shared.users == 0:
            self._drop(shared)

    def _left(self, shared: _Shared) -> None:
        shared.users -= 1
        if shared.users == 0:
            self._forget(shared)
            if shared.task is not None and shared.task.done():
                self._drop(shared)
            else:
                shared.fetch.end()

    def _drop(self, shared: _Shared) -> None:
        """Once per fetch: it is over and nobody uses it."""
        if shared.dropped:
            return
        shared.dropped = True
        task = shared.task
        if task is not None and not task.cancelled() and task.exception() is None:
            found = task.result()
            if isinstance(found, Localized):
                found.opened.release()
        self._gate.release(shared.size)
        self._counts.fetch_bytes = self._gate.used

    def _forget(self, shared: _Shared) -> None:
        if self._shared.get(shared.need.identity) is shared:
            del self._shared[shared.need.identity]

    async def aclose(self) -> None:
        """Ends the fetches under way and the writing behind them."""
        for shared in list(self._shared.values()):
            shared.fetch.end()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.sources.settled()
        await asyncio.get_running_loop().run_in_executor(None, self._close_threads)

    def _close_threads(self) -> None:
        self.sources.close()
        self._keeper.close()
