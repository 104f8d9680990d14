"""In-process carriers for tests that want no sockets: two ends, bounded queues, frames can be edited on the way."""

import asyncio
from collections.abc import Callable
from typing import ClassVar

from libs.tunnel import CarrierLostError

# What becomes of one frame on its way: the frames that arrive instead.
Edit = Callable[[bytes], list[bytes]]


class MemoryCarrier:
    """One end; see ``pair``."""

    cancel_overtakes: ClassVar[bool] = True

    def __init__(self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._ended = False
        self.edit: Edit | None = None
        self.cancelled = False
        # Clear to freeze this end's sending: write waits.
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.written: list[bytes] = []

    @property
    def peer(self) -> str:
        return "memory"

    async def read(self) -> bytes | None:
        if self._ended:
            return None
        data = await self._inbox.get()
        if data is None:
            self._ended = True
        return data

    async def write(self, data: bytes) -> None:
        await self.flowing.wait()
        if self.cancelled:
            raise CarrierLostError("cancelled")
        self.written.append(data)
        for piece in [data] if self.edit is None else self.edit(data):
            await self._outbox.put(piece)

    async def finish(self) -> None:
        await self._outbox.put(None)

    def cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            for queue in (self._outbox, self._inbox):
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait(None)

    def lost(self) -> bool:
        return False


def pair(depth: int = 64) -> tuple[MemoryCarrier, MemoryCarrier]:
    """Two connected ends; each direction holds ``depth`` frames before write waits."""
    up: asyncio.Queue[bytes | None] = asyncio.Queue(depth)
    down: asyncio.Queue[bytes | None] = asyncio.Queue(depth)
    return MemoryCarrier(down, up), MemoryCarrier(up, down)
