"""Objects in the bucket that no fact names: losers of a publication race, uploads whose publisher died.

They get a garbage record that counts their time since the upload, so that what is older than the grace period goes in
the same run. A younger one may be about to be published and is left alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from libs.continuation.errors import IdentityError
from libs.continuation.keys import KEY_VERSION, ObjectKey, parse_key
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.objects import count
from services.catalog.collect.run import Run, Step
from services.catalog.etcd.transaction import Get, KeyValue, Put, Unchanged
from services.catalog.facts.garbage import Condemned, pack_garbage, unpack_garbage
from services.catalog.facts.values import unpack
from services.catalog.store import Listed

CHUNKS = f"{KEY_VERSION}/"


async def condemn(
    run: Run, reason: pb.CollectReason, prefix: str = CHUNKS, *, whatever_age: bool = False
) -> AsyncIterator[None]:
    """Yields after each page of the listing."""
    async for page in run.store.list(prefix):
        run.check()
        by_chunk: dict[tuple[str, str], list[Listed]] = {}
        for item in page:
            run.totals.objects_examined += 1
            try:
                key: ObjectKey = parse_key(item.key)
            except IdentityError:
                run.totals.foreign += 1
                continue
            by_chunk.setdefault((key.fingerprint, key.hash), []).append(item)
        await _chunks(run, reason, by_chunk, whatever_age)
        yield


async def _chunks(
    run: Run, reason: pb.CollectReason, by_chunk: dict[tuple[str, str], list[Listed]], whatever_age: bool
) -> None:
    keys = run.keys
    reads = [read for of, h in by_chunk for read in (Get(keys.chunk(of, h)), Get(keys.garbage(of, h)))]
    found = iter((await run.etcd.read(reads)).found)
    for (fingerprint, hash), items in by_chunk.items():
        chunk, garbage = next(found), next(found)
        await _one(run, reason, (fingerprint, hash), items, chunk, garbage, whatever_age)


async def _one(
    run: Run,
    reason: pb.CollectReason,
    of: tuple[str, str],
    items: Sequence[Listed],
    chunk: tuple[KeyValue, ...],
    garbage: tuple[KeyValue, ...],
    whatever_age: bool,
) -> None:
    named = {receipt.key for receipt in unpack(pb.Chunk, chunk[0].value).receipts} if chunk else set()
    known = unpack_garbage(garbage[0].value) if garbage else {}
    condemned = {
        item.key: Condemned(0 if whatever_age else item.modified_ms, item.size)
        for item in items
        if item.key not in named
        and _is_news(known.get(item.key), whatever_age)
        and (whatever_age or item.modified_ms + run.limits.grace_ms <= run.now_ms)
    }
    if not condemned:
        return
    if run.dry:
        for key, one in condemned.items():
            count(run, key, one, reason)
        return
    record = run.keys.garbage(*of)
    outcome = await run.write(
        [
            Unchanged(record, garbage[0].mod_revision if garbage else 0),
            Unchanged(run.keys.chunk(*of), chunk[0].mod_revision if chunk else 0),
        ],
        [Put(record, pack_garbage(known | condemned))],
    )
    if outcome.succeeded:
        await run.reached(Step.ORPHANS_CONDEMNED)
    else:
        run.totals.raced += 1


def _is_news(stands: Condemned | None, whatever_age: bool) -> bool:
    """Whether a record has to be written. An object that came back after its deletion is an orphan like any other."""
    if stands is None or stands.deleted_ms:
        return True
    return whatever_age and not stands.deleting and stands.since_ms > 0
