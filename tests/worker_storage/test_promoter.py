# ruff: noqa: ASYNC110 - the catalog is asked again and again
"""Demands are met: copied, verified, ready; whatever fails is said, bounded and tried again; deletion needs a word."""

from __future__ import annotations

import asyncio
import io

import pytest
from minio import Minio

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.controller.protocol import Tier
from services.worker.handlers import RestoreEnd
from services.worker.placement.settings import PromoterSettings
from tests.catalog.rig import until
from tests.fixtures.fault_proxy import Direction, FaultProxy
from tests.worker_storage.conftest import register
from tests.worker_storage.rig import at, draw_tokens, worker

TOKENS = draw_tokens(3 * 256 + 48, seed=41)
QUICK = PromoterSettings(retry_s=0.1)


@pytest.fixture
async def stored(catalog, model, bucket, tmp_path):
    """A chat of four nodes, durable, of a worker that has gone."""
    ranges = model.ranges(TOKENS)
    async with worker(model, tmp_path / "origin", bucket, catalog.target, seed=3) as one:
        one.pool.hold(ranges)
        assert await one.checkpoint(ranges) == 0
        return await one.lookup(TOKENS)


async def demand(bench, nodes, priority: int = 0) -> None:
    await bench.stub.SetDemands(
        pb.SetDemandsRequest(
            demands=[
                pb.Demand(
                    fingerprint=bench.model.fingerprint, hash=node.chunk.hash, node=bench.storage.local.node,
                    priority=priority, requester="test",
                )
                for node in nodes
            ]
        ),
        timeout=5,
    )  # fmt: skip


async def demands(bench) -> list[str]:
    found = await bench.stub.ListDemands(pb.ListDemandsRequest(node=bench.storage.local.node), timeout=5)
    return [one.hash for one in found.demands]


async def test_demands_are_met_and_withdrawn(catalog, model, bucket, tmp_path, stored):
    async with worker(model, tmp_path / "b", bucket, catalog.target) as other:
        await register(catalog, model, node=other.storage.local.node, worker="other")
        await demand(other, stored)
        counts = other.storage.counts
        await until(lambda: counts.placement.met == len(stored))
        assert counts.placement.copied == 2 * len(stored) == counts.directory.files
        assert counts.placement.copied_bytes == counts.directory.used_bytes
        assert (counts.placement.copying, counts.placement.copying_bytes) == (0, 0)
        async with asyncio.timeout(10):
            while await demands(other):
                await asyncio.sleep(0.02)
            while any(len(node.replicas) < 2 for node in await other.lookup(TOKENS)):
                await asyncio.sleep(0.02)
        outcome, landed = await other.restore(other.plan(stored, TOKENS))
        assert outcome.end is RestoreEnd.DONE and {node.tier for node in landed} == {Tier.SSD}
        # Asked again, there is nothing to copy.
        complete = counts.placement.complete
        await demand(other, stored[:1])
        await until(lambda: counts.placement.complete > complete)
        assert counts.placement.copied == 2 * len(stored) and counts.placement.met == len(stored)
        await other.storage.uses.flush()
        assert counts.placement.used == len(stored)


async def test_what_lies_in_memory_is_copied_from_there(catalog, model, bucket, tmp_path, stored):
    async with worker(model, tmp_path / "b", bucket, catalog.target, memory=64 << 20) as other:
        await other.restore(other.plan(stored, TOKENS))
        counts = other.storage.counts
        await until(lambda: counts.restore.persisted >= 4 and counts.restore.remembered == counts.restore.persisted)
        local = other.storage.restorer._provider.sources.tiers.local
        for key in local.objects():
            local.remove(key, within=5)
        gets = counts.store.gets
        await demand(other, stored[-1:])
        await until(lambda: counts.placement.met == 1)
        assert counts.placement.copied == 2 and counts.store.gets == gets


@pytest.mark.parametrize("how", ["flip", "truncate", "gone"])
async def test_a_copy_that_fails_is_never_ready(catalog, model, bucket, tmp_path, stored, s3_server, how):
    client = Minio(s3_server.endpoint, s3_server.access_key, s3_server.secret_key, secure=False, region="us-east-1")
    receipts = stored[1].chunk.receipts
    good = {receipt.key: client.get_object(receipt.bucket, receipt.key).read() for receipt in receipts}
    for receipt in receipts:
        data = bytearray(good[receipt.key])
        data[len(data) // 2] ^= 1
        if how == "gone":
            client.remove_object(receipt.bucket, receipt.key)
        else:
            bent = bytes(data) if how == "flip" else good[receipt.key][:-9]
            client.put_object(receipt.bucket, receipt.key, io.BytesIO(bent), len(bent))
    async with worker(model, tmp_path / "b", bucket, catalog.target, promoter=QUICK) as other:
        await register(catalog, model, node=other.storage.local.node, worker="other")
        await demand(other, stored[:3])
        counts = other.storage.counts
        await until(lambda: counts.placement.met == 2 and counts.placement.failed >= 1)
        assert (counts.placement.damaged > 0) is (how == "flip")
        assert counts.directory.files == 4
        async with asyncio.timeout(10):
            while await demands(other) != [stored[1].chunk.hash]:
                await asyncio.sleep(0.02)
        ready = {node.chunk.hash: len(node.replicas) for node in await other.lookup(TOKENS)}
        assert ready[stored[1].chunk.hash] == 0
        # Mended, it is met by itself.
        for receipt in receipts:
            client.put_object(receipt.bucket, receipt.key, io.BytesIO(good[receipt.key]), len(good[receipt.key]))
        await until(lambda: counts.placement.met == 3)
        assert counts.directory.files == 6


async def test_it_is_bounded_and_ends_when_told(catalog, model, bucket, tmp_path, stored):
    """A store that says nothing holds as many copies as may be, and none of them holds up the end."""
    host, _, port = bucket.endpoint.rpartition(":")
    settings = PromoterSettings(copies=2, limit=100_000, copy_timeout_s=30.0)
    async with FaultProxy(host, int(port)) as proxy:
        async with worker(
            model, tmp_path / "b", at(bucket, proxy.address), catalog.target, promoter=settings
        ) as other:  # fmt: skip
            proxy.blackhole(directions=frozenset({Direction.DOWN}))
            await demand(other, stored)
            counts = other.storage.counts.placement
            await until(lambda: counts.demands == len(stored) and counts.copying > 0)
            assert counts.copying <= 2
            largest = max(receipt.size for node in stored for receipt in node.chunk.receipts)
            assert counts.copying_bytes <= max(100_000, largest)
            proxy.heal()
            proxy.reset()
        assert counts.copying == counts.copying_bytes == 0


async def test_higher_priority_first(catalog, model, bucket, tmp_path, stored):
    host, _, port = bucket.endpoint.rpartition(":")
    async with (
        FaultProxy(host, int(port)) as proxy,
        worker(
            model, tmp_path / "b", at(bucket, proxy.address), catalog.target, promoter=PromoterSettings(copies=1)
        ) as other,
    ):
        order: list[str] = []
        reporter = other.storage._reporter
        present = reporter.present
        reporter.present = lambda key: (order.append(key.hash), present(key))[1]
        proxy.delay(0.3, frozenset({Direction.DOWN}))
        await demand(other, stored[:1], priority=1)
        await until(lambda: other.storage.counts.placement.copying == 1)
        await demand(other, stored[1:2], priority=1)
        await demand(other, stored[2:3], priority=9)
        await until(lambda: other.storage.counts.placement.demands == 3)
        proxy.heal()
        await until(lambda: other.storage.counts.placement.met == 3)
        assert list(dict.fromkeys(order)) == [stored[index].chunk.hash for index in (0, 2, 1)]


async def test_removals_are_done_and_confirmed(catalog, model, bucket, tmp_path, stored):
    """Only what is named goes, from disk and memory; nobody's absence of demand removes anything."""
    async with worker(model, tmp_path / "b", bucket, catalog.target, memory=64 << 20) as other:
        await other.restore(other.plan(stored, TOKENS))
        counts = other.storage.counts
        objects = sum(len(fill.fills) for fill in other.plan(stored, TOKENS).nodes)
        await until(lambda: counts.restore.persisted == counts.restore.remembered == objects)
        promoter = next(task for task in other.storage._tasks if task.get_name() == "promoter")
        assert not promoter.done()
        tiers = other.storage.restorer._provider.sources.tiers
        before = set(tiers.local.objects())
        gone = pb.Removal(
            fingerprint=model.fingerprint, owner=stored[-1].chunk.owner, hash=stored[-1].chunk.hash
        )  # fmt: skip
        await other.storage.promoter.learn(pb.DemandMap(removals=[gone]))
        left = {key for key in before if key.hash != gone.hash}
        await until(lambda: set(tiers.local.objects()) == set(tiers.memory.objects()) == left)
        await until(lambda: counts.placement.removed == 2 * len(before - left) > 0)
        await other.storage.promoter.learn(pb.DemandMap())
        assert set(tiers.local.objects()) == left
