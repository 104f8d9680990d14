"""This worker's own chunk bytes, as peers and the registration ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from libs.chunks.errors import TierError
from libs.chunks.local import LocalDirectory
from libs.chunks.tier import Held
from libs.contracts.segue.v1 import worker_pb2
from services.worker.handlers import DiskUse

PIECE_BYTES = 1 << 20
_WITHIN_S = 5.0


class DirectoryChunks:
    """Implements `LocalChunks` over the chunk directory; without one, nothing is there.

    Pieces are copied on threads: a file that is not in the page cache must not stop the event loop. The bytes are
    served as they lie; whoever receives them checks them.
    """

    def __init__(self, local: LocalDirectory | None, threads: int = 2) -> None:
        self._local = local
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="serve")

    @property
    def node(self) -> str:
        return "" if self._local is None else self._local.node

    def disk(self) -> DiskUse:
        return DiskUse(0, 0) if self._local is None else DiskUse(self._local.used, self._local.cap)

    async def open(self, wanted: worker_pb2.FetchChunkRequest) -> AsyncIterator[worker_pb2.FetchChunkResponse]:
        """See `LocalChunks.open`. An empty content id takes any computation of the object; past its end is nothing."""
        loop = asyncio.get_running_loop()
        held = await loop.run_in_executor(self._pool, self._lease, wanted)
        try:
            size = held.data.nbytes
            end = size if wanted.length == 0 else min(size, wanted.offset + wanted.length)
            for offset in range(wanted.offset, end, PIECE_BYTES):
                data = await loop.run_in_executor(self._pool, _copy, held, offset, min(offset + PIECE_BYTES, end))
                yield worker_pb2.FetchChunkResponse(offset=offset, data=data, size=size)
        finally:
            held.release()

    def _lease(self, wanted: worker_pb2.FetchChunkRequest) -> Held:
        missing = KeyError(f"{wanted.group} of chunk {wanted.hash}")
        if self._local is None:
            raise missing
        for key in self._local.find(wanted.fingerprint, wanted.owner, wanted.hash, wanted.group):
            if wanted.content_id in ("", key.content_id):
                try:
                    return self._local.get(key, 0, within=_WITHIN_S)
                except TierError:
                    continue
        raise missing

    async def aclose(self) -> None:
        """Waits for the pieces being copied."""
        await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)


def _copy(held: Held, start: int, end: int) -> bytes:
    return bytes(held.data[start:end])
