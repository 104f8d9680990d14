"""A catalog in memory behind the real contract: a map that tests move, names, chunk facts, and ways to be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from libs.continuation.chain import chunks_after, root, tails_after
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.transport import Transport
from tests.router.pki import bind

FINGERPRINT = "ab" * 32
GROUP = pb.LayerGroup(name="full-kv1-d4-float32", layers=[0], kv_heads=1, head_dim=4, dtype="float32")
CONTEXT = 8_192


def model(fingerprint: str = FINGERPRINT, **changes: object) -> pb.Model:
    facts = {"fingerprint": fingerprint, "groups": [GROUP], "chunk_tokens": 256, "max_context": CONTEXT}
    return pb.Model(**{**facts, **changes})  # type: ignore[arg-type]


class FakeCatalog(catalog_pb2_grpc.CatalogServicer):
    """`put` and `remove` move the endpoint map; `names` and `chunks` are what it answers with."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.names: dict[str, list[pb.Model]] = {"m": [model()]}
        self.endpoints: dict[str, pb.Endpoint] = {}
        self.chunks: dict[str, pb.Node] = {}
        self.lookups: list[pb.LookupRequest] = []
        self.lookup_gate = asyncio.Event()
        """Look-ups wait for it; set = answered at once."""
        self.lookup_gate.set()
        self.decisions: list[pb.DecisionRecord] = []
        self.append_fails: grpc.StatusCode | None = None
        self.appends = 0
        """Calls, failed ones too."""
        self.revision = 1
        self.watchers = 0
        self.address = ""
        self._port = 0
        self._moved = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def WatchEndpoints(self, request: pb.WatchEndpointsRequest, context: object) -> AsyncIterator[pb.EndpointMap]:
        self.watchers += 1
        try:
            while True:
                seen = self.revision
                endpoints = [self.endpoints[name] for name in sorted(self.endpoints)]
                yield pb.EndpointMap(endpoints=endpoints, hash=repr(endpoints), revision=seen)
                async with self._moved:
                    await self._moved.wait_for(lambda last=seen: self.revision != last)
        finally:
            self.watchers -= 1

    async def ResolveName(self, request: pb.ResolveNameRequest, context: grpc.aio.ServicerContext) -> object:
        if request.name not in self.names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such name")
        return pb.ResolveNameResponse(models=self.names[request.name], revision=self.revision)

    async def Lookup(self, request: pb.LookupRequest, context: object) -> pb.LookupResponse:
        self.lookups.append(request)
        await self.lookup_gate.wait()
        known = request.after or root(request.fingerprint, request.tenant_salt)
        tokens = list(request.tokens)
        answer = pb.LookupResponse(revision=self.revision)
        end = request.start
        for node in chunks_after(known, tokens, request.start):
            if node.hash not in self.chunks:
                break
            answer.nodes.append(self.chunks[node.hash])
            known, end = node.hash, node.end
        for tail in reversed(tails_after(known, tokens[end - request.start :], end)):
            if tail.hash in self.chunks:
                answer.tail.CopyFrom(self.chunks[tail.hash])
                break
        return answer

    async def AppendDecisions(
        self, request: pb.AppendDecisionsRequest, context: grpc.aio.ServicerContext
    ) -> pb.AppendDecisionsResponse:
        self.appends += 1
        if self.append_fails is not None:
            await context.abort(self.append_fails, "by script")
        self.decisions += request.records
        return pb.AppendDecisionsResponse(key="k", size=1, revision=self.revision)

    async def put(self, endpoint: pb.Endpoint) -> None:
        self.endpoints[endpoint.worker] = endpoint
        await self.moved()

    async def remove(self, worker: str) -> None:
        del self.endpoints[worker]
        await self.moved()

    async def moved(self) -> None:
        async with self._moved:
            self.revision += 1
            self._moved.notify_all()

    def publish(self, tokens: Sequence[int], salt: str = "00" * 32, node: str = "") -> list[pb.Node]:
        """Facts for every full chunk of `tokens`, and their longest tail, durable (and on `node`'s disk)."""
        base = root(FINGERPRINT, salt)
        links = list(chunks_after(base, tokens))
        end = links[-1].end if links else 0
        links += tails_after(links[-1].hash if links else base, tokens[end:], end)[-1:]
        made = []
        for link in links:
            receipt = pb.Receipt(group=GROUP.name, bucket="b", key=link.hash, size=1_000, content_id="cd" * 32)
            chunk = pb.Chunk(
                hash=link.hash,
                parent=link.parent,
                start=link.start,
                end=link.end,
                receipts=[receipt],
                tail=link.is_tail,
            )
            replica = pb.Replica(node=node, group=GROUP.name, state=pb.ReplicaState.REPLICA_STATE_READY)
            self.chunks[link.hash] = pb.Node(chunk=chunk, replicas=[replica] if node else [])
            made.append(self.chunks[link.hash])
        return made

    async def start(self) -> None:
        """Also again after `stop`, under the same address."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        catalog_pb2_grpc.add_CatalogServicer_to_server(self, self._server)
        self._port = bind(self._server, f"127.0.0.1:{self._port}", self._transport)
        self.address = f"127.0.0.1:{self._port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)


@asynccontextmanager
async def fake_catalog(transport: Transport | None = None) -> AsyncIterator[FakeCatalog]:
    catalog = FakeCatalog(transport or Transport())
    await catalog.start()
    try:
        yield catalog
    finally:
        catalog.lookup_gate.set()
        await catalog.stop()
