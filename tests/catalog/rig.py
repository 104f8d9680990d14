"""Parts the catalog's tests share: a catalog served in this process, and makers of models, chains and objects."""

from __future__ import annotations

import asyncio
import hashlib
import io
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from blake3 import blake3
from minio import Minio
from prometheus_client import CollectorRegistry

from cli.embedded.seaweed import SeaweedServer
from libs.continuation.chain import Node, chunks_after, root, tails_after
from libs.continuation.hashing import pack_tokens
from libs.continuation.keys import ObjectKey
from libs.continuation.tenancy import owner
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.channel import open_channel
from libs.service.grpc_server import GrpcServer
from libs.service.transport import Transport
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import Put
from services.catalog.facts.keys import Keys
from services.catalog.facts.values import pack
from services.catalog.metrics import CatalogMetrics
from services.catalog.server import Catalog, assemble, unix_ms
from services.catalog.settings import CatalogSettings
from services.catalog.store import ObjectStore

FULL, WINDOWED = "full-kv1-d4-float32", "w512-kv1-d4-float32"


def hex_id(size: int = 32) -> str:
    return secrets.token_hex(size)


def model(fingerprint: str | None = None, **changes: Any) -> pb.Model:
    facts: dict[str, Any] = {
        "fingerprint": fingerprint or hex_id(),
        "groups": [
            pb.LayerGroup(name=FULL, layers=[1], kv_heads=1, head_dim=4, dtype="float32"),
            pb.LayerGroup(name=WINDOWED, layers=[0], window=512, kv_heads=1, head_dim=4, dtype="float32"),
        ],
        "chunk_tokens": 256,
        "weights": "ab" * 32,
        "variant": "cpu.float32.none.eager.linear.1",
        "max_context": 32_768,
        "vocab_size": 1_000,
    }
    return pb.Model(**{**facts, **changes})


def endpoint(worker: str, **changes: Any) -> pb.Endpoint:
    facts: dict[str, Any] = {"worker": worker, "address": "10.0.0.1:7001", "family": "ipv4", "capacity_pages": 64}
    return pb.Endpoint(**{**facts, **changes})


def registration(
    worker: str, *models: pb.Model, name: str = "gemma", epoch: int = 0, **changes: Any
) -> pb.RegisterRequest:
    return pb.RegisterRequest(
        endpoint=endpoint(worker, **changes), models=models, names=[name] * len(models), epoch=epoch
    )


@dataclass
class Tenant:
    """A chain-maker for one model and one tenant."""

    fingerprint: str = field(default_factory=hex_id)
    salt: str = field(default_factory=hex_id)

    @property
    def root(self) -> str:
        return root(self.fingerprint, self.salt)

    def nodes(self, tokens: Sequence[int], tail: bool = False) -> list[Node]:
        """Full chunks, then the longest tail if wanted and possible."""
        nodes = list(chunks_after(self.root, tokens))
        if tail:
            covered = 256 * len(nodes)
            nodes += tails_after(nodes[-1].hash if nodes else self.root, tokens[covered:], covered)[-1:]
        return nodes

    def chunk(
        self,
        node: Node,
        tokens: Sequence[int],
        groups: Sequence[str] = (FULL, WINDOWED),
        body: bytes = b"kv",
        bucket: str = "segue",
    ) -> pb.Chunk:
        """The chunk as a publisher would describe it; `tokens` from position 0. Its objects hold body + group."""
        own = pack_tokens(tokens[node.start : node.end])
        chunk = pb.Chunk(
            hash=node.hash,
            parent=node.parent,
            start=node.start,
            end=node.end,
            tokens_sha256=hashlib.sha256(own).hexdigest(),
            owner=owner(self.salt),
            tail=node.is_tail,
        )
        for group in groups:
            content = body + group.encode()
            content_id = blake3(content).hexdigest()
            key = ObjectKey(self.fingerprint, chunk.owner, node.hash, group, content_id).text
            chunk.receipts.add(group=group, bucket=bucket, key=key, etag="", size=len(content), content_id=content_id)
        return chunk

    def chain(self, tokens: Sequence[int], tail: bool = False, **options: Any) -> list[pb.Chunk]:
        return [self.chunk(node, tokens, **options) for node in self.nodes(tokens, tail)]

    def lookup(self, tokens: Sequence[int], after: Node | None = None) -> pb.LookupRequest:
        """Of all tokens from 0 on, those after the node."""
        start = after.end if after else 0
        return pb.LookupRequest(
            fingerprint=self.fingerprint,
            tenant_salt=self.salt,
            after=after.hash if after else "",
            tokens=tokens[start:],
            start=start,
        )


@dataclass
class Bucket:
    """The S3 server's bucket, as a worker sees it."""

    server: SeaweedServer
    client: Minio = field(init=False)

    def __post_init__(self) -> None:
        s = self.server
        self.client = Minio(s.endpoint, s.access_key, s.secret_key, secure=False, region="us-east-1")

    async def upload(self, chunks: Sequence[pb.Chunk], body: bytes = b"kv") -> None:
        def put(receipt: pb.Receipt) -> None:
            content = body + receipt.group.encode()
            self.client.put_object(self.server.bucket, receipt.key, io.BytesIO(content), len(content))

        limit = asyncio.Semaphore(8)

        async def one(receipt: pb.Receipt) -> None:
            async with limit:
                await asyncio.to_thread(put, receipt)

        async with asyncio.TaskGroup() as group:
            for chunk in chunks:
                for receipt in chunk.receipts:
                    group.create_task(one(receipt))


@dataclass
class Rig:
    """A running catalog, reached over a real socket."""

    stub: Any
    """The generated client: async, though its type stubs describe the blocking one."""
    registry: CollectorRegistry
    etcd: EtcdClient
    store: ObjectStore
    keys: Keys
    target: str
    parts: Catalog

    async def store_facts(self, fingerprint: str, chunks: Sequence[pb.Chunk]) -> None:
        """Chunk facts straight into etcd, for look-ups that need many and no objects."""
        puts = [Put(self.keys.chunk(fingerprint, chunk.hash), pack(chunk)) for chunk in chunks]
        for i in range(0, len(puts), 100):
            await self.etcd.transact(success=puts[i : i + 100])

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def settings(etcd: str, s3: SeaweedServer, prefix: str, **changes: Any) -> CatalogSettings:
    facts: dict[str, Any] = {
        "etcd_endpoint": etcd,
        "etcd_prefix": prefix,
        "s3_endpoint": s3.url,
        "s3_bucket": s3.bucket,
        "s3_access_key": s3.access_key,
        "s3_secret_key": s3.secret_key,
    }
    return CatalogSettings(**{**facts, **changes})


@asynccontextmanager
async def running(wanted: CatalogSettings, now_ms: Callable[[], int] = unix_ms) -> AsyncIterator[Rig]:
    registry = CollectorRegistry()
    catalog = assemble(wanted, CatalogMetrics(registry), now_ms=now_ms)
    server = GrpcServer("127.0.0.1:0", Transport())
    server.add(catalog.servicer, catalog_pb2_grpc.add_CatalogServicer_to_server, "segue.v1.Catalog")
    await server.start()
    following = {asyncio.create_task(catalog.endpoints.run()), asyncio.create_task(catalog.demands.run())}
    channel = open_channel(server.target, Transport())
    try:
        yield Rig(
            catalog_pb2_grpc.CatalogStub(channel),
            registry,
            catalog.etcd,
            catalog.store,
            Keys(wanted.etcd_prefix),
            server.target,
            catalog,
        )
    finally:
        await channel.close(None)
        await catalog.endpoints.close()
        await catalog.demands.close()
        await server.stop(1.0)
        for task in following:
            task.cancel()
        await asyncio.wait(following, timeout=5)
        await catalog.etcd.close()
        await catalog.store.close()


async def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    """Returns once the condition holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - conditions of other tasks and processes, without an event to wait for
            await asyncio.sleep(0.01)


def code(failure: Any) -> grpc.StatusCode:
    """Of what `pytest.raises(grpc.aio.AioRpcError)` caught."""
    found: grpc.StatusCode = failure.value.code()
    return found
