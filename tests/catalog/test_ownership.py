"""A bucket has one etcd: where another shares it, or this one lost its data, nothing goes for want of a fact."""

from __future__ import annotations

import asyncio

import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.ownership import MARK, Ownership
from services.catalog.facts.models import Models
from services.catalog.facts.publish import Publisher
from services.catalog.rebuild import Rebuilder
from tests.catalog.memory import Cluster, quiet
from tests.catalog.world import DAY_MS, FINGERPRINT, World


def another(world: World) -> World:
    """Another etcd over the same bucket."""
    return World(now_ms=world.now_ms, objects=world.objects)


async def last_report(world: World, dry: bool = False) -> pb.CollectGarbageResponse:
    last = pb.CollectGarbageResponse()
    async for report in world.collector().collect(dry):
        last = report
    assert last.done
    return last


async def published() -> World:
    """One stream with facts, collected over once, so that the bucket is marked; and an orphan."""
    world = World()
    chunks = world.chain(0, 0)
    world.upload(0, chunks)
    assert await world.publish(chunks)
    assert not (await last_report(world)).bucket_of_another
    world.upload(0, world.chain(0, 1, b"orphan"))
    world.now_ms += DAY_MS
    return world


async def test_another_etcd_over_the_same_bucket_leaves_it_alone() -> None:
    world = await published()
    other, before = another(world), dict(world.objects)
    report = await last_report(other)
    assert report.bucket_of_another and not report.totals.objects_removed
    assert world.objects == before
    # The owner's own collection goes on.
    assert not (await last_report(world)).bucket_of_another
    assert not world.unnamed() and set(world.chunks())


async def test_planted_without_the_mark_everything_of_the_other_would_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def anybody(self: Ownership, *, write: bool = True) -> bool:
        return True

    monkeypatch.setattr(Ownership, "owned", anybody)
    world = await published()
    await last_report(another(world))
    with pytest.raises(AssertionError, match="without bytes"):
        world.check()


async def test_an_etcd_that_lost_its_data_collects_orphans_again_after_a_rebuild() -> None:
    world = await published()
    facts = set(world.chunks())
    lost = another(world)
    assert (await last_report(lost)).bucket_of_another
    etcd, store = lost.etcd(), lost.store()
    publisher = Publisher(
        etcd, lost.keys, store, Models(etcd, lost.keys), now_ms=lambda: lost.now_ms, conflicted=lambda hash, where: None
    )
    rebuilder = Rebuilder(etcd, lost.keys, store, publisher)
    async for _ in rebuilder.run(FINGERPRINT, False):
        pass
    assert (await last_report(lost)).bucket_of_another, "one model rebuilt is not the bucket"
    async for _ in rebuilder.run("", True):
        pass
    assert (await last_report(lost)).bucket_of_another, "a dry run adopts nothing"
    async for _ in rebuilder.run("", False):
        pass
    assert facts <= set(lost.chunks())
    assert not (await last_report(lost)).bucket_of_another
    lost.check()
    # Whoever had it before does not any more.
    assert (await last_report(world)).bucket_of_another


async def test_a_crash_between_the_two_marks_is_mended_and_replicas_agree() -> None:
    world = World()

    class CrashError(Exception):
        pass

    async def crash() -> None:
        raise CrashError

    halves = Ownership(world.etcd(), world.keys, world.store())
    halves._store.put_if_absent = lambda key, body: crash()  # type: ignore[assignment]
    with pytest.raises(CrashError):
        await halves.owned()
    assert MARK not in world.objects
    both = [Ownership(world.etcd(), world.keys, world.store()) for _ in range(2)]
    assert await asyncio.gather(*(one.owned() for one in both)) == [True, True]
    assert MARK in world.objects


async def test_two_clusters_that_meet_an_unmarked_bucket_at_once_do_not_both_own_it() -> None:
    """Whatever order their requests come in."""
    for turns in range(6):
        world = World()
        other = another(world)
        mine = Ownership(world.etcd(), world.keys, world.store())
        done = 0

        async def meanwhile(other: World = other, turns: int = turns) -> None:
            nonlocal done
            done += 1
            if done == turns + 1:
                await Ownership(other.etcd(quiet), other.keys, other.store(quiet)).owned()

        mine._store.hook = mine._etcd.hook = meanwhile  # type: ignore[attr-defined]
        await mine.owned()
        theirs = Ownership(other.etcd(), other.keys, other.store())
        assert [await mine.owned(), await theirs.owned()].count(True) == 1, turns


async def test_a_dry_run_marks_nothing() -> None:
    world = World()
    assert not (await last_report(world, dry=True)).bucket_of_another
    assert MARK not in world.objects and world.cluster.keys.keys() == World(cluster=Cluster()).cluster.keys.keys()


async def test_a_mark_that_went_comes_back() -> None:
    world = await published()
    del world.objects[MARK]
    assert not (await last_report(world)).bucket_of_another
    assert MARK in world.objects
