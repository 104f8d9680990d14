"""A small world in memory on which the real publisher and the real collector work, and what must hold in it always."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import ServiceError
from services.catalog.collect.collector import Collector
from services.catalog.collect.run import Limits
from services.catalog.etcd.transaction import Put
from services.catalog.facts.keys import Keys
from services.catalog.facts.models import Models
from services.catalog.facts.pins import Pins
from services.catalog.facts.publish import Publisher
from services.catalog.facts.retentions import Keeping, Retentions
from services.catalog.facts.uses import Uses
from services.catalog.facts.values import pack, unpack
from tests.catalog.memory import Cluster, Hook, MemoryEtcd, MemoryStore, quiet
from tests.catalog.real_chunks import RealTenant
from tests.catalog.rig import model

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
FINGERPRINT = "ab" * 32
# Token streams that share prefixes: 0 and 1 one chunk, 0 and 2 two; 3 ends in the tail that 0's third chunk supersedes.
STREAMS = (
    [7] * 256 + [1] * 512 + [9] * 32,
    [7] * 256 + [2] * 512,
    [7] * 256 + [1] * 256 + [3] * 256,
    [7] * 256 + [1] * 256 + [1] * 48,
)
SALTS = ("11" * 32, "22" * 32)


@dataclass
class World:
    """Two tenants, four streams each, one model. blind_…: planted bugs, see MemoryEtcd."""

    now_ms: int = 20_000 * DAY_MS
    cluster: Cluster = field(default_factory=Cluster)
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    keys: Keys = field(default_factory=lambda: Keys("segue/"))
    claimed: set[str] = field(default_factory=set)
    tenants: list[RealTenant] = field(default_factory=list)
    blind_collector: frozenset[str] = frozenset()
    blind_publisher: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.tenants = [RealTenant(FINGERPRINT, salt) for salt in SALTS]
        self.cluster.transact((), [Put(self.keys.model(FINGERPRINT), pack(model(FINGERPRINT)))], ())

    def etcd(self, hook: Hook = quiet, blind: frozenset[str] = frozenset()) -> Any:
        return MemoryEtcd(self.cluster, hook, blind)

    def store(self, hook: Hook = quiet) -> Any:
        return MemoryStore(self.objects, lambda: self.now_ms, hook)

    def chain(self, tenant: int, stream: int, body: bytes = b"a") -> list[pb.Chunk]:
        return self.tenants[tenant].chain(STREAMS[stream], tail=True, body=body)

    def upload(self, tenant: int, chunks: Sequence[pb.Chunk]) -> None:
        for receipt in (receipt for chunk in chunks for receipt in chunk.receipts):
            body = self.tenants[tenant].bodies[receipt.key]
            self.objects.setdefault(receipt.key, (body, self.now_ms))

    async def publish(self, chunks: Sequence[pb.Chunk], node: str = "", hook: Hook = quiet) -> bool:
        """Whether it was taken."""
        etcd = self.etcd(hook, self.blind_publisher)
        publisher = Publisher(
            etcd,
            self.keys,
            self.store(hook),
            Models(etcd, self.keys),
            now_ms=lambda: self.now_ms,
            conflicted=lambda hash, where: None,
        )
        try:
            await publisher.publish(FINGERPRINT, chunks, node)
        except ServiceError:
            return False
        return True

    def collector(self, hook: Hook = quiet) -> Collector:
        etcd = self.etcd(hook, self.blind_collector)
        return Collector(
            etcd,
            self.keys,
            self.store(hook),
            Retentions(etcd, self.keys, Keeping(idle_days=3)),
            Limits(grace_ms=HOUR_MS, directory_days=5, decision_days=2),
            claimed=lambda: frozenset(self.claimed),
            now_ms=lambda: self.now_ms,
            holder="test",
        )

    async def collect(self, dry: bool = False, hook: Hook = quiet) -> list[pb.Collected]:
        return [item async for report in self.collector(hook).collect(dry) for item in report.collected]

    async def purge(self, tenant: int, include_pinned: bool = False, hook: Hook = quiet) -> pb.PurgeResponse:
        owner = self.chain(tenant, 0)[0].owner
        last = pb.PurgeResponse()
        async for report in self.collector(hook).purge(owner, False, include_pinned):
            last = report
        return last

    async def pin(self, hash: str) -> None:
        pins = Pins(self.etcd(), self.keys, now_ms=lambda: self.now_ms)
        await pins.pin([pb.ChunkId(fingerprint=FINGERPRINT, hash=hash)], "who", "why")

    async def unpin(self, hash: str) -> None:
        pins = Pins(self.etcd(), self.keys, now_ms=lambda: self.now_ms)
        await pins.unpin([pb.ChunkId(fingerprint=FINGERPRINT, hash=hash)])

    async def use(self, hash: str) -> None:
        uses = Uses(self.etcd(), self.keys, now_ms=lambda: self.now_ms)
        await uses.record([pb.ChunkId(fingerprint=FINGERPRINT, hash=hash)])

    # ------------------------------------------------------------------------------------------------- what must hold

    def chunks(self) -> dict[str, pb.Chunk]:
        prefix = self.keys.of_model("chunks", FINGERPRINT)
        found = (unpack(pb.Chunk, kv.value) for key, kv in self.cluster.keys.items() if key.startswith(prefix))
        return {chunk.hash: chunk for chunk in found}

    def pins(self) -> set[str]:
        prefix = self.keys.of_model("pins", FINGERPRINT)
        return {key[len(prefix) :].decode() for key in self.cluster.keys if key.startswith(prefix)}

    def check(self) -> None:
        """Never a fact without bytes; chains prefix-closed; nothing pinned removed; nothing said of unknown chunks."""
        chunks = self.chunks()
        for chunk in chunks.values():
            for receipt in chunk.receipts:
                assert receipt.key in self.objects, f"fact {chunk.hash} without bytes {receipt.key}"
            if chunk.start:
                parent = chunks.get(chunk.parent)
                assert parent is not None, f"chunk {chunk.hash} at {chunk.start} without its parent"
                assert parent.end == chunk.start and not parent.tail
        assert self.pins() <= set(chunks), "a pinned chunk was removed"
        for kind in ("uses", "replicas"):
            prefix = self.keys.of_model(kind, FINGERPRINT)  # type: ignore[arg-type]
            for key in self.cluster.keys:
                if key.startswith(prefix):
                    assert key[len(prefix) :].decode().split("/")[0] in chunks, f"{kind} of a chunk that is no fact"

    def unnamed(self) -> set[str]:
        """Objects that no fact names."""
        named = {receipt.key for chunk in self.chunks().values() for receipt in chunk.receipts}
        return {key for key in self.objects if key.startswith("v1/")} - named
