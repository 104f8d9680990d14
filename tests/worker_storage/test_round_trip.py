"""Checkpoint on one worker, restore on it, on its successor and on another: bit-exact, from where it should come."""

from __future__ import annotations

import pytest

from libs.controller.protocol import Tier
from services.worker.handlers import RestoreEnd
from tests.catalog.rig import until
from tests.worker_storage.rig import FULL, WINDOWED, PagesOf, draw_tokens, same, worker


def exact(source, pool, target, plan, upto=None) -> bool:
    return all(
        same(
            source, pool.where[fill.node.chunk.hash], target, pages, max(pages.start, fill.node.chunk.start), pages.end
        )
        for fill in plan.nodes
        if upto is None or fill.node.chunk.end <= upto
        for pages in fill.fills
    )


@pytest.mark.parametrize("count", [256, 257, 3 * 256, 3 * 256 + 16, 5 * 256 + 255])
async def test_from_the_own_directory_and_from_the_bucket(catalog, model, bucket, tmp_path, count):
    tokens = draw_tokens(count, seed=count)
    ranges = model.ranges(tokens)
    async with worker(model, tmp_path / "a", bucket, catalog.target, seed=1) as one:
        one.pool.hold(ranges)
        assert await one.checkpoint(ranges) == 0
        assert [one.pool.outcome(what) for what in ranges] == [[True]] * len(ranges)
        nodes = await one.lookup(tokens)
        assert [node.chunk.hash for node in nodes] == [what.hash for what in ranges]
        assert all({r.group for r in node.chunk.receipts} == {FULL, WINDOWED} for node in nodes)

        fresh = PagesOf(filled=False, seed=9)
        async with worker(model, tmp_path / "b", bucket, catalog.target, pages=fresh) as other:
            plan = other.plan(nodes, tokens)
            outcome, landed = await other.restore(plan)
            assert (outcome.end, outcome.boundary) == (RestoreEnd.DONE, nodes[-1].chunk.end)
            assert {node.tier for node in landed} == {Tier.OBJECT}
            assert [node.end for node in landed] == [node.chunk.end for node in nodes]
            assert exact(one.pages, one.pool, fresh, plan)
        async with worker(model, tmp_path / "b", bucket, catalog.target, pages=fresh) as other:
            # What it fetched it kept: after a restart the same comes from its own disk.
            plan = other.plan(nodes, tokens)
            outcome, landed = await other.restore(plan)
            assert outcome.end is RestoreEnd.DONE and {node.tier for node in landed} == {Tier.SSD}
            assert exact(one.pages, one.pool, fresh, plan)
            assert other.storage.counts.store.gets == 0


async def test_windowed_groups_only_where_the_plan_says(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(6 * 256, seed=1)
    ranges = model.ranges(tokens)
    async with worker(model, tmp_path / "a", bucket, catalog.target) as one:
        # As a pool does: behind the window, the first chunks' windowed pages are gone by the time of capture.
        one.pool.hold(ranges, without=lambda what: {WINDOWED} if what.end <= 512 else set())
        assert await one.checkpoint(ranges) == 0
        nodes = await one.lookup(tokens)
        assert [len(node.chunk.receipts) for node in nodes] == [1, 1, 2, 2, 2, 2]
        plan = one.plan(nodes, tokens)
        before = one.storage.counts.restore.fetching
        outcome, landed = await one.restore(plan)
        assert outcome.end is RestoreEnd.DONE and before == 0
        fulls, windows = len(nodes), 2
        assert sum(len(node.fills) for node in plan.nodes) == fulls + windows
        assert exact(one.pages, one.pool, one.pages, plan)
        assert {node.tier for node in landed} == {Tier.SSD}


async def test_a_group_is_added_to_a_fact_that_stands(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(256, seed=2)
    ranges = model.ranges(tokens)
    async with worker(model, tmp_path / "a", bucket, catalog.target) as one:
        one.pool.hold(ranges, without=lambda _: {WINDOWED})
        assert await one.checkpoint(ranges) == 0
        assert len((await one.lookup(tokens))[0].chunk.receipts) == 1
        again = model.ranges(tokens)
        one.pool.hold(again)
        assert await one.checkpoint(again) == 0
        assert len((await one.lookup(tokens))[0].chunk.receipts) == 2


async def test_nothing_known_is_uploaded_twice(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(3 * 256 + 40, seed=3)
    async with worker(model, tmp_path / "a", bucket, catalog.target, seed=1) as one:
        ranges = model.ranges(tokens)
        one.pool.hold(ranges)
        assert await one.checkpoint(ranges) == 0
        async with worker(model, tmp_path / "b", bucket, catalog.target, seed=2) as other:
            again = model.ranges(tokens)
            other.pool.hold(again)
            assert await other.checkpoint(again) == 0
            assert [other.pool.outcome(what) for what in again] == [[True]] * len(again)
            counts = other.storage.counts
            assert counts.checkpoint.known == len(again)
            assert counts.store.puts == counts.checkpoint.unasked == 0
            # A copy of its own computation is kept all the same, for the next restore here.
            await until(lambda: len(list((tmp_path / "b" / "v1").rglob("*.safetensors"))) == 2 * len(again))
            nodes = await other.lookup(tokens)
            plan = other.plan(nodes, tokens)
            outcome, landed = await other.restore(plan)
            assert outcome.end is RestoreEnd.DONE and {node.tier for node in landed} == {Tier.SSD}
            assert exact(other.pages, other.pool, other.pages, plan)


@pytest.mark.parametrize("count", [256, 48])
async def test_the_first_range_of_a_chain_alone_is_asked_about(catalog, model, bucket, tmp_path, count):
    """As a conversation begins: a chunk, or a tail, directly under the tenant's root."""
    tokens = draw_tokens(count, seed=31)
    async with (
        worker(model, tmp_path / "a", bucket, catalog.target, seed=1) as one,
        worker(model, tmp_path / "b", bucket, catalog.target, seed=2) as other,
    ):
        for bench, puts in ((one, 2), (other, 0)):
            ranges = model.ranges(tokens)
            bench.pool.hold(ranges)
            assert await bench.checkpoint(ranges) == 0
            assert bench.storage.counts.store.puts == puts
            assert bench.storage.counts.checkpoint.unasked == 0
        assert other.storage.counts.checkpoint.known == 1


async def test_two_routes_that_share_a_chunk_send_it_once(catalog, model, bucket, tmp_path):
    common, a, b = draw_tokens(512, 4), draw_tokens(256, 5), draw_tokens(256, 6)
    one, two = model.ranges(common + a), model.ranges(common + b)
    async with worker(model, tmp_path / "a", bucket, catalog.target) as bench:
        bench.pool.hold(one)
        bench.pool.hold(two[2:])
        assert await bench.checkpoint([*one, *two]) == 0
        assert [bench.pool.outcome(what) for what in [*one, *two]] == [[True]] * 6
        assert bench.storage.counts.store.puts == 2 * 4
        assert set(bench.pool.leases.values()) == {1}


async def test_without_a_directory(catalog, model, bucket, tmp_path):
    tokens = draw_tokens(512 + 32, seed=7)
    ranges = model.ranges(tokens)
    async with worker(model, tmp_path / "a", bucket, catalog.target, local=False) as bench:
        bench.pool.hold(ranges)
        assert await bench.checkpoint(ranges) == 0
        plan = bench.plan(await bench.lookup(tokens), tokens)
        outcome, landed = await bench.restore(plan)
        assert outcome.end is RestoreEnd.DONE and {node.tier for node in landed} == {Tier.OBJECT}
        assert exact(bench.pages, bench.pool, bench.pages, plan)
        assert bench.storage.local.node == "" and bench.storage.local.disk().cap == 0
