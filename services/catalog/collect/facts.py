"""Marking and removing chunk facts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.marking import Fact, Marked
from services.catalog.collect.objects import count
from services.catalog.collect.run import Run, Step
from services.catalog.etcd.errors import EtcdCompactedError
from services.catalog.etcd.transaction import (
    MAX_OPERATIONS,
    Comparison,
    Delete,
    DeletePrefix,
    Get,
    GetPrefix,
    KeyValue,
    Operation,
    Put,
    Read,
    Unchanged,
    UnchangedSince,
)
from services.catalog.facts.errors import CollectionLostError
from services.catalog.facts.garbage import Condemned, pack_garbage, unpack_garbage
from services.catalog.facts.keys import last_part
from services.catalog.facts.uses import day_of, unpack_use
from services.catalog.facts.values import unpack

# Each chunk costs five comparisons beside the lock's; its operations depend on how many directories hold it.
_PER_TRANSACTION = 15

# Directories told of one removal: what one transaction holds beside the rest.
_MOST_NODES = 80


@dataclass(slots=True)
class _Plan:
    """One chunk's removal. chunk: None if it is not what was marked any more."""

    marked: Marked
    chunk: pb.Chunk | None = None
    compare: list[Comparison] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)


async def models(run: Run) -> list[str]:
    """Every fingerprint: chunks exist only under known models."""
    found = [last_part(kv.key) async for page in run.etcd.scan(run.keys.models) for kv in page]
    return sorted(found)


async def snapshot(run: Run, fingerprint: str, owner: str = "") -> list[Fact]:
    """All chunks of one model (of one owner), as they were at one revision with their uses and pins.

    Raises CollectionLostError if etcd is compacted beyond that revision meanwhile.
    """
    try:
        return await _snapshot(run, fingerprint, owner)
    except EtcdCompactedError as error:
        raise CollectionLostError(str(error)) from error


async def _snapshot(run: Run, fingerprint: str, owner: str) -> list[Fact]:
    keys, etcd = run.keys, run.etcd
    revision = (await etcd.read([])).revision
    facts: dict[bytes, Fact] = {}
    async for page in etcd.scan(keys.of_model("chunks", fingerprint), at_revision=revision):
        run.check()
        for kv in page:
            chunk = unpack(pb.Chunk, kv.value)
            run.totals.chunks_examined += 1
            if owner and chunk.owner != owner:
                continue
            raw = bytes.fromhex(chunk.hash)
            facts[raw] = Fact(
                hash=raw,
                parent=bytes.fromhex(chunk.parent),
                start=chunk.start,
                end=chunk.end,
                owner=chunk.owner,
                created_day=day_of(chunk.created_ms),
                revision=kv.mod_revision,
                tail=chunk.tail,
            )
    async for page in etcd.scan(keys.of_model("uses", fingerprint), at_revision=revision):
        for kv in page:
            fact = facts.get(bytes.fromhex(last_part(kv.key)))
            if fact is not None:
                fact.use_day, fact.use_revision = unpack_use(kv.value).day, kv.mod_revision
    async for page in etcd.scan(keys.of_model("pins", fingerprint), at_revision=revision):
        for kv in page:
            fact = facts.get(bytes.fromhex(last_part(kv.key)))
            if fact is not None:
                fact.pinned = True
    return list(facts.values())


@dataclass(slots=True)
class Removal:
    """Removes marked chunks of one model. keep_pinned: as they were marked. at_once: the bytes need not wait."""

    run: Run
    fingerprint: str
    keep_pinned: bool = True
    at_once: bool = False
    told: set[str] = field(default_factory=set)
    """Directories told to drop replicas."""

    async def remove(self, marked: Sequence[Marked]) -> AsyncIterator[None]:
        """Children before parents, as `mark` orders them; yields after each transaction."""
        kept: set[bytes] = set()
        for i in range(0, len(marked), _PER_TRANSACTION):
            block: list[Marked] = []
            for one in marked[i : i + _PER_TRANSACTION]:
                if one.fact.hash in kept:  # a child of it stayed
                    kept.add(one.fact.parent)
                else:
                    block.append(one)
            for one in await self._remove_block(block) if block else ():
                self.run.totals.raced += 1
                kept.add(one.fact.parent)
            yield

    async def _remove_block(self, block: Sequence[Marked]) -> list[Marked]:
        """Those left alone: something about them had changed, or a child of them stayed."""
        plans = await self._plan(block)
        if self.run.dry:
            for plan in plans:
                self._count(plan)
            return []
        unchanged = all(plan.chunk is not None for plan in plans)
        if unchanged and sum(len(plan.operations) for plan in plans) <= MAX_OPERATIONS and await self._write(plans):
            return []
        # One by one: only what has changed is left alone, and what it hangs under.
        left: list[Marked] = []
        spared: set[bytes] = set()
        for plan in plans:
            fact = plan.marked.fact
            if plan.chunk is None or fact.hash in spared or not await self._write([plan]):
                left.append(plan.marked)
                spared.add(fact.parent)
        return left

    async def _write(self, plans: Sequence[_Plan]) -> bool:
        outcome = await self.run.write(
            [comparison for plan in plans for comparison in plan.compare],
            [operation for plan in plans for operation in plan.operations],
        )
        if outcome.succeeded:
            for plan in plans:
                self._count(plan)
            await self.run.reached(Step.FACTS_REMOVED)
        return outcome.succeeded

    async def _plan(self, block: Sequence[Marked]) -> list[_Plan]:
        keys, of = self.run.keys, self.fingerprint
        reads: list[Read] = []
        for one in block:
            hash = one.fact.hash.hex()
            reads += [Get(keys.chunk(of, hash)), Get(keys.garbage(of, hash)), GetPrefix(keys.replicas(of, hash))]
        result = await self.run.etcd.read(reads)
        found = iter(result.found)
        plans: list[_Plan] = []
        for one in block:
            chunk, garbage, replicas = next(found), next(found), next(found)
            plans.append(self._planned(one, chunk, garbage, replicas, result.revision))
        return plans

    def _planned(
        self,
        one: Marked,
        chunk: tuple[KeyValue, ...],
        garbage: tuple[KeyValue, ...],
        replicas: tuple[KeyValue, ...],
        revision: int,
    ) -> _Plan:
        keys, of, hash = self.run.keys, self.fingerprint, one.fact.hash.hex()
        if not chunk or chunk[0].mod_revision != one.fact.revision:
            return _Plan(one)
        stands = unpack(pb.Chunk, chunk[0].value)
        since_ms = 0 if self.at_once else self.run.now_ms
        condemned = unpack_garbage(garbage[0].value) if garbage else {}
        condemned |= {receipt.key: Condemned(since_ms, receipt.size) for receipt in stands.receipts}
        compare: list[Comparison] = [
            Unchanged(keys.chunk(of, hash), one.fact.revision),
            Unchanged(keys.use(of, hash), one.fact.use_revision),
            Unchanged(keys.garbage(of, hash), garbage[0].mod_revision if garbage else 0),
            UnchangedSince(keys.replicas(of, hash), revision),
        ]
        if self.keep_pinned:
            compare.append(Unchanged(keys.pin(of, hash), 0))
        operations: list[Operation] = [
            Delete(keys.chunk(of, hash)),
            Delete(keys.use(of, hash)),
            Put(keys.garbage(of, hash), pack_garbage(condemned)),
        ]
        if not self.keep_pinned:
            operations.append(Delete(keys.pin(of, hash)))
        nodes = [last_part(kv.key) for kv in replicas][:_MOST_NODES]
        if nodes:
            operations.append(DeletePrefix(keys.replicas(of, hash)))
            operations += [Put(keys.removal(node, of, hash), stands.owner.encode()) for node in nodes]
        return _Plan(one, stands, compare, operations, nodes)

    def _count(self, plan: _Plan) -> None:
        if plan.chunk is None:
            return
        run, size = self.run, sum(receipt.size for receipt in plan.chunk.receipts)
        run.totals.chunks_removed += 1
        run.totals.bytes_condemned += size
        run.fresh.append(
            pb.Collected(
                reason=plan.marked.reason,
                fingerprint=self.fingerprint,
                hash=plan.chunk.hash,
                owner=plan.chunk.owner,
                bytes=size,
            )
        )
        self.told.update(plan.nodes)
        if run.dry:
            run.would_go.add((self.fingerprint, plan.chunk.hash))
        if run.dry and self.at_once:
            for receipt in plan.chunk.receipts:
                count(run, receipt.key, Condemned(0, receipt.size), plan.marked.reason)
