"""Facts whose bytes are gone: removed with what follows them, and nothing else; never on a mere failure to see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.ownership import MARK
from services.catalog.collect.run import Step
from services.catalog.server import unix_ms
from services.catalog.store import Stat, StoreUnavailableError
from tests.catalog.rig import code
from tests.catalog.test_collect_crash import OTHER_TOKENS, TOKENS, Bed, bed, collecting, free_lock, order

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer


@pytest.fixture
async def world(etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str) -> AsyncIterator[Bed]:
    async with bed(etcd_server, s3_server, prefix) as found:
        async for _ in found.catalog.stub.CollectGarbage(pb.CollectGarbageRequest()):
            pass  # marks the bucket
        yield found


async def lose(world: Bed, *receipts: pb.Receipt) -> None:
    for receipt in receipts:
        await asyncio.to_thread(world.client.remove_object, world.bucket, receipt.key)


async def repaired(world: Bed, **how: object) -> tuple[list[pb.Collected], list[pb.MissingObject], pb.RepairResponse]:
    items: list[pb.Collected] = []
    missing: list[pb.MissingObject] = []
    last = pb.RepairResponse()
    async for last in world.catalog.stub.Repair(pb.RepairRequest(**how)):
        items += last.collected
        missing += last.missing
    assert last.done and last.revision
    return items, missing, last


async def test_a_sound_cache_stays_as_it_is(world: Bed) -> None:
    await world.publish(TOKENS)
    items, missing, last = await repaired(world)
    assert not items and not missing and last.totals.objects_examined == 8
    assert len(await world.chunks()) == 4


async def test_what_is_lost_goes_with_what_follows_leaves_first(world: Bed) -> None:
    chunks = await world.publish(TOKENS, "node-x")
    other = await world.publish(OTHER_TOKENS)
    pinned = pb.ChunkId(fingerprint=world.tenant.fingerprint, hash=chunks[2].hash)
    await world.catalog.stub.Pin(pb.PinRequest(chunks=[pinned], who="test", why="kept"))
    await lose(world, chunks[1].receipts[1])

    said, missing, last = await repaired(world, dry_run=True)
    assert [m.key for m in missing] == [chunks[1].receipts[1].key] and last.pinned == 1
    assert len(await world.chunks()) == 6, "a dry run removed something"
    done, missing_now, last = await repaired(world)
    assert (done, missing_now, last.pinned) == (said, missing, 1)
    assert [item.hash for item in done] == [chunk.hash for chunk in (chunks[3], chunks[2], chunks[1])]
    assert {item.reason for item in done} == {pb.COLLECT_REASON_BYTES_GONE}
    assert set(await world.chunks()) == {chunks[0].hash, *(chunk.hash for chunk in other)}
    await world.check()
    assert world.catalog.metric("segue_catalog_collected_total", reason="bytes_gone") == 3
    told = await anext(aiter(world.catalog.stub.WatchDemands(pb.WatchDemandsRequest(node="node-x"))))
    assert {removal.hash for removal in told.removals} == {item.hash for item in done}
    # What is left of their bytes goes like any garbage; and what was lost can be published anew.
    await world.publish(TOKENS)
    assert len(await world.chunks()) == 6 and not (await repaired(world))[0]


async def test_only_what_was_asked_for(world: Bed) -> None:
    chunks = await world.publish(OTHER_TOKENS)
    await lose(world, *chunks[0].receipts)
    assert not (await repaired(world, owner="ab" * 16))[0]
    assert not (await repaired(world, fingerprint="ab" * 32))[0]
    items, missing, _ = await repaired(world, fingerprint=world.tenant.fingerprint, owner=chunks[0].owner)
    assert (len(items), len(missing)) == (2, 2) and not await world.chunks()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await repaired(world, owner="no hex")
    assert code(failure) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_bucket_that_is_not_ours_proves_nothing(world: Bed) -> None:
    chunks = await world.publish(OTHER_TOKENS)
    await lose(world, *chunks[0].receipts)
    await asyncio.to_thread(world.client.remove_object, world.bucket, MARK)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await repaired(world)
    assert code(failure) is grpc.StatusCode.FAILED_PRECONDITION and "mark" in failure.value.details()
    await world.catalog.store.put_if_absent(MARK, b"another's")
    with pytest.raises(grpc.aio.AioRpcError):
        await repaired(world, dry_run=True)
    assert len(await world.chunks()) == 2


async def test_a_bucket_that_goes_away_meanwhile_proves_nothing(world: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once "not found", as a deleted bucket answers: the mark is looked at again before anything is removed."""
    await world.publish(OTHER_TOKENS)
    store = world.catalog.store

    async def gone(key: str) -> Stat | None:
        await asyncio.to_thread(world.client.remove_object, world.bucket, MARK)
        return None

    monkeypatch.setattr(store, "stat", gone)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await repaired(world)
    assert code(failure) is grpc.StatusCode.FAILED_PRECONDITION and len(await world.chunks()) == 2


async def test_a_store_that_fails_or_comes_back_is_no_loss(world: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.publish(OTHER_TOKENS)
    store, real = world.catalog.store, world.catalog.store.stat
    asked: dict[str, int] = {}

    async def late(key: str) -> Stat | None:
        asked[key] = asked.get(key, 0) + 1
        return await real(key) if asked[key] > 1 else None

    monkeypatch.setattr(store, "stat", late)
    items, missing, _ = await repaired(world)
    assert not items and len(missing) == 4, "missing once, there when looked at again"

    async def broken(key: str) -> Stat | None:
        raise StoreUnavailableError("store:1", "InternalError: try later")

    monkeypatch.setattr(store, "stat", broken)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await repaired(world)
    assert code(failure) is grpc.StatusCode.UNAVAILABLE and len(await world.chunks()) == 2


async def test_killed_at_any_removal_what_stays_is_whole_chains(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str, world: Bed
) -> None:
    """Sixty-eight chunks go in five transactions: killed before any, after the first, after the third."""
    chunks = await world.publish([i // 256 for i in range(70 * 256)])
    await lose(world, chunks[2].receipts[0])
    async with collecting(world, etcd_server, s3_server, prefix) as process:
        left = []
        for step, nth in ((Step.LOCKED, 1), (Step.MARKED, 1), (Step.FACTS_REMOVED, 1), (Step.FACTS_REMOVED, 2)):
            done = await order(process, now_ms=unix_ms(), step=step.value, nth=nth, repair=True)
            assert done == {"signal": 9}, f"{step} was not reached"
            standing = await world.chunks()
            assert all(item.chunk.start == 0 or item.chunk.parent in standing for item in standing.values())
            left.append(len(standing))
            await free_lock(world)
        assert left == [70, 70, 55, 25]
        await order(process, now_ms=unix_ms(), step="", nth=1, repair=True)
    assert set(await world.chunks()) == {chunks[0].hash, chunks[1].hash}
    await world.check()
