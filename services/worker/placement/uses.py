"""Tells the catalog which chunks restores have used, about once a minute: what is used is not collected."""

from __future__ import annotations

import asyncio
import random

import grpc

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from services.worker.placement.settings import PlacementCounts

_EVERY_S = 60.0
_LIMIT = 10_000
_BATCH = 1_000
_CALL_S = 3.0


class UseReporter:
    """`used` on the event loop; `run` sends until cancelled. Each chunk waits once, however often it was used."""

    def __init__(self, catalog: grpc.aio.Channel, counts: PlacementCounts, every_s: float = _EVERY_S) -> None:
        self._stub = catalog_pb2_grpc.CatalogStub(catalog)  # type: ignore[no-untyped-call, unused-ignore]
        self._counts, self._every_s = counts, every_s
        self._waiting: dict[tuple[str, str], None] = {}

    def used(self, fingerprint: str, hash: str) -> None:
        """A chunk was restored."""
        if len(self._waiting) >= _LIMIT and (fingerprint, hash) not in self._waiting:
            self._counts.unused += 1
            return
        self._waiting[fingerprint, hash] = None

    async def run(self) -> None:
        """Sends."""
        while True:
            await asyncio.sleep(self._every_s * random.uniform(0.8, 1.2))  # noqa: S311 - spread
            await self.flush()

    async def flush(self) -> None:
        """Sends what waits; what fails waits for the next time."""
        while self._waiting:
            batch = list(self._waiting)[:_BATCH]
            request = pb.RecordUseRequest(
                chunks=[pb.ChunkId(fingerprint=fingerprint, hash=hash) for fingerprint, hash in batch]
            )
            try:
                await self._stub.RecordUse(request, timeout=_CALL_S)
            except grpc.aio.AioRpcError:
                return
            for chunk in batch:
                self._waiting.pop(chunk, None)
            self._counts.used += len(batch)
