"""FetchChunk: the bytes of one chunk object for a peer, fenced by epoch."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from libs.contracts.segue.v1 import worker_pb2 as pb
from services.worker.endpoint.errors import ChunkMissingError, PeersServedError, StaleEpochError
from services.worker.handlers import ChunksBusyError, LocalChunks


async def fetch_chunk(
    request: pb.FetchChunkRequest, epoch: int, chunks: LocalChunks
) -> AsyncGenerator[pb.FetchChunkResponse, None]:
    """Pieces, under a lease that ends with this generator: the caller's deadline or departure closes it.

    Raises StaleEpochError for another process's epoch (0 = any), ChunkMissingError, PeersServedError.
    """
    if request.epoch and request.epoch != epoch:
        raise StaleEpochError(request.epoch, epoch)
    try:
        async with aclosing(chunks.open(request)) as pieces:
            async for piece in pieces:
                yield piece
    except KeyError:
        raise ChunkMissingError(
            f"object {request.hash}/{request.group}/{request.content_id} is not here",
            remedy="fetch it from another replica or from the object store",
            values={"hash": request.hash, "group": request.group},
        ) from None
    except ChunksBusyError as error:
        raise PeersServedError(str(error)) from None
