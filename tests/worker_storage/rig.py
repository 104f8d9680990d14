"""A worker's storage around real parts: torch pages, a chunk directory, an S3 server, a catalog on etcd.

Only the page pool is missing; `Pool` stands for it: it knows where each range lies, hands out leases and notes what is
settled.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import numpy as np
import torch

from libs.chunks.object_store import Bucket
from libs.continuation.chain import Node as ChainNode
from libs.continuation.chain import plan, root
from libs.continuation.layout import LayerSpec, Layout, needed_chunks
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc, worker_pb2_grpc
from libs.controller.catalog_facts import Chunk, Node, Receipt, Replica, ReplicaState
from libs.controller.protocol import AssignmentId, PrefillCost
from libs.service.channel import open_channel
from libs.service.grpc_server import GrpcServer
from libs.service.transport import Transport
from services.worker.checkpoint.settings import CheckpointSettings
from services.worker.handlers import (
    CheckpointRange,
    GroupPages,
    LandedNode,
    LeaseHeldError,
    NodeFill,
    RestoreOutcome,
    RestorePlan,
)
from services.worker.placement.settings import PromoterSettings
from services.worker.restore.settings import RestoreSettings
from services.worker.runtime.kv import KVStore
from services.worker.storage import DirectorySettings, Storage, StorageSettings, open_storage
from tests.chunks.peers import FetchOnly

PAGE = 16
OWNER = "0f" * 16
LAYOUT = Layout.from_layers(
    [LayerSpec(0, 512, 2, 16, "float32"), LayerSpec(1, None, 2, 16, "float32"), LayerSpec(2, 512, 2, 16, "float32")]
)
WINDOWED, FULL = LAYOUT.groups[0].name, LAYOUT.groups[1].name
ROUTES = itertools.count(1)


def draw_tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 512, count))


@dataclass
class Model:
    """One model and one tenant of it, made up anew for each test."""

    layout: Layout = LAYOUT
    fingerprint: str = field(default_factory=lambda: secrets.token_hex(32))
    salt: str = field(default_factory=lambda: secrets.token_hex(32))

    def chain(self, tokens: Sequence[int]) -> tuple[ChainNode, ...]:
        return plan(root(self.fingerprint, self.salt), tokens).nodes

    def ranges(self, tokens: Sequence[int], route: int | None = None) -> list[CheckpointRange]:
        route = next(ROUTES) if route is None else route
        return [
            CheckpointRange(
                route,
                AssignmentId(f"r{route}", 1),
                self.fingerprint,
                OWNER,
                node.parent,
                node.hash,
                node.start,
                node.end,
                node.is_tail,
                tuple(tokens[node.start : node.end]),
            )
            for node in self.chain(tokens)
        ]

    def proto(self) -> pb.Model:
        return pb.Model(
            fingerprint=self.fingerprint,
            groups=[
                pb.LayerGroup(
                    name=group.name,
                    layers=group.layers,
                    window=group.window or 0,
                    kv_heads=group.kv_heads,
                    head_dim=group.head_dim,
                    dtype=group.dtype,
                )
                for group in self.layout.groups
            ],
            chunk_tokens=256,
            weights="ab" * 32,
            variant="cpu.float32.none.test.linear.1",
            max_context=32_768,
            vocab_size=512,
        )


class PagesOf:
    """Torch pages, filled at random, and shuffled page tables."""

    def __init__(self, layout: Layout = LAYOUT, pages: int = 256, seed: int = 0, filled: bool = True) -> None:
        self.layout = layout
        self.kv = KVStore(layout, {group.name: pages for group in layout.groups}, PAGE, torch.device("cpu"))
        self.draw = np.random.default_rng(seed)
        self.free = {group.name: list(self.draw.permutation(pages)) for group in layout.groups}
        if filled:
            for tensor in (*self.kv.keys.values(), *self.kv.values.values()):
                tensor.copy_(torch.from_numpy(self.draw.standard_normal(tuple(tensor.shape), dtype=np.float32)))

    def take(self, group: str, start: int, end: int) -> GroupPages:
        """Fresh pages for positions [start, end)."""
        start -= start % PAGE
        return GroupPages(
            group, start, end, tuple(int(self.free[group].pop()) for _ in range(-(-(end - start) // PAGE)))
        )

    def rows(self, held: GroupPages, start: int, end: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        first, slot = divmod(start - held.start, PAGE)
        return self.kv.read(held.group, held.pages[first:], slot, end - start)


class _Lease:
    def __init__(self, pool: Pool, route: int, groups: tuple[GroupPages, ...]) -> None:
        self._pool, self._route, self.groups = pool, route, groups

    def release(self) -> None:
        with self._pool.lock:
            self._pool.leased.discard(self._route)


@dataclass
class Pool:
    """The page pool's face towards the checkpointer. `without`: groups that no longer hold the range of that hash."""

    pages: PagesOf
    where: dict[str, tuple[GroupPages, ...]] = field(default_factory=dict)
    leased: set[int] = field(default_factory=set)
    leases: Counter[str] = field(default_factory=Counter)
    ends: list[tuple[CheckpointRange, bool]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(
        self, ranges: Sequence[CheckpointRange], without: Callable[[CheckpointRange], set[str]] = lambda _: set()
    ) -> None:
        for what in ranges:
            self.where[what.hash] = tuple(
                self.pages.take(group.name, what.start, what.end)
                for group in self.pages.layout.groups
                if group.name not in without(what)
            )

    def lease(self, wanted: CheckpointRange) -> _Lease | None:
        with self.lock:
            if wanted.route in self.leased:
                raise LeaseHeldError(str(wanted.route))
            groups = self.where.get(wanted.hash)
            if groups is None:
                return None
            self.leased.add(wanted.route)
            self.leases[wanted.hash] += 1
            return _Lease(self, wanted.route, groups)

    def settled(self, what: CheckpointRange, *, durable: bool) -> None:
        self.ends.append((what, durable))

    def outcome(self, what: CheckpointRange) -> list[bool]:
        return [durable for found, durable in self.ends if found is what]


@dataclass
class Bench:
    """One worker's storage."""

    model: Model
    pages: PagesOf
    pool: Pool
    storage: Storage
    channel: grpc.aio.Channel
    folder: Path

    @property
    def stub(self) -> catalog_pb2_grpc.CatalogAsyncStub:
        return catalog_pb2_grpc.CatalogStub(self.channel)

    async def checkpoint(self, ranges: Sequence[CheckpointRange], within: float = 20.0) -> int:
        """Offers and drains; how many were not published."""
        for what in ranges:
            self.storage.checkpointer.offer(what)
        return await self.storage.checkpointer.drain(within)

    async def lookup(self, tokens: Sequence[int]) -> list[Node]:
        reply = await self.stub.Lookup(
            pb.LookupRequest(fingerprint=self.model.fingerprint, tenant_salt=self.model.salt, tokens=tokens), timeout=5
        )
        return [to_node(node) for node in [*reply.nodes, *([reply.tail] if reply.HasField("tail") else [])]]

    def plan(self, nodes: Sequence[Node], tokens: Sequence[int]) -> RestorePlan:
        """Brings all the nodes' boundary needs, and nothing else, into fresh pages."""
        boundary = nodes[-1].chunk.end
        fills: list[list[GroupPages]] = [[] for _ in nodes]
        for need in needed_chunks(self.pages.layout, [node.chunk for node in nodes], boundary):
            fills[need.node].append(self.pages.take(need.group, need.start, need.end))
        return RestorePlan(
            AssignmentId("restore", 1),
            self.model.fingerprint,
            OWNER,
            boundary,
            tuple(
                NodeFill(node, tuple(tokens[node.chunk.start : node.chunk.end]), tuple(filled))
                for node, filled in zip(nodes, fills, strict=True)
            ),
        )

    async def restore(
        self, wanted: RestorePlan, stop: asyncio.Event | None = None
    ) -> tuple[RestoreOutcome, list[LandedNode]]:
        landed: list[LandedNode] = []
        async with asyncio.timeout(20):
            outcome = await self.storage.restorer.restore(wanted, landed.append, stop or asyncio.Event())
        return outcome, landed


def to_node(node: pb.Node) -> Node:
    chunk = node.chunk
    return Node(
        Chunk(
            chunk.hash,
            chunk.parent,
            chunk.start,
            chunk.end,
            chunk.tokens_sha256,
            chunk.owner,
            tuple(Receipt(r.group, r.bucket, r.key, r.etag, r.size, r.content_id) for r in chunk.receipts),
            chunk.created_ms,
            chunk.tail,
        ),
        tuple(Replica(r.node, r.group, ReplicaState(r.state), r.content_id) for r in node.replicas),
    )


def same(source: PagesOf, held: Sequence[GroupPages], target: PagesOf, fill: GroupPages, start: int, end: int) -> bool:
    """Whether the rows [start, end) of a fill have the bits of the pages they were captured from."""
    origin = next(found for found in held if found.group == fill.group)
    one, other = source.rows(origin, start, end), target.rows(fill, start, end)
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for layer in one
        for a, b in zip(one[layer], other[layer], strict=True)
    )


@asynccontextmanager
async def worker(
    model: Model,
    folder: Path,
    bucket: Bucket,
    catalog: str,
    *,
    seed: int = 0,
    filled: bool = True,
    local: bool = True,
    cap: int = 1 << 30,
    restore: RestoreSettings | None = None,
    checkpoint: CheckpointSettings | None = None,
    pages: PagesOf | None = None,
    memory: int = 0,
    prefill: Callable[[], Sequence[PrefillCost]] = list,
    promoter: PromoterSettings | None = None,
) -> AsyncIterator[Bench]:
    pages = pages or PagesOf(model.layout, seed=seed, filled=filled)
    pool = Pool(pages)
    channel = open_channel(catalog, Transport())
    settings = StorageSettings(
        bucket,
        DirectorySettings(folder, cap=cap, keep_free=0) if local else None,
        restore or RestoreSettings(),
        checkpoint or CheckpointSettings(),
        promoter or PromoterSettings(),
        memory=memory,
        bucket_wait_s=5,
    )
    storage = await open_storage(
        settings,
        kv=pages.kv,
        layout=model.layout,
        catalog=channel,
        leases=pool,
        prefill=prefill,
        open_peer=lambda address: open_channel(address, Transport()),
    )
    try:
        yield Bench(model, pages, pool, storage, channel, folder)
    finally:
        async with asyncio.timeout(30):
            await storage.aclose()
        await channel.close()
        assert not pool.leased


@asynccontextmanager
async def serving(bench: Bench, epoch: int = 7) -> AsyncIterator[str]:
    """Its FetchChunk behind a real socket; HOST:PORT."""
    server = GrpcServer("127.0.0.1:0", Transport())
    server.add(FetchOnly(bench.storage.local, epoch), worker_pb2_grpc.add_WorkerServicer_to_server, "segue.v1.Worker")
    await server.start()
    try:
        yield server.target
    finally:
        await server.stop(0)


def introduce(bench: Bench, node: str, address: str, epoch: int = 7) -> None:
    """Tells a worker who claims a directory, in the endpoint map's place."""
    bench.storage._tasks[0].cancel()
    bench.storage.book.learn(
        pb.EndpointMap(endpoints=[pb.Endpoint(worker="peer", epoch=epoch, address=address, node=node)])
    )


def at(bucket: Bucket, endpoint: str) -> Bucket:
    """The same bucket by another way, such as through a proxy."""
    return replace(bucket, endpoint=endpoint)
