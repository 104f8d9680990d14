"""The catalog as a worker's storage uses it: ask, publish, record replicas. Every call has a deadline.

Two kinds of failure. `CatalogAwayError`: no answer, or one that may change by itself; try again later. `RefusedError`:
the catalog has decided; trying again is of no use.

The tenant's salt is not known here and not needed: ranges are asked about under their parent, the first under its root.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import grpc

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.errors import read_error
from services.worker.checkpoint.mover import Moved
from services.worker.handlers import CheckpointRange

_DECIDED = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
_NOT_YET = frozenset({"UNKNOWN_MODEL"})
# The catalog takes 1,000; building so many would hold up the event loop.
REPLICA_BATCH = 100


class CatalogAwayError(Exception):
    """Not now. `retry_after_s`: the catalog's own advice."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """Never. `reason` is the catalog's."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CatalogFacts:
    """Calls over one channel, which stays the caller's."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._timeout_s = timeout_s

    async def standing(self, run: Sequence[CheckpointRange]) -> dict[str, frozenset[str]]:
        """For a chain of ranges, the groups with a receipt by hash; ranges not named are unknown.

        Raises CatalogAwayError, RefusedError.
        """
        first = run[0]
        request = pb.LookupRequest(fingerprint=first.fingerprint, after=first.parent, start=first.start)
        for what in run:
            request.tokens.extend(what.tokens)
        reply = cast("pb.LookupResponse", await self._call(self._stub.Lookup, request))
        nodes = [*reply.nodes, *([reply.tail] if reply.HasField("tail") else [])]
        return {node.chunk.hash: frozenset(receipt.group for receipt in node.chunk.receipts) for node in nodes}

    async def publish(self, batch: Sequence[Moved], node: str) -> None:
        """Records chunks, parents first; `node`: every object of all of them lies in that directory too.

        Raises CatalogAwayError, RefusedError (then none of them is recorded, as far as it is about them).
        """
        request = pb.PublishRequest(fingerprint=batch[0].captured.what.fingerprint, node=node)
        for moved in batch:
            what = moved.captured.what
            request.chunks.append(
                pb.Chunk(
                    hash=what.hash,
                    parent=what.parent,
                    start=what.start,
                    end=what.end,
                    tokens_sha256=moved.captured.tokens_sha256,
                    owner=what.owner,
                    tail=what.tail,
                    receipts=[
                        pb.Receipt(
                            group=receipt.group,
                            bucket=receipt.bucket,
                            key=receipt.key,
                            etag=receipt.etag,
                            size=receipt.size,
                            content_id=receipt.content_id,
                        )
                        for receipt in moved.receipts
                    ],
                )
            )
        await self._call(self._stub.Publish, request)

    async def set_replicas(self, updates: Sequence[pb.ReplicaUpdate]) -> frozenset[str]:
        """At most REPLICA_BATCH. Returns the hashes of chunks that are no facts, whose updates were left out.

        Raises CatalogAwayError, RefusedError.
        """
        request = pb.SetReplicaRequest(updates=updates)
        reply = cast("pb.SetReplicaResponse", await self._call(self._stub.SetReplica, request))
        return frozenset(reply.unknown)

    async def _call(self, method: Callable[..., Awaitable[object]], request: object) -> object:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            details = read_error(error)
            if details.code in _DECIDED and details.reason not in _NOT_YET:
                raise RefusedError(details.message, details.reason) from error
            raise CatalogAwayError(details.message, details.retry_after_s) from error
