"""Replica facts of chunk directories that no worker has claimed for their retention: the disk is gone, or was wiped.

A directory's last claim is noted at registration and by every collection that finds it claimed; one without a note is
as old as the first collection that meets it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.run import Run, Step
from services.catalog.etcd.transaction import MAX_OPERATIONS, Delete, Operation, Put, Unchanged
from services.catalog.facts.keys import last_part
from services.catalog.facts.uses import day_of
from services.catalog.facts.values import pack_number, unpack_number

_MARGIN = 2


async def forget(run: Run, claimed: Collection[str]) -> AsyncIterator[None]:
    """claimed: by registered workers now. Yields after each page."""
    keys, today = run.keys, day_of(run.now_ms)
    noted = {last_part(kv.key): kv async for page in run.etcd.scan(keys.directories) for kv in page}
    holding: dict[str, list[bytes]] = {}
    async for page in run.etcd.scan(keys.of_model("replicas")):
        run.check()
        for kv in page:
            node = last_part(kv.key)
            note = noted.get(node)
            gone = node not in claimed and note is not None and _expired(run, unpack_number(note.value), today)
            _, fingerprint, hash, _ = keys.relative(kv.key)
            if (fingerprint, hash) in run.would_go:
                continue
            holding.setdefault(node, [])
            if gone:
                holding[node].append(kv.key)
        yield
    stale = {
        node for node, kv in noted.items() if node not in claimed and _expired(run, unpack_number(kv.value), today)
    }
    fresh: list[Operation] = [
        Put(keys.directory(node), pack_number(today))
        for node in sorted({*claimed, *holding})
        if (node in claimed and (node not in noted or unpack_number(noted[node].value) < today)) or node not in noted
    ]
    if fresh and not run.dry:
        for i in range(0, len(fresh), MAX_OPERATIONS - _MARGIN):
            await run.write([], fresh[i : i + MAX_OPERATIONS - _MARGIN])
        await run.reached(Step.DIRECTORIES_NOTED)
    for node in sorted(stale):
        await _forget(run, node, holding.get(node, []), noted[node].mod_revision)
        yield


async def _forget(run: Run, node: str, replicas: list[bytes], noted_revision: int) -> None:
    keys = run.keys
    if run.dry:
        _count(run, node, replicas)
        return
    # Registration notes the directory: from then on nothing more of it is forgotten.
    still = Unchanged(keys.directory(node), noted_revision)
    removals = [kv.key async for page in run.etcd.scan(keys.removals(node)) for kv in page]
    for doomed, step in ((replicas, Step.REPLICAS_REMOVED), (removals, Step.DIRECTORY_FORGOTTEN)):
        for i in range(0, len(doomed), MAX_OPERATIONS - _MARGIN):
            block = doomed[i : i + MAX_OPERATIONS - _MARGIN]
            if not (await run.write([still], [Delete(key) for key in block])).succeeded:
                run.totals.raced += 1
                return
            if step is Step.REPLICAS_REMOVED:
                _count(run, node, block)
            await run.reached(step)
    if (await run.write([still], [Delete(keys.directory(node))])).succeeded:
        await run.reached(Step.DIRECTORY_FORGOTTEN)


def _count(run: Run, node: str, replicas: list[bytes]) -> None:
    run.totals.replicas_removed += len(replicas)
    for key in replicas:
        _, fingerprint, hash, _ = run.keys.relative(key)
        run.fresh.append(
            pb.Collected(reason=pb.COLLECT_REASON_UNCLAIMED, fingerprint=fingerprint, hash=hash, node=node)
        )


def _expired(run: Run, day: int, today: int) -> bool:
    return today - day >= run.limits.directory_days
