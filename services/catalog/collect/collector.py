"""Collections, purges and repairs from beginning to end, as streams of progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

from libs.continuation.keys import KEY_VERSION, parse_key
from libs.continuation.tenancy import OWNER_BYTES
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect import decisions, directories, losses, orphans, uploads
from services.catalog.collect.facts import Removal, models, snapshot
from services.catalog.collect.lock import LEASE_S, holding
from services.catalog.collect.marking import Fact, Marked, Rule, by_loss, by_owner, by_retention, mark
from services.catalog.collect.objects import delete_due
from services.catalog.collect.ownership import Ownership
from services.catalog.collect.run import Limits, Reached, Run, Step, unobserved
from services.catalog.collect.tails import superseded
from services.catalog.etcd.client import EtcdClient
from services.catalog.facts.errors import BucketNotProvenError
from services.catalog.facts.keys import Keys, check_hex
from services.catalog.facts.retentions import Retentions
from services.catalog.facts.uses import day_of
from services.catalog.store import ObjectStore

# A publication under way may add chunks behind a purge's back; each pass takes what the last one missed.
_PURGE_PASSES = 10
# Some ten milliseconds of marking.
_MANY = 10_000


class Collector:
    """Args:
    claimed: the chunk directories that registered workers claim, newest knowledge.
    now_ms: unix milliseconds.
    holder: who is said to hold the lock.
    reached: told what has just been done, before the next effect; for tests that end the process there.
    """

    def __init__(
        self,
        etcd: EtcdClient,
        keys: Keys,
        store: ObjectStore,
        retentions: Retentions,
        limits: Limits,
        *,
        claimed: Callable[[], frozenset[str]],
        now_ms: Callable[[], int],
        holder: str,
        lease_s: int = LEASE_S,
        reached: Reached = unobserved,
    ) -> None:
        self._etcd, self._keys, self._store, self._retentions, self._limits = etcd, keys, store, retentions, limits
        self._claimed, self._now_ms, self._holder, self._lease_s = claimed, now_ms, holder, lease_s
        self._reached = reached
        self.ownership = Ownership(etcd, keys, store)

    async def collect(self, dry: bool) -> AsyncGenerator[pb.CollectGarbageResponse]:
        """Progress, the last message `done`. Raises CollectionRunningError, CollectionLostError."""
        async with AsyncExitStack() as stack:
            run = await self._begin(stack, dry)
            owned = await self.ownership.owned(write=not dry)
            for phase, work in (
                ("facts", self._facts(run)),
                ("orphans", orphans.condemn(run, pb.COLLECT_REASON_UNNAMED) if owned else _nothing()),
                ("bytes", delete_due(run, pb.COLLECT_REASON_UNNAMED)),
                ("directories", directories.forget(run, self._claimed())),
                ("decisions", decisions.forget(run)),
                ("uploads", uploads.give_up(run) if owned else _nothing()),
            ):
                run.phase = phase
                async for _ in work:
                    yield run.report()
            last = run.report()
            last.done, last.revision = True, (await self._etcd.read([])).revision
            last.bucket_of_another = not owned
        yield last

    async def purge(self, owner: str, dry: bool, include_pinned: bool) -> AsyncGenerator[pb.PurgeResponse]:
        """Progress, the last message `done`. Raises InvalidRequestError and as `collect`."""
        check_hex(owner, "owner", OWNER_BYTES)
        pinned, told = 0, set[str]()
        async with AsyncExitStack() as stack:
            run = await self._begin(stack, dry)
            for _ in range(1 if dry else _PURGE_PASSES):
                before = run.totals.chunks_removed
                run.phase, pinned = "facts", 0
                for fingerprint in await models(run):
                    facts = await snapshot(run, fingerprint, owner)
                    marked = await _marked(facts, by_owner(owner), keep_pinned=not include_pinned)
                    pinned += len(facts) - len(marked)
                    removal = Removal(run, fingerprint, keep_pinned=not include_pinned, at_once=True)
                    async for _ in removal.remove(marked):
                        yield _purged(run)
                    told |= removal.told
                run.phase = "bytes"
                async for _ in self._bytes_of(run, owner):
                    yield _purged(run)
                if run.totals.chunks_removed == before:
                    break
            last = _purged(run)
            last.done, last.pinned, last.nodes[:] = True, pinned, sorted(told)
            last.revision = (await self._etcd.read([])).revision
        yield last

    async def repair(self, fingerprint: str, owner: str, dry: bool) -> AsyncGenerator[pb.RepairResponse]:
        """Progress, the last message `done`. Raises BucketNotProvenError, InvalidRequestError and as `collect`."""
        if fingerprint:
            check_hex(fingerprint, "fingerprint")
        if owner:
            check_hex(owner, "owner", OWNER_BYTES)
        pinned = 0
        async with AsyncExitStack() as stack:
            run = await self._begin(stack, dry)
            await self._prove()
            for of in [fingerprint] if fingerprint else await models(run):
                run.phase = "objects"
                search = losses.Search(run, of, owner)
                async for _ in search.run():
                    yield _repaired(run, search)
                run.phase = "facts"
                # Looked at again: what has come back since is no loss. And still in our own bucket: one that went away
                # as a whole answers "not found" too.
                lost = await search.confirmed()
                await self._prove()
                facts = await snapshot(run, of, owner) if lost else []
                marked = await _marked(facts, by_loss(lost), keep_pinned=False)
                pinned += sum(one.fact.pinned for one in marked)
                await run.reached(Step.MARKED)
                async for _ in Removal(run, of, keep_pinned=False).remove(marked):
                    yield _repaired(run, search)
                yield _repaired(run, search)
            last = pb.RepairResponse(phase=run.phase, totals=run.totals, done=True, pinned=pinned)
            last.revision = (await self._etcd.read([])).revision
        yield last

    async def _prove(self) -> None:
        if not await self.ownership.proven():
            raise BucketNotProvenError(self._store.target.bucket)

    async def _begin(self, stack: AsyncExitStack, dry: bool) -> Run:
        held = None
        if not dry:
            held = await stack.enter_async_context(holding(self._etcd, self._keys, self._holder, self._lease_s))
            await self._reached(Step.LOCKED)
        # The cut-off is read before anything is marked: what is used or unnamed later is judged by the next run.
        return Run(self._etcd, self._keys, self._store, self._limits, held, self._now_ms(), dry, reached=self._reached)

    async def _facts(self, run: Run) -> AsyncIterator[None]:
        owners, _ = await self._retentions.read()
        for fingerprint in await models(run):
            facts = await snapshot(run, fingerprint)
            yield
            tails = await superseded(run, fingerprint, facts)
            rule = by_retention(day_of(run.now_ms), self._retentions.standard, owners, tails)
            marked = await _marked(facts, rule)
            await run.reached(Step.MARKED)
            async for _ in Removal(run, fingerprint).remove(marked):
                yield

    async def _bytes_of(self, run: Run, owner: str) -> AsyncIterator[None]:
        """Every object of the owner that no fact names, whatever its age."""
        for fingerprint in await models(run):
            prefix = f"{KEY_VERSION}/{fingerprint}/{owner}/"
            async for _ in orphans.condemn(run, pb.COLLECT_REASON_PURGED, prefix, whatever_age=True):
                yield
        async for _ in delete_due(run, pb.COLLECT_REASON_PURGED, lambda key: parse_key(key).owner == owner):
            yield


async def _marked(facts: Sequence[Fact], rule: Rule, *, keep_pinned: bool = True) -> list[Marked]:
    """On a thread where it takes long: look-ups are answered meanwhile."""
    if len(facts) < _MANY:
        return mark(facts, rule, keep_pinned=keep_pinned)
    return await asyncio.to_thread(mark, facts, rule, keep_pinned=keep_pinned)


async def _nothing() -> AsyncIterator[None]:
    """In place of a phase that must not be."""
    for _ in ():
        yield


def _purged(run: Run) -> pb.PurgeResponse:
    report = run.report()
    return pb.PurgeResponse(phase=report.phase, collected=report.collected, totals=report.totals)


def _repaired(run: Run, search: losses.Search) -> pb.RepairResponse:
    report = run.report()
    missing, search.fresh = search.fresh, []
    return pb.RepairResponse(phase=report.phase, missing=missing, collected=report.collected, totals=report.totals)
