"""A peer behind a real socket: the worker's FetchChunk over real tiers, and a client; each on a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.chunks.peer import Peer, PeerClient
from libs.contracts.segue.v1 import worker_pb2_grpc
from libs.service.channel import open_channel
from libs.service.grpc_server import GrpcServer
from libs.service.transport import Transport
from services.worker.endpoint.fetching import fetch_chunk
from services.worker.restore.local_chunks import ServedChunks

EPOCH = 7


class FetchOnly(worker_pb2_grpc.WorkerServicer):
    """The part of a worker that peers use."""

    def __init__(self, chunks: ServedChunks, epoch: int = EPOCH) -> None:
        self.chunks, self.epoch = chunks, epoch

    async def FetchChunk(self, request, context):
        async for piece in fetch_chunk(request, self.epoch, self.chunks):
            yield piece


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


class ServedPeer:
    """`peer` is the source; `directory` and `memory` are what it serves."""

    def __init__(
        self, directory: LocalDirectory | None, memory: HostMemory | None = None, *, streams: int = 8, calls: int = 8
    ) -> None:
        self.directory, self.memory = directory, memory
        self.there, self.here = Loop(), Loop()
        self._streams, self._calls = streams, calls
        self.there.run(self._serve())
        self.here.run(self._dial())
        self.peer = self.at(self.server.target)

    async def _serve(self) -> None:
        self.chunks = ServedChunks(self.directory, self.memory, streams=self._streams)
        self.servicer = FetchOnly(self.chunks)
        self.server = GrpcServer("127.0.0.1:0", Transport())
        self.server.add(self.servicer, worker_pb2_grpc.add_WorkerServicer_to_server, "segue.v1.Worker")
        await self.server.start()

    async def _dial(self) -> None:
        self.opened: list[str] = []

        def dial(address: str):
            self.opened.append(address)
            return open_channel(address, Transport())

        self.client = PeerClient(dial, calls=self._calls)

    def at(self, address: str, epoch: int = EPOCH) -> Peer:
        return self.client.peer(address, epoch)

    def stop_serving(self) -> None:
        async def stop() -> None:
            await self.server.stop(0)
            await self.chunks.aclose()

        self.there.run(stop())

    def close(self) -> None:
        self.here.run(self.client.aclose())
        self.stop_serving()
        self.here.close()
        self.there.close()
