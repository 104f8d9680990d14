"""Publishing chunks: the catalog never names bytes that are not durable, nor a chunk whose parent it does not name.

A call is checked as a whole before anything is written: shape, conflicts, parents, then every receipt that does not
stand already against the object store (existence and size). It is then written in transactions of at most 100
operations, parents before children, each comparing all it was decided on: the chunk as read, the parent's existence,
the replica as read. A transaction that finds something changed writes nothing, and the whole call is decided again from
a new read; what earlier transactions wrote stands then and is simply found.

What stands is never replaced. Another content id under a known group is normal (the same prefix computed elsewhere has
other bits): it is ignored, and answered with the one that stands. New groups are added to what stands.

Two things are settled with collection, which may run at the same time. A chunk that gets its first child stops being a
leaf: the child's transaction writes the parent's use, on which the deletion of a leaf is conditional. And bytes that no
fact named for a while may be condemned: a transaction that names new receipts is conditional on the chunk's garbage
record, takes its objects out of it, and is refused once their deletion has begun.

The root of a chain depends on the tenant's salt, which a publisher does not send: any parent is accepted at start 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from libs.continuation.chain import CHUNK_TOKENS, TAIL_TOKENS
from libs.continuation.errors import IdentityError
from libs.continuation.keys import ObjectKey
from libs.continuation.tenancy import OWNER_BYTES
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import (
    MAX_OPERATIONS,
    Comparison,
    Delete,
    Exists,
    Get,
    KeyValue,
    Operation,
    Put,
    Unchanged,
)
from services.catalog.facts.errors import (
    BeingCollectedError,
    ChunkConflictError,
    InvalidRequestError,
    MissingGroupError,
    MissingParentError,
    NotDurableError,
)
from services.catalog.facts.garbage import pack_garbage, unpack_garbage, without
from services.catalog.facts.keys import Keys, check_hex, check_node
from services.catalog.facts.models import Models
from services.catalog.facts.races import attempts
from services.catalog.facts.replicas import merged
from services.catalog.facts.uses import day_of, pack_use, used
from services.catalog.facts.values import pack, unpack
from services.catalog.parallel import gather
from services.catalog.store import ObjectStore

MAX_CHUNKS = 500
# The chunk, its garbage record, its replica; its parent and that one's use where they stand in another transaction.
_COMPARISONS_PER_CHUNK = 5
_PLACE = ("tokens_sha256", "parent", "start", "end", "owner")


@dataclass(slots=True)
class _Planned:
    """One chunk as it shall stand. `stored`: the key as read."""

    stored: KeyValue | None
    chunk: pb.Chunk
    fresh: list[pb.Receipt] = field(default_factory=list)
    """Receipts of `chunk` that do not stand yet."""


@dataclass(frozen=True, slots=True)
class _State:
    """What one attempt read: by hash."""

    chunks: Mapping[str, KeyValue]
    replicas: Mapping[str, KeyValue]
    garbage: Mapping[str, KeyValue]


@dataclass(slots=True)
class _Batch:
    """One transaction. `created`: hashes of the chunks it writes for the first time."""

    compare: list[Comparison] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    created: set[str] = field(default_factory=set)
    parents: set[str] = field(default_factory=set)
    """Standing chunks that get a child by it."""


class Publisher:
    """conflicted: told the hash of every conflict. now_ms: unix milliseconds."""

    def __init__(
        self,
        etcd: EtcdClient,
        keys: Keys,
        store: ObjectStore,
        models: Models,
        *,
        now_ms: Callable[[], int],
        conflicted: Callable[[str, str], None],
    ) -> None:
        self._etcd, self._keys, self._store, self._models = etcd, keys, store, models
        self._now_ms, self._conflicted = now_ms, conflicted

    async def publish(self, fingerprint: str, chunks: Sequence[pb.Chunk], node: str) -> tuple[list[pb.Published], int]:
        """Results in order, and etcd's revision.

        Raises InvalidRequestError, UnknownModelError, ChunkConflictError, MissingParentError, MissingGroupError,
        NotDurableError, ContendedError; nothing is written then, unless a race was lost half way.
        """
        check_hex(fingerprint, "fingerprint")
        if node:
            check_node(node)
        if len(chunks) > MAX_CHUNKS:
            raise InvalidRequestError("chunks", len(chunks), f"expected at most {MAX_CHUNKS} in one call")
        groups = await self._models.groups(fingerprint)
        for chunk in chunks:
            self._check(fingerprint, chunk, groups)
        required = frozenset(name for name, group in groups.items() if group.window == 0)
        created: set[str] = set()
        durable: dict[str, str] = {}
        async for attempt in attempts(f"publication of {len(chunks)} chunks"):
            # Garbage records are rare: only a transaction that failed makes it worth looking for them.
            state, revision = await self._read(fingerprint, chunks, node, garbage=attempt > 0)
            planned = self._plan(chunks, state, required)
            _heed_garbage(planned, state.garbage, durable, self._now_ms())
            await self._verify(planned, durable)
            batches = self._batches(fingerprint, chunks, node, planned, state)
            await self._use_parents(fingerprint, batches)
            written = await self._write(batches, created)
            if written is not None:
                results = [
                    pb.Published(hash=c.hash, created=c.hash in created, receipts=planned[c.hash].chunk.receipts)
                    for c in chunks
                ]
                return results, max(written, revision)
        raise AssertionError("attempts() raises when it ends")

    def _check(self, fingerprint: str, chunk: pb.Chunk, groups: Mapping[str, pb.LayerGroup]) -> None:
        check_hex(chunk.hash, "hash")
        check_hex(chunk.parent, "parent")
        check_hex(chunk.tokens_sha256, "tokens_sha256")
        check_hex(chunk.owner, "owner", OWNER_BYTES)
        length = chunk.end - chunk.start
        if chunk.start % CHUNK_TOKENS or not 0 < length <= CHUNK_TOKENS or length % TAIL_TOKENS:
            raise InvalidRequestError(
                "start, end",
                (chunk.start, chunk.end),
                f"expected {CHUNK_TOKENS} tokens from a multiple of it, or a tail",
            )
        if chunk.tail != (length < CHUNK_TOKENS):
            raise InvalidRequestError(
                "tail", chunk.tail, f"expected it set exactly below {CHUNK_TOKENS} tokens ({length} here)"
            )
        names = [receipt.group for receipt in chunk.receipts]
        if not names or len(set(names)) != len(names):
            raise InvalidRequestError("receipts", names, "expected one per group, at least one")
        for receipt in chunk.receipts:
            if receipt.group not in groups:
                raise InvalidRequestError("group", receipt.group, f"expected one of the model's: {', '.join(groups)}")
            if receipt.bucket != self._store.target.bucket:
                raise InvalidRequestError(
                    "bucket", receipt.bucket, f"expected {self._store.target.bucket}, the catalog's own"
                )
            try:
                key = ObjectKey(fingerprint, chunk.owner, chunk.hash, receipt.group, receipt.content_id).text
            except IdentityError as error:
                raise InvalidRequestError("content_id", receipt.content_id, str(error)) from None
            if receipt.key != key:
                raise InvalidRequestError("key", receipt.key, f"expected {key}")

    async def _read(
        self, fingerprint: str, chunks: Sequence[pb.Chunk], node: str, *, garbage: bool
    ) -> tuple[_State, int]:
        own = list(dict.fromkeys(c.hash for c in chunks))
        hashes = list(dict.fromkeys([*own, *(c.parent for c in chunks if c.start)]))
        reads = [Get(self._keys.chunk(fingerprint, h)) for h in hashes]
        if node:
            reads += [Get(self._keys.replica(fingerprint, h, node)) for h in own]
        replicas_end = len(reads)
        if garbage:
            reads += [Get(self._keys.garbage(fingerprint, h)) for h in own]
        result = await self._etcd.read(reads)
        of_chunks, of_replicas = result.found[: len(hashes)], result.found[len(hashes) : replicas_end]
        of_garbage = result.found[replicas_end:]
        return (
            _State(
                {h: kvs[0] for h, kvs in zip(hashes, of_chunks, strict=True) if kvs},
                {h: kvs[0] for h, kvs in zip(own, of_replicas, strict=False) if kvs},
                {h: kvs[0] for h, kvs in zip(own, of_garbage, strict=False) if kvs},
            ),
            result.revision,
        )

    def _plan(self, chunks: Sequence[pb.Chunk], state: _State, required: frozenset[str]) -> dict[str, _Planned]:
        planned: dict[str, _Planned] = {}
        for given in chunks:
            stored = state.chunks.get(given.hash)
            plan = planned.get(given.hash)
            if plan is None:
                if stored is not None:
                    plan = _Planned(stored, unpack(pb.Chunk, stored.value))
                else:
                    self._check_parent(given, state, planned)
                    plan = _Planned(None, _bare(given, self._now_ms()))
            for name in _PLACE:
                stands, value = getattr(plan.chunk, name), getattr(given, name)
                if stands != value:
                    self._conflicted(given.hash, "publish")
                    raise ChunkConflictError(given.hash, name, stands, value)
            known = {receipt.group for receipt in plan.chunk.receipts}
            for receipt in given.receipts:
                if receipt.group not in known:
                    # Held by reference: the store's own ETag is filled in once it is verified.
                    added = plan.chunk.receipts.add()
                    added.CopyFrom(receipt)
                    plan.fresh.append(added)
            missing = required - {receipt.group for receipt in plan.chunk.receipts}
            if missing:
                raise MissingGroupError(given.hash, sorted(missing))
            planned[given.hash] = plan
        return planned

    def _check_parent(self, given: pb.Chunk, state: _State, planned: Mapping[str, _Planned]) -> None:
        if given.start == 0:
            return
        if given.parent in planned:
            parent = planned[given.parent].chunk
        elif given.parent in state.chunks:
            parent = unpack(pb.Chunk, state.chunks[given.parent].value)
        else:
            raise MissingParentError(given.hash, given.parent, given.start)
        if parent.end != given.start or parent.tail:
            raise MissingParentError(given.hash, given.parent, given.start)

    async def _verify(self, planned: Mapping[str, _Planned], durable: dict[str, str]) -> None:
        """Fills in the ETags. durable: key → ETag of what an earlier attempt of this call has verified."""

        async def one(chunk: str, receipt: pb.Receipt) -> None:
            if receipt.key not in durable:
                stat = await self._store.stat(receipt.key)
                if stat is None:
                    raise NotDurableError(chunk, receipt.group, receipt.key, "does not exist")
                if stat.size != receipt.size:
                    raise NotDurableError(
                        chunk,
                        receipt.group,
                        receipt.key,
                        f"has {stat.size} bytes, not the {receipt.size} of the receipt",
                    )
                durable[receipt.key] = stat.etag
            receipt.etag = durable[receipt.key]

        await gather(one(hash, receipt) for hash, plan in planned.items() for receipt in plan.fresh)

    async def _use_parents(self, fingerprint: str, batches: Sequence[_Batch]) -> None:
        """Adds to each batch the use of the standing chunks that get a child by it."""
        wanted = [(batch, self._keys.use(fingerprint, parent)) for batch in batches for parent in sorted(batch.parents)]
        if not wanted:
            return
        today = day_of(self._now_ms())
        reads = await self._etcd.read([Get(key) for _, key in wanted])
        for (batch, key), kvs in zip(wanted, reads.found, strict=True):
            # Written even if it says the same: the new revision is what collection compares. And not conditional: two
            # children of one parent may come at the same time.
            batch.operations.append(Put(key, pack_use(used(kvs[0].value if kvs else None, today))))

    async def _write(self, batches: Sequence[_Batch], created: set[str]) -> int | None:
        """The last transaction's revision (0 if there was nothing to write), None if one lost a race."""
        revision = 0
        for batch in batches:
            outcome = await self._etcd.transact(compare=batch.compare, success=batch.operations)
            if not outcome.succeeded:
                return None
            created |= batch.created
            revision = outcome.revision
        return revision

    def _batches(
        self, fingerprint: str, chunks: Sequence[pb.Chunk], node: str, planned: Mapping[str, _Planned], state: _State
    ) -> list[_Batch]:
        """Transactions that bring about what is planned, in the order of the chunks."""
        on_node: dict[str, list[pb.Replica]] = {}
        for chunk in chunks if node else ():
            on_node.setdefault(chunk.hash, []).extend(
                pb.Replica(node=node, group=r.group, state=pb.REPLICA_STATE_READY, content_id=r.content_id)
                for r in chunk.receipts
            )
        batches = [_Batch()]
        for hash, plan in planned.items():
            if len(batches[-1].compare) + _COMPARISONS_PER_CHUNK > MAX_OPERATIONS:
                batches.append(_Batch())
            batch, key = batches[-1], self._keys.chunk(fingerprint, hash)
            before = state.replicas.get(hash)
            after = merged(before.value if before else None, on_node.get(hash, []))
            replica_changes = after is not None and (before is None or after != before.value)
            if plan.fresh:
                batch.compare.append(Unchanged(key, plan.stored.mod_revision if plan.stored else 0))
                batch.operations.append(Put(key, pack(plan.chunk)))
                garbage_key, condemned = self._keys.garbage(fingerprint, hash), state.garbage.get(hash)
                batch.compare.append(Unchanged(garbage_key, condemned.mod_revision if condemned else 0))
                if condemned:
                    left = without(unpack_garbage(condemned.value), {receipt.key for receipt in plan.fresh})
                    batch.operations.append(Put(garbage_key, pack_garbage(left)) if left else Delete(garbage_key))
                if plan.stored is None:
                    batch.created.add(hash)
                    # A parent in the same transaction needs no comparison; another must not be collected meanwhile.
                    if plan.chunk.start and plan.chunk.parent not in batch.created:
                        batch.compare.append(Exists(self._keys.chunk(fingerprint, plan.chunk.parent)))
                        batch.parents.add(plan.chunk.parent)
                    if node:
                        # A directory that still had to drop it holds it anew.
                        batch.operations.append(Delete(self._keys.removal(node, fingerprint, hash)))
            elif replica_changes:
                batch.compare.append(Exists(key))
            if replica_changes and after is not None:
                replica = self._keys.replica(fingerprint, hash, node)
                batch.compare.append(Unchanged(replica, before.mod_revision if before else 0))
                batch.operations.append(Put(replica, after))
        return [batch for batch in batches if batch.operations]


def _heed_garbage(
    planned: Mapping[str, _Planned], garbage: Mapping[str, KeyValue], durable: dict[str, str], now_ms: int
) -> None:
    """Forgets what was seen of objects condemned since; BeingCollectedError where one is being deleted, or just was."""
    for hash, condemned in garbage.items():
        objects = unpack_garbage(condemned.value)
        for receipt in planned[hash].fresh:
            found = objects.get(receipt.key)
            if found is None:
                continue
            if found.forbids(now_ms):
                raise BeingCollectedError(hash, receipt.key)
            durable.pop(receipt.key, None)


def _bare(given: pb.Chunk, now_ms: int) -> pb.Chunk:
    """The fact without receipts, its time the catalog's own."""
    bare = pb.Chunk()
    bare.CopyFrom(given)
    del bare.receipts[:]
    bare.created_ms = now_ms
    return bare
