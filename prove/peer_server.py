"""Another worker as far as its chunks go: FetchChunk over a socket, from a chunk directory claimed in the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from libs.chunks.local import LocalDirectory
from libs.contracts.segue.v1 import worker_pb2, worker_pb2_grpc
from libs.controller.catalog_facts import Endpoint
from libs.service.grpc_server import GrpcServer
from libs.service.transport import Transport
from services.worker.endpoint.fetching import fetch_chunk
from services.worker.registration import Registration
from services.worker.restore.local_chunks import ServeCounts, ServedChunks

_CALL_S = 10.0
_CAP = 1 << 40


class _Chunks(worker_pb2_grpc.WorkerServicer):
    """The part of a worker that peers use."""

    def __init__(self, chunks: ServedChunks) -> None:
        self._chunks = chunks
        self.epoch = 0

    async def FetchChunk(  # noqa: N802 - the contract's name
        self, request: worker_pb2.FetchChunkRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.FetchChunkResponse, None]:
        async for piece in fetch_chunk(request, self.epoch, self._chunks):
            yield piece


@dataclass(frozen=True)
class PeerServer:
    """`node`: UUID of the directory it serves; `epoch`: as the catalog gave it."""

    node: str
    epoch: int
    counts: ServeCounts


@asynccontextmanager
async def peer_server(directory: Path, catalog: grpc.aio.Channel, worker: str) -> AsyncIterator[PeerServer]:
    """Serves a directory that nobody else uses."""
    local = LocalDirectory(directory, cap=_CAP)
    chunks = ServedChunks(local)
    servicer = _Chunks(chunks)
    server = GrpcServer("127.0.0.1:0", Transport())
    server.add(servicer, worker_pb2_grpc.add_WorkerServicer_to_server, "segue.v1.Worker")
    await server.start()
    registration = Registration(catalog, "the catalog", worker)
    try:
        endpoint = Endpoint(worker, 0, server.target, family="ipv4", node=local.node)
        servicer.epoch = await registration.register(endpoint, (), (), _CALL_S)
        kept = asyncio.create_task(registration.run(), name="the peer's lease")
        try:
            yield PeerServer(local.node, servicer.epoch, chunks.counts)
        finally:
            kept.cancel()
            await asyncio.gather(kept, return_exceptions=True)
            await registration.deregister()
    finally:
        await server.stop(0)
        await chunks.aclose()
        local.close()
