"""Checkpoints against full staging, stores and catalogs that go away: settled exactly once, in order, within bounds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.transaction import Delete
from services.worker.checkpoint.settings import CheckpointSettings
from services.worker.storage import StorageError
from tests.catalog.rig import until
from tests.fixtures.fault_proxy import FaultProxy
from tests.worker_storage.conftest import register
from tests.worker_storage.rig import Model, at, draw_tokens, worker


def ends(pool, ranges) -> list[bool]:
    """How each range ended; every one exactly once."""
    assert Counter(id(what) for what, _ in pool.ends).most_common(1)[0][1] == 1
    return [pool.outcome(what)[0] for what in ranges]


def one_chunk(bench) -> int:
    return bench.storage.checkpointer._capturer.size(Model().ranges(draw_tokens(256, 0))[0])


async def test_full_staging_skips_and_goes_on_in_order(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(8 * 256, seed=1)
    ranges = model.ranges(tokens)
    settings = CheckpointSettings(staging_bytes=250_000, uploads=1)  # one chunk at a time
    async with worker(model, tmp_path, bucket, catalog.target, checkpoint=settings) as one:
        assert one_chunk(one) <= settings.staging_bytes < 2 * one_chunk(one)
        one.pool.hold(ranges)
        most = 0
        for what in ranges:
            one.storage.checkpointer.offer(what)
        while one.storage.checkpointer.counts().pending:
            most = max(most, one.storage.counts.checkpoint.staged_bytes)
            await asyncio.sleep(0.001)
        assert 0 < most <= settings.staging_bytes
        assert one.storage.checkpointer.counts().dropped >= len(ranges) - 2
        assert ends(one.pool, ranges) == [True] * 8
        assert [what for what, _ in one.pool.ends] == ranges
        assert len(await one.lookup(tokens)) == 8


async def test_a_range_that_is_gone_takes_its_children_along(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(4 * 256, seed=2)
    ranges = model.ranges(tokens)
    async with worker(model, tmp_path, bucket, catalog.target) as one:
        one.pool.hold([ranges[0], ranges[2], ranges[3]])
        assert await one.checkpoint(ranges) == 3
        assert ends(one.pool, ranges) == [True, False, False, False]
        assert one.storage.counts.checkpoint.lost_not_resident == 1
        assert one.storage.counts.checkpoint.lost_orphans == 2
        assert len(await one.lookup(tokens)) == 1
        # What is offered behind it later is lost at once; offered from its beginning again, it all goes through.
        again = model.ranges(tokens)
        one.pool.hold(again)
        assert await one.checkpoint(again) == 0
        assert len(await one.lookup(tokens)) == 4


async def test_the_store_away_and_back(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(3 * 256, seed=3)
    ranges = model.ranges(tokens)
    host, _, port = bucket.endpoint.rpartition(":")
    async with (
        FaultProxy(host, int(port)) as proxy,
        worker(model, tmp_path, at(bucket, proxy.address), catalog.target) as one,
    ):
        one.pool.hold(ranges)
        proxy.refuse = True
        proxy.reset()
        for what in ranges:
            one.storage.checkpointer.offer(what)
        await until(lambda: one.storage.counts.checkpoint.put_failed >= 2)
        assert not one.pool.ends and not await one.lookup(tokens)
        # Meanwhile the files are in the directory already.
        assert len(list((tmp_path / "v1").rglob("*.safetensors"))) >= 2
        proxy.heal()
        assert await one.storage.checkpointer.drain(20) == 0
        assert ends(one.pool, ranges) == [True] * 3 and len(await one.lookup(tokens)) == 3


async def test_the_catalog_away_and_back(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(3 * 256 + 32, seed=4)
    ranges = model.ranges(tokens)
    host, _, port = catalog.target.rpartition(":")
    async with (
        FaultProxy(host, int(port)) as proxy,
        worker(model, tmp_path, bucket, proxy.address, checkpoint=CheckpointSettings(catalog_timeout_s=0.5)) as one,
    ):
        one.pool.hold(ranges)
        proxy.refuse = True
        proxy.reset()
        for what in ranges:
            one.storage.checkpointer.offer(what)
        await until(lambda: one.storage.counts.checkpoint.catalog_failed >= 1)
        assert not one.pool.ends
        proxy.heal()
        assert await one.storage.checkpointer.drain(30) == 0
        assert ends(one.pool, ranges) == [True] * 4 and len(await one.lookup(tokens)) == 4


async def test_patience_ends(catalog, model, bucket, tmp_path):
    ranges = model.ranges(draw_tokens(3 * 256, seed=5))
    host, _, port = bucket.endpoint.rpartition(":")
    settings = CheckpointSettings(patience_s=0.8, put_timeout_s=0.5)
    async with (
        FaultProxy(host, int(port)) as proxy,
        worker(model, tmp_path, at(bucket, proxy.address), catalog.target, checkpoint=settings) as one,
    ):
        one.pool.hold(ranges)
        proxy.blackhole()
        started = time.monotonic()
        assert await one.checkpoint(ranges, within=10) == 3
        assert time.monotonic() - started < 4
        assert ends(one.pool, ranges) == [False] * 3
        await until(lambda: one.storage.counts.checkpoint.staged_bytes == 0)
        assert one.storage.counts.checkpoint.lost_too_late >= 1


async def test_drain_ends_in_time_and_close_gives_up_the_rest(catalog, model, bucket, tmp_path):
    ranges = model.ranges(draw_tokens(5 * 256, seed=6))
    host, _, port = bucket.endpoint.rpartition(":")
    settings = CheckpointSettings(put_timeout_s=0.5)
    async with (
        FaultProxy(host, int(port)) as proxy,
        worker(model, tmp_path, at(bucket, proxy.address), catalog.target, checkpoint=settings) as one,
    ):
        one.pool.hold(ranges)
        proxy.blackhole()
        started = time.monotonic()
        assert await one.checkpoint(ranges, within=0.5) == 5
        assert time.monotonic() - started < 1.5
        await one.storage.checkpointer.aclose()
        assert ends(one.pool, ranges) == [False] * 5 and not one.pool.leased
        late = model.ranges(draw_tokens(256, seed=60))
        one.storage.checkpointer.offer(late[0])
        assert one.pool.outcome(late[0]) == [False]


async def test_a_range_the_catalog_refuses_is_lost_and_its_batch_is_not(catalog, model, bucket, tmp_path):
    good, bad = model.ranges(draw_tokens(512, seed=7)), model.ranges(draw_tokens(1_024, seed=8))
    async with worker(model, tmp_path, bucket, catalog.target) as one:
        one.pool.hold([*good, *bad])
        # Its first two ranges are never offered, so that the third has no parent.
        assert await one.checkpoint([*good, *bad[2:]]) == 2
        assert ends(one.pool, [*good, *bad[2:]]) == [True, True, False, False]
        assert one.storage.counts.checkpoint.lost_refused == 1


async def test_an_unregistered_model_waits_for_its_registration(catalog, bucket, tmp_path):
    model = Model()
    tokens = draw_tokens(256, seed=9)
    ranges = model.ranges(tokens)
    async with worker(model, tmp_path, bucket, catalog.target) as one:
        one.pool.hold(ranges)
        one.storage.checkpointer.offer(ranges[0])
        await until(lambda: one.storage.counts.checkpoint.catalog_failed >= 1)
        await register(catalog, model)
        assert await one.storage.checkpointer.drain(20) == 0
        assert ends(one.pool, ranges) == [True]


async def test_a_full_queue_settles_at_once(catalog, model, bucket, tmp_path):
    ranges = model.ranges(draw_tokens(6 * 256, seed=10))
    async with worker(model, tmp_path, bucket, catalog.target, checkpoint=CheckpointSettings(pending_ranges=2)) as one:
        one.pool.hold(ranges)
        for what in ranges:
            one.storage.checkpointer.offer(what)
        assert [what for what, durable in one.pool.ends if not durable] == ranges[2:]
        await until(lambda: one.storage.counts.checkpoint.pending == 0)
        assert [one.pool.outcome(what) for what in ranges] == [[True], [True], [False], [False], [False], [False]]
        # A drain offers them again, as many at a time as the queue takes.
        assert await one.storage.checkpointer.drain(20) == 0
        assert [one.pool.outcome(what)[-1] for what in ranges] == [True] * 6


async def test_replica_facts_follow_the_directory(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(512, seed=12)
    ranges = model.ranges(tokens)
    async with worker(model, tmp_path, bucket, catalog.target) as one:
        node = one.storage.local.node
        await register(catalog, model, node=node)
        one.pool.hold(ranges)
        assert await one.checkpoint(ranges) == 0

        async def replicas() -> list[int]:
            return [len(found.replicas) for found in await one.lookup(tokens)]

        async def become(wanted: list[int]) -> None:
            async with asyncio.timeout(10):
                while await replicas() != wanted:  # noqa: ASYNC110 - what another process comes to know
                    await asyncio.sleep(0.05)

        await become([2, 2])
        directory = one.storage.tiers[0]
        for key in directory.objects():
            if key.hash == ranges[1].hash:
                directory.remove(key, within=5)
        await become([2, 0])
    # Facts that got lost are told again at the next start.
    for what in ranges:
        await catalog.stub.SetReplica(
            pb.SetReplicaRequest(
                updates=[
                    pb.ReplicaUpdate(
                        fingerprint=model.fingerprint,
                        hash=what.hash,
                        replica=pb.Replica(node=node, group=group.name, state=pb.REPLICA_STATE_REMOVED),
                    )
                    for group in model.layout.groups
                ]
            )
        )
    async with worker(model, tmp_path, bucket, catalog.target) as one:
        async with asyncio.timeout(10):
            while [len(found.replicas) for found in await one.lookup(tokens)] != [2, 0]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_claims_about_what_is_no_fact_are_dropped(catalog, model, bucket, tmp_path):
    ranges = model.ranges(draw_tokens(512, seed=21))
    async with worker(model, tmp_path, bucket, catalog.target) as one:
        one.pool.hold(ranges)
        assert await one.checkpoint(ranges) == 0
    # A file is left of the second range whose fact is gone.
    await catalog.etcd.transact(success=[Delete(catalog.keys.chunk(model.fingerprint, ranges[1].hash))])
    async with worker(model, tmp_path, bucket, catalog.target) as one:
        counts = one.storage.counts.replicas
        await until(lambda: counts.sent + counts.unknown == 4)
        assert (counts.sent, counts.unknown, counts.forgotten, counts.waiting) == (2, 2, 0, 0)
        # Published again, its replica is recorded.
        await register(catalog, model, node=one.storage.local.node)
        again = model.ranges(draw_tokens(512, seed=21))
        one.pool.hold(again)
        assert await one.checkpoint(again) == 0
        async with asyncio.timeout(10):
            while [len(found.replicas) for found in await one.lookup(draw_tokens(512, seed=21))] != [2, 2]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_directory_without_room_hinders_nothing(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(512, seed=13)
    ranges = model.ranges(tokens)
    async with worker(model, tmp_path, bucket, catalog.target, cap=10) as one:
        one.pool.hold(ranges)
        assert await one.checkpoint(ranges) == 0
        assert one.storage.counts.checkpoint.local_failed == 4 and one.storage.counts.directory.refused_full == 4
        assert len(await one.lookup(tokens)) == 2


async def test_the_event_loop_is_never_held_up(catalog, model, bucket, tmp_path):
    ranges = model.ranges(draw_tokens(12 * 256, seed=14))
    async with worker(model, tmp_path, bucket, catalog.target) as one:
        one.pool.hold(ranges)
        spent: list[float] = []
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 60.0

        async def watch() -> None:
            while True:
                before = time.thread_time()
                await asyncio.sleep(0)
                spent.append(time.thread_time() - before)

        watching = asyncio.create_task(watch())
        assert await one.checkpoint(ranges) == 0
        watching.cancel()
        spent.sort()
        # Processor time of this thread per turn of the loop: the catalog's own work is in it here.
        assert spent[int(len(spent) * 0.99)] < 0.005, spent[-10:]


async def test_staging_that_holds_no_chunk_is_a_clear_error(catalog, model, bucket, tmp_path):
    with pytest.raises(StorageError, match="staging"):
        async with worker(
            model, tmp_path, bucket, catalog.target, checkpoint=CheckpointSettings(staging_bytes=180_000)
        ):
            pass


async def test_a_bucket_that_cannot_be_used_is_a_clear_error(catalog, model, bucket, tmp_path):
    from dataclasses import replace

    with pytest.raises(StorageError, match="secret key"):
        async with worker(model, tmp_path / "a", replace(bucket, secret_key="wrong" * 8), catalog.target):
            pass
    with pytest.raises(StorageError, match="does not exist"):
        async with worker(model, tmp_path / "b", replace(bucket, bucket="nobody-made-this"), catalog.target):
            pass
