"""Deleting the bytes of garbage records whose grace period is over.

An object goes in four steps, after each of which a crash leaves something the next run takes up: the record says
`deleting` (from now on no publication names it), the store deletes it, the record says `deleted`, and once no
publication can be under way that saw it, the record is dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from libs.continuation.errors import IdentityError
from libs.continuation.keys import parse_key
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.run import Run, Step
from services.catalog.etcd.transaction import Delete, Get, KeyValue, Operation, Put, Unchanged
from services.catalog.facts.garbage import Condemned, pack_garbage, unpack_garbage, without
from services.catalog.facts.values import unpack
from services.catalog.parallel import gather

Wanted = Callable[[str], bool]
"""Of an object key: whether this run is about it."""


async def delete_due(run: Run, reason: pb.CollectReason, wanted: Wanted = lambda key: True) -> AsyncIterator[None]:
    """Deletes what is due; yields after each record."""
    async for page in run.etcd.scan(run.keys.of_model("garbage")):
        for kv in page:
            run.check()
            await _record(run, kv, reason, wanted)
        yield


async def _record(run: Run, kv: KeyValue, reason: pb.CollectReason, wanted: Wanted) -> None:
    garbage = unpack_garbage(kv.value)
    old = {key for key, of in garbage.items() if of.is_over(run.now_ms)}
    due = {key: of for key, of in garbage.items() if not of.deleted_ms and wanted(key) and _is_due(run, of)}
    run.totals.objects_waiting += sum(
        not of.deleted_ms and wanted(key) and key not in due for key, of in garbage.items()
    )
    if not old and not due:
        return
    _, fingerprint, hash = run.keys.relative(kv.key)
    chunk_key = run.keys.chunk(fingerprint, hash)
    (stands,) = (await run.etcd.read([Get(chunk_key)])).found
    # A fact that names one after all outranks its record.
    named = {receipt.key for receipt in unpack(pb.Chunk, stands[0].value).receipts} if stands else set()
    left = without(garbage, old | named)
    due = without(due, named)
    if run.dry:
        for key, of in due.items():
            count(run, key, of, reason)
        return
    left |= {key: replace(of, deleting=True) for key, of in due.items()}
    announced = await run.write(
        [Unchanged(kv.key, kv.mod_revision), Unchanged(chunk_key, stands[0].mod_revision if stands else 0)],
        [_put(kv.key, left)],
    )
    if not announced.succeeded:
        run.totals.raced += 1
        return
    if old:
        await run.reached(Step.RECORD_DROPPED)
    if not due:
        return
    await run.reached(Step.DELETION_ANNOUNCED)

    async def delete(key: str, of: Condemned) -> None:
        run.check()
        await run.store.remove(key)
        count(run, key, of, reason)
        await run.reached(Step.OBJECT_DELETED)

    await gather(delete(key, of) for key, of in due.items())
    left |= {key: replace(left[key], deleted_ms=run.now_ms) for key in due}
    # Nobody else writes a record whose objects are being deleted but publications of its other objects: then the next
    # run deletes once more.
    recorded = await run.write([Unchanged(kv.key, announced.revision)], [_put(kv.key, left)])
    if recorded.succeeded:
        await run.reached(Step.DELETION_RECORDED)


def count(run: Run, key: str, of: Condemned, reason: pb.CollectReason) -> None:
    """An object removed, or one that would be."""
    run.totals.objects_removed += 1
    run.totals.bytes_removed += of.size
    item = pb.Collected(reason=reason, key=key, bytes=of.size)
    try:
        parts = parse_key(key)
        item.fingerprint, item.owner, item.hash = parts.fingerprint, parts.owner, parts.hash
    except IdentityError:
        pass
    run.fresh.append(item)


def _is_due(run: Run, of: Condemned) -> bool:
    return of.deleting or of.since_ms == 0 or of.since_ms + run.limits.grace_ms <= run.now_ms


def _put(key: bytes, left: dict[str, Condemned]) -> Operation:
    return Put(key, pack_garbage(left)) if left else Delete(key)
