"""A restore never uses what it should not, never waits without bound, and always says how far it got."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from minio import Minio

from libs.controller.catalog_facts import Node
from libs.controller.protocol import Tier
from services.worker.handlers import RestoreEnd
from services.worker.restore.settings import RestoreSettings
from tests.catalog.rig import until
from tests.fixtures.fault_proxy import Direction, FaultProxy
from tests.worker_storage.rig import PagesOf, at, draw_tokens, same, worker

TOKENS = draw_tokens(4 * 256 + 64, seed=11)
QUICK = RestoreSettings(fetch_timeout_s=1.0, rest_s=2.0)
PATIENT = RestoreSettings(fetch_timeout_s=12.0)
SLACK_S = 3.0
"""For a busy machine; without the bound, each of the faults here would last three times as long."""


@pytest.fixture
async def stored(catalog, model, bucket, tmp_path):
    """A chat of five nodes, durable, and the pages it came from."""
    ranges = model.ranges(TOKENS)
    async with worker(model, tmp_path / "origin", bucket, catalog.target, seed=3) as one:
        one.pool.hold(ranges)
        assert await one.checkpoint(ranges) == 0
        return one.pages, one.pool, await one.lookup(TOKENS)


def bend(path: Path, how: str, other: bytes) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "truncate":
        del data[-64:]
    else:
        data[:] = other
    path.write_bytes(data)


def files_of(folder: Path, node: Node) -> list[Path]:
    return sorted(folder.rglob(f"{node.chunk.hash}/*/*.safetensors"))


@pytest.mark.parametrize("how", ["flip", "truncate", "swap"])
async def test_a_damaged_file_is_replaced_from_the_bucket(catalog, model, bucket, tmp_path, stored, how):
    pages, pool, nodes = stored
    target = PagesOf(filled=False, seed=5)
    folder = tmp_path / "b"
    async with worker(model, folder, bucket, catalog.target, pages=target) as other:
        await other.restore(other.plan(nodes, TOKENS))
    bent = files_of(folder, nodes[3])
    assert len(bent) == 2
    for path in bent:
        bend(path, how, files_of(folder, nodes[4])[0].read_bytes())
    # No sound file is overtaken for a machine that is busy with other things.
    unhurried = RestoreSettings(hedges=0)
    async with worker(model, folder, bucket, catalog.target, pages=target, restore=unhurried) as other:
        plan = other.plan(nodes, TOKENS)
        outcome, landed = await other.restore(plan)
        assert outcome.end is RestoreEnd.DONE
        assert [node.tier for node in landed] == [Tier.SSD, Tier.SSD, Tier.SSD, Tier.OBJECT, Tier.SSD]
        counts = other.storage.counts
        assert counts.restore.corrupt == 2 and counts.directory.quarantined == 2
        for fill in plan.nodes:
            for held in fill.fills:
                start = max(held.start, fill.node.chunk.start)
                assert same(pages, pool.where[fill.node.chunk.hash], target, held, start, held.end)
        await until(lambda: len(files_of(folder, nodes[3])) == 2)  # good copies took their places


@pytest.mark.parametrize("how", ["flip", "truncate", "swap"])
async def test_damage_in_the_bucket_ends_at_the_boundary_before(
    catalog, model, bucket, tmp_path, stored, s3_server, how
):
    _, _, nodes = stored
    client = Minio(s3_server.endpoint, s3_server.access_key, s3_server.secret_key, secure=False, region="us-east-1")
    receipt = nodes[2].chunk.receipts[0]
    data = bytearray(client.get_object(receipt.bucket, receipt.key).read())
    if how == "flip":
        data[100] ^= 16
    elif how == "truncate":
        del data[-1]
    else:
        data = bytearray(client.get_object(receipt.bucket, nodes[1].chunk.receipts[0].key).read())
    client.put_object(receipt.bucket, receipt.key, io.BytesIO(data), len(data))
    async with worker(model, tmp_path / "b", bucket, catalog.target) as other:
        outcome, landed = await other.restore(other.plan(nodes, TOKENS))
        assert (outcome.end, outcome.boundary) == (RestoreEnd.CORRUPT, 512)
        assert nodes[2].chunk.hash in outcome.detail
        assert len(landed) == 2 and other.storage.counts.restore.corrupt == 1


async def test_nobody_has_it(catalog, model, bucket, tmp_path, stored, s3_server):
    _, _, nodes = stored
    client = Minio(s3_server.endpoint, s3_server.access_key, s3_server.secret_key, secure=False, region="us-east-1")
    for receipt in nodes[1].chunk.receipts:
        client.remove_object(receipt.bucket, receipt.key)
    async with worker(model, tmp_path / "b", bucket, catalog.target) as other:
        outcome, _ = await other.restore(other.plan(nodes, TOKENS))
        assert (outcome.end, outcome.boundary) == (RestoreEnd.GONE, 256)


async def test_tokens_that_differ_under_one_hash(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    async with worker(model, tmp_path / "b", bucket, catalog.target) as other:
        plan = other.plan(nodes, TOKENS)
        wrong = replace(plan.nodes[1], tokens=(*plan.nodes[1].tokens[:-1], 511 - plan.nodes[1].tokens[-1]))
        twisted = replace(plan, nodes=(plan.nodes[0], wrong, *plan.nodes[2:]))
        # Both at once, so that the second user joins the first one's fetch.
        (good, _), (bad, _) = await asyncio.gather(other.restore(plan), other.restore(twisted))
        assert good.end is RestoreEnd.DONE
        assert (bad.end, bad.boundary) == (RestoreEnd.CORRUPT, 256)


@pytest.mark.parametrize("fault", ["refuse", "blackhole", "delay", "cut"])
async def test_the_store_away_is_a_bounded_wait(catalog, model, bucket, tmp_path, stored, fault):
    _, _, nodes = stored
    host, _, port = bucket.endpoint.rpartition(":")
    async with (
        FaultProxy(host, int(port)) as proxy,
        worker(model, tmp_path / "b", at(bucket, proxy.address), catalog.target, restore=QUICK) as other,
    ):
        down = frozenset({Direction.DOWN})
        if fault == "refuse":
            proxy.refuse = True
            proxy.reset()
        elif fault == "blackhole":
            proxy.blackhole(directions=down)
        elif fault == "delay":
            proxy.delay(12.0, down)
        else:
            proxy.cut_after(2_000, down)
        started = time.monotonic()
        outcome, _ = await other.restore(other.plan(nodes, TOKENS))
        assert (outcome.end, outcome.boundary) == (RestoreEnd.UNAVAILABLE, 0)
        assert time.monotonic() - started < QUICK.fetch_timeout_s + SLACK_S
        # The next one does not wait again for a store that has just failed …
        started = time.monotonic()
        outcome, _ = await other.restore(other.plan(nodes, TOKENS))
        assert outcome.end is RestoreEnd.UNAVAILABLE and time.monotonic() - started < QUICK.fetch_timeout_s / 2
        assert other.storage.counts.restore.resting > 0
        # … and when it is back, all is well by itself.
        proxy.heal()
        proxy.reset()
        async with asyncio.timeout(10):
            while (await other.restore(other.plan(nodes, TOKENS)))[0].end is not RestoreEnd.DONE:
                other.pages.free = {name: list(range(256)) for name in other.pages.free}
                await asyncio.sleep(0.1)


async def test_many_for_one_object_fetch_it_once(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    async with worker(model, tmp_path / "b", bucket, catalog.target, pages=PagesOf(pages=1024)) as other:
        plans = [other.plan(nodes, TOKENS) for _ in range(6)]
        objects = sum(len(node.fills) for node in plans[0].nodes)
        results = await asyncio.gather(*(other.restore(plan) for plan in plans))
        assert all(outcome.end is RestoreEnd.DONE for outcome, _ in results)
        counts = other.storage.counts
        # Those that came late found it on the disk already; nobody fetched it from the bucket again.
        assert counts.store.gets == objects and counts.restore.shared > 0
        assert counts.restore.fetch_bytes == 0


@pytest.mark.parametrize("share", [0.1, 0.7, 1.0, 1.5])
async def test_bytes_in_flight_are_bounded(catalog, model, bucket, tmp_path, stored, share):
    _, _, nodes = stored
    # Room for the largest node, or for less: then it passes alone.
    node_bytes = max(sum(receipt.size for receipt in node.chunk.receipts) for node in nodes)
    settings = RestoreSettings(fetch_bytes=int(node_bytes * share))
    async with worker(
        model, tmp_path / "b", bucket, catalog.target, restore=settings, pages=PagesOf(pages=1024)
    ) as other:
        most = 0
        running = [asyncio.ensure_future(other.restore(other.plan(nodes, TOKENS))) for _ in range(4)]
        while not all(task.done() for task in running):
            most = max(most, other.storage.counts.restore.fetch_bytes)
            await asyncio.sleep(0)
        assert all(task.result()[0].end is RestoreEnd.DONE for task in running)
        assert 0 < most <= max(node_bytes, settings.fetch_bytes)


async def test_stop_keeps_the_node_under_way(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    async with worker(model, tmp_path / "b", bucket, catalog.target) as other:
        stop = asyncio.Event()
        landed = []

        def on_landed(node):
            landed.append(node)
            if len(landed) == 2:
                stop.set()

        outcome = await other.storage.restorer.restore(other.plan(nodes, TOKENS), on_landed, stop)
        assert (outcome.end, outcome.boundary) == (RestoreEnd.STOPPED, 512) and len(landed) == 2
        assert other.storage.counts.restore.fetch_bytes == 0 or not await asyncio.sleep(0.3)
        await until(lambda: other.storage.counts.restore.fetch_bytes == 0)
        assert other.storage.counts.directory.leases == 0


async def test_stop_ends_a_wait_for_a_store_that_is_silent(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    host, _, port = bucket.endpoint.rpartition(":")
    async with (
        FaultProxy(host, int(port)) as proxy,
        worker(model, tmp_path / "b", at(bucket, proxy.address), catalog.target, restore=PATIENT) as other,
    ):
        proxy.blackhole()
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stop.set)
        started = time.monotonic()
        outcome, _ = await other.restore(other.plan(nodes, TOKENS), stop)
        assert (outcome.end, outcome.boundary) == (RestoreEnd.STOPPED, 0)
        assert time.monotonic() - started < SLACK_S


class SlowPages:
    """Pages whose writes take until they are allowed; notes whether one happens after `closed`."""

    def __init__(self, pages: PagesOf) -> None:
        self._kv = pages.kv
        self.page_size, self.device = pages.kv.page_size, pages.kv.device
        self.allowed = threading.Event()
        self.entered = threading.Event()
        self.closed = False
        self.late = 0

    def read(self, *args):
        return self._kv.read(*args)

    def write_rows(self, *args, **rows):
        self.entered.set()
        self.allowed.wait(10)
        self.late += self.closed
        self._kv.write_rows(*args, **rows)


async def test_a_cancelled_restore_waits_for_its_upload(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    pages = PagesOf(seed=5)
    async with worker(model, tmp_path / "b", bucket, catalog.target, pages=pages) as other:
        slow = SlowPages(pages)
        other.storage.restorer._uploader._kv = slow
        running = asyncio.ensure_future(other.restore(other.plan(nodes, TOKENS)))
        await asyncio.to_thread(slow.entered.wait, 10)
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0.02)
            assert not running.done()  # something still writes to its pages
        slow.allowed.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        slow.closed = True
        await asyncio.sleep(0.05)
        assert slow.late == 0
        await until(lambda: other.storage.counts.restore.fetch_bytes == 0)
        assert other.storage.counts.directory.leases == 0 and other.storage.counts.restore.active == 0


async def test_close_waits_for_uploads_and_ends_the_rest(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    pages = PagesOf(seed=5)
    async with worker(model, tmp_path / "b", bucket, catalog.target, pages=pages) as other:
        slow = SlowPages(pages)
        other.storage.restorer._uploader._kv = slow
        running = asyncio.ensure_future(other.restore(other.plan(nodes, TOKENS)))
        await asyncio.to_thread(slow.entered.wait, 10)
        closing = asyncio.ensure_future(other.storage.restorer.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        slow.allowed.set()
        await asyncio.wait_for(closing, 10)
        slow.closed = True
        outcome, landed = await running
        assert (outcome.end, outcome.boundary) == (RestoreEnd.STOPPED, 256) and len(landed) == 1 and slow.late == 0


async def test_cancelled_at_random_moments_nothing_stays_held(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    async with worker(model, tmp_path / "b", bucket, catalog.target, pages=PagesOf(pages=512), cap=1) as other:
        for attempt in range(40):
            other.pages.free = {name: list(range(512)) for name in other.pages.free}
            running = asyncio.ensure_future(other.restore(other.plan(nodes, TOKENS)))
            await asyncio.sleep(0.0004 * attempt)
            running.cancel()
            await asyncio.wait([running], timeout=10)
            assert running.done()
        counts = other.storage.counts.restore
        await until(lambda: counts.fetch_bytes == 0 and counts.fetching == 0 and counts.active == 0)
        assert counts.waiting == 0
        other.pages.free = {name: list(range(512)) for name in other.pages.free}
        assert (await other.restore(other.plan(nodes, TOKENS)))[0].end is RestoreEnd.DONE


async def test_an_empty_plan_is_done(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    async with worker(model, tmp_path / "b", bucket, catalog.target) as other:
        plan = replace(other.plan(nodes[:1], TOKENS), nodes=())
        outcome, landed = await other.restore(plan)
        assert (outcome.end, outcome.boundary, landed) == (RestoreEnd.DONE, plan.boundary, [])


async def test_a_fact_that_names_nothing_is_no_exception(catalog, model, bucket, tmp_path, stored):
    _, _, nodes = stored
    async with worker(model, tmp_path / "b", bucket, catalog.target) as other:
        plan = other.plan(nodes, TOKENS)
        broken = replace(nodes[0], chunk=replace(nodes[0].chunk, hash="no hash"))
        outcome, _ = await other.restore(replace(plan, nodes=(replace(plan.nodes[0], node=broken),)))
        assert outcome.end is RestoreEnd.GONE and outcome.boundary == 0
