"""This worker's own chunk bytes, as peers and the registration ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from libs.chunks.errors import TierError
from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.chunks.tier import Held
from libs.contracts.segue.v1 import worker_pb2
from services.worker.handlers import ChunksBusyError, DiskUse

PIECE_BYTES = 1 << 20
_WITHIN_S = 5.0


def _counter(about: str, kind: str = "counter") -> int:
    found: int = field(default=0, metadata={"help": about, "kind": kind})
    return found


@dataclass
class ServeCounts:
    """Counters of serving peers."""

    streams: int = _counter("Objects being sent to peers", "gauge")
    piece_bytes: int = _counter("Bytes copied for peers and not yet taken over by the network", "gauge")
    served: int = _counter("Objects sent to peers whole")
    served_bytes: int = _counter("Bytes sent to peers")
    cut: int = _counter("Objects whose sending ended early: the peer went away, or ran out of time")
    refused: int = _counter("Requests of peers refused because too many were under way")
    missing: int = _counter("Requests of peers for objects that are not here")


class ServedChunks:
    """Implements `LocalChunks` over host memory and chunk directory, whichever there are.

    At most `streams` objects at a time, each with one piece of at most 1 MiB copied ahead of the network; a request
    beyond that is refused at once. An object is sent under a lease of its tier, which ends after the last copy from it:
    no byte comes from memory or from a file that was given to another. Pieces are copied on threads: a file that is not
    in the page cache must not stop the event loop. Bytes are served as they lie; whoever receives them checks them.
    """

    def __init__(
        self, local: LocalDirectory | None, memory: HostMemory | None = None, *, threads: int = 2, streams: int = 8
    ) -> None:
        self._local, self._streams = local, streams
        self._tiers: Sequence[HostMemory | LocalDirectory] = [tier for tier in (memory, local) if tier is not None]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="serve")
        self.counts = ServeCounts()

    @property
    def node(self) -> str:
        return "" if self._local is None else self._local.node

    def disk(self) -> DiskUse:
        return DiskUse(0, 0) if self._local is None else DiskUse(self._local.used, self._local.cap)

    async def open(self, wanted: worker_pb2.FetchChunkRequest) -> AsyncGenerator[worker_pb2.FetchChunkResponse, None]:
        """See `LocalChunks.open`. An empty content id takes any computation of the object; past its end is nothing."""
        if self.counts.streams >= self._streams:
            self.counts.refused += 1
            raise ChunksBusyError(f"{self._streams} objects are being sent already")
        self.counts.streams += 1
        whole = False
        try:
            async with aclosing(self._pieces(wanted)) as pieces:
                async for piece in pieces:
                    self.counts.piece_bytes += len(piece.data)
                    try:
                        yield piece
                    finally:
                        self.counts.piece_bytes -= len(piece.data)
                    self.counts.served_bytes += len(piece.data)
            whole = True
        except KeyError:
            whole = True
            self.counts.missing += 1
            raise
        else:
            self.counts.served += 1
        finally:
            self.counts.cut += not whole
            self.counts.streams -= 1

    async def _pieces(
        self, wanted: worker_pb2.FetchChunkRequest
    ) -> AsyncGenerator[worker_pb2.FetchChunkResponse, None]:
        loop = asyncio.get_running_loop()
        held = await loop.run_in_executor(self._pool, self._lease, wanted)
        copying: asyncio.Future[bytes] | None = None
        try:
            size = held.data.nbytes
            if size == 0:  # damaged: said by its size
                yield worker_pb2.FetchChunkResponse(size=size)
            end = size if wanted.length == 0 else min(size, wanted.offset + wanted.length)
            for offset in range(wanted.offset, end, PIECE_BYTES):
                copying = loop.run_in_executor(self._pool, _copy, held, offset, min(offset + PIECE_BYTES, end))
                data = await asyncio.shield(copying)
                yield worker_pb2.FetchChunkResponse(offset=offset, data=data, size=size)
        finally:
            # The lease outlives the copy, also where the peer has gone in the middle of it.
            while copying is not None and not copying.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            held.release()

    def _lease(self, wanted: worker_pb2.FetchChunkRequest) -> Held:
        for tier in self._tiers:
            for key in tier.find(wanted.fingerprint, wanted.owner, wanted.hash, wanted.group):
                if wanted.content_id in ("", key.content_id):
                    with suppress(TierError):
                        return tier.get(key, 0, within=_WITHIN_S)
        raise KeyError(f"{wanted.group} of chunk {wanted.hash}")

    async def aclose(self) -> None:
        """Waits for the pieces being copied."""
        await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)


def _copy(held: Held, start: int, end: int) -> bytes:
    return bytes(held.data[start:end])
