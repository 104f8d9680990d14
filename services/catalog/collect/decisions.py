"""Decisions past their retention: the index entry first, then the sealed object; and objects without an entry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.run import Run, Step
from services.catalog.etcd.transaction import Delete, Get, KeyValue
from services.catalog.facts.decisions import day_text, object_key
from services.catalog.facts.uses import day_of
from services.catalog.parallel import gather
from services.catalog.store import Listed

_PER_TRANSACTION = 50
_PREFIX, _SUFFIX = "decisions/", ".jsonl"


async def forget(run: Run) -> AsyncIterator[None]:
    """Yields after each page."""
    cut_off = day_text(max(0, day_of(run.now_ms) - run.limits.decision_days))
    async for page in run.etcd.scan(run.keys.decisions):
        old = [kv for kv in page if run.keys.relative(kv.key)[1] < cut_off]
        for i in range(0, len(old), _PER_TRANSACTION):
            await _batches(run, old[i : i + _PER_TRANSACTION])
            yield
        if len(old) < len(page):
            break
    async for listed in run.store.list(_PREFIX):
        await _unindexed(run, listed)
        yield


async def _batches(run: Run, old: Sequence[KeyValue]) -> None:
    keys = []
    for kv in old:
        _, day, batch = run.keys.relative(kv.key)
        keys.append(object_key(day, batch))
    if not run.dry:
        await run.write([], [Delete(kv.key) for kv in old])
        await run.reached(Step.DECISIONS_UNINDEXED)
        await gather(run.store.remove(key) for key in keys)
        await run.reached(Step.DECISIONS_DELETED)
    _count(run, keys)


async def _unindexed(run: Run, listed: Sequence[Listed]) -> None:
    """What a crash between object and entry left behind, either way round."""
    old = [
        item for item in listed if item.key.endswith(_SUFFIX) and item.modified_ms + run.limits.grace_ms <= run.now_ms
    ]
    indexed = await run.etcd.read([Get(_index_key(run, item.key)) for item in old]) if old else None
    doomed = [item.key for item, kvs in zip(old, indexed.found if indexed else (), strict=True) if not kvs]
    if doomed and not run.dry:
        run.check()
        await gather(run.store.remove(key) for key in doomed)
        await run.reached(Step.DECISIONS_DELETED)
    _count(run, doomed)


def _index_key(run: Run, key: str) -> bytes:
    return run.keys.decisions + key.removeprefix(_PREFIX).removesuffix(_SUFFIX).encode()


def _count(run: Run, keys: Sequence[str]) -> None:
    run.totals.decisions_removed += len(keys)
    run.fresh.extend(pb.Collected(reason=pb.COLLECT_REASON_OLD_DECISIONS, key=key) for key in keys)
