"""A drain publishes what only this worker has, also what it had given up while the store was away."""

from __future__ import annotations

import pytest

from services.worker.checkpoint.settings import CheckpointSettings
from services.worker.handlers import RestoreEnd
from tests.catalog.rig import until
from tests.fixtures.fault_proxy import FaultProxy
from tests.worker_storage.rig import FULL, PagesOf, at, draw_tokens, same, worker

TOKENS = draw_tokens(3 * 256 + 32, seed=51)
HASTY = CheckpointSettings(patience_s=0.5, put_timeout_s=0.3, uploads=4)


async def given_up(one, proxy) -> list:
    """A chat that was captured, kept, and given up because the store was away; its pages are gone since."""
    ranges = one.model.ranges(TOKENS)
    one.pool.hold(ranges)
    where = dict(one.pool.where)
    proxy.refuse = True
    proxy.reset()
    for what in ranges:
        one.storage.checkpointer.offer(what)
    metrics = one.storage.checkpointer.metrics
    await until(lambda: metrics.lost == len(ranges) and metrics.pending == 0)
    await until(lambda: metrics.staged_bytes == 0)
    one.pool.where.clear()
    proxy.refuse = False
    return [ranges, where]


@pytest.mark.parametrize("medium", ["memory", "directory"])
async def test_what_was_given_up_is_published_by_the_drain(catalog, model, bucket, tmp_path, medium):
    host, _, port = bucket.endpoint.rpartition(":")
    memory = 64 << 20 if medium == "memory" else 0
    async with FaultProxy(host, int(port)) as proxy:
        async with worker(
            model, tmp_path / "a", at(bucket, proxy.address), catalog.target, seed=1, checkpoint=HASTY,
            local=medium == "directory", memory=memory,
        ) as one:  # fmt: skip
            ranges, where = await given_up(one, proxy)
            assert await one.lookup(TOKENS) == []
            assert await one.storage.checkpointer.drain(20) == 0
            nodes = await one.lookup(TOKENS)
            assert [node.chunk.hash for node in nodes] == [what.hash for what in ranges]
            assert one.storage.checkpointer.metrics.offered_again == len(ranges)
            # There is nothing left to offer again.
            assert await one.storage.checkpointer.drain(5) == 0
            assert one.storage.checkpointer.metrics.offered_again == len(ranges)
            source = one.pages
        fresh = PagesOf(filled=False, seed=9)
        async with worker(model, tmp_path / "b", bucket, catalog.target, pages=fresh) as other:
            plan = other.plan(nodes, TOKENS)
            outcome, _ = await other.restore(plan)
            assert outcome.end is RestoreEnd.DONE
            for fill in plan.nodes:
                for held in fill.fills:
                    start = max(held.start, fill.node.chunk.start)
                    assert same(source, where[fill.node.chunk.hash], fresh, held, start, held.end)


async def test_damage_in_what_was_kept_ends_the_chain_before_it(catalog, model, bucket, tmp_path):
    """Nothing damaged becomes a fact, and nothing hangs on what does not."""
    host, _, port = bucket.endpoint.rpartition(":")
    async with (
        FaultProxy(host, int(port)) as proxy,
        worker(
            model, tmp_path / "a", at(bucket, proxy.address), catalog.target, seed=1, checkpoint=HASTY
        ) as one,
    ):  # fmt: skip
        ranges, _ = await given_up(one, proxy)
        for path in (tmp_path / "a").rglob(f"{ranges[2].hash}/{FULL}/*.safetensors"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        assert await one.storage.checkpointer.drain(20) == 2
        assert [node.chunk.hash for node in await one.lookup(TOKENS)] == [what.hash for what in ranges[:2]]
        assert one.storage.counts.directory.quarantined == 1


async def test_what_is_durable_is_not_offered_again(catalog, model, bucket, tmp_path):
    ranges = model.ranges(TOKENS)
    async with worker(model, tmp_path / "a", bucket, catalog.target, seed=1) as one:
        one.pool.hold(ranges)
        assert await one.checkpoint(ranges) == 0
        assert await one.storage.checkpointer.drain(5) == 0
        assert one.storage.checkpointer.metrics.offered_again == 0
