"""Each race of collection with something else, at every request of either in turn; and the planted bugs they show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import ServiceError
from services.catalog.collect import facts
from services.catalog.collect.lock import holding
from services.catalog.collect.marking import Fact, mark
from services.catalog.etcd.transaction import Get, Put
from services.catalog.facts.errors import CollectionLostError, CollectionRunningError
from services.catalog.facts.garbage import HORIZON_MS
from services.catalog.facts.replicas import Replicas
from tests.catalog.memory import Hook
from tests.catalog.rig import FULL
from tests.catalog.world import DAY_MS, FINGERPRINT, HOUR_MS, World

Prepared = Callable[[World], Awaitable[None]]


async def everywhere(
    make: Callable[[], World], prepare: Prepared, main: Callable[[World, Hook], Awaitable[object]], other: Prepared
) -> int:
    """Runs `main` with `other` before its first request, then before its second, and so on; how often that was.

    What must hold is checked after both. AssertionError if it does not.
    """
    at = 0
    while True:
        at += 1
        world, count = make(), 0
        await prepare(world)

        async def hook(at: int = at, world: World = world) -> None:
            nonlocal count
            count += 1
            if count == at:
                await other(world)
                world.check()

        await main(world, hook)
        world.check()
        if count < at:
            return at - 1


async def idle_chain(world: World) -> None:
    """Two chunks of a stream, unused for so long that both go, and the third uploaded but not published."""
    chunks = world.chain(0, 0)
    world.upload(0, chunks)
    assert await world.publish(chunks[:2], "node-a")
    world.now_ms += 4 * DAY_MS


async def fresh_upload(world: World) -> None:
    """The third chunk's publisher is slow: its objects are old orphans, its parents in use."""
    await idle_chain(world)
    for chunk in world.chain(0, 0)[:2]:
        await world.use(chunk.hash)


async def idle_parent(world: World) -> None:
    """As `idle_chain`, the third chunk just uploaded."""
    chunks = world.chain(0, 0)
    world.upload(0, chunks[:2])
    assert await world.publish(chunks[:2])
    world.now_ms += 4 * DAY_MS
    world.upload(0, chunks)


async def child(world: World) -> None:
    await world.publish(world.chain(0, 0)[2:3])


async def tip_pinned(world: World) -> None:
    await world.pin(world.chain(0, 0)[1].hash)


async def collection(world: World) -> None:
    with suppress(ServiceError):
        await world.collect()


async def same_chunks(world: World) -> None:
    """Published again by somebody who found the objects there."""
    await world.publish(world.chain(0, 0)[:2], "node-b")


def collecting(world: World, hook: Hook) -> Awaitable[object]:
    return world.collect(hook=hook)


def publishing(world: World, hook: Hook) -> Awaitable[object]:
    return world.publish(world.chain(0, 0)[2:3], hook=hook)


def republishing(world: World, hook: Hook) -> Awaitable[object]:
    return world.publish(world.chain(0, 0)[:2], "node-c", hook=hook)


RACES = {
    "a leaf gets a child": (idle_chain, collecting, child),
    "a leaf is pinned": (idle_chain, collecting, tip_pinned),
    "a leaf is published again": (idle_chain, collecting, same_chunks),
    "an orphan is published during a collection": (fresh_upload, collecting, child),
    "an orphan is collected during its publication": (fresh_upload, publishing, collection),
    "a chain is collected during its publication": (idle_chain, republishing, collection),
    "a parent is collected during its child's publication": (idle_parent, publishing, collection),
}


@pytest.mark.parametrize("name", RACES)
def test_no_race_breaks_anything(name: str) -> None:
    prepare, main, other = RACES[name]
    assert asyncio.run(everywhere(World, prepare, main, other)) >= 3


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("a leaf gets a child", {"blind_collector": frozenset({"uses"})}),
        ("a leaf is pinned", {"blind_collector": frozenset({"pins"})}),
        ("an orphan is published during a collection", {"blind_collector": frozenset({"chunks", "garbage"})}),
        ("an orphan is collected during its publication", {"blind_publisher": frozenset({"garbage"})}),
        ("a parent is collected during its child's publication", {"blind_publisher": frozenset({"chunks"})}),
    ],
)
def test_each_condition_of_the_transactions_is_needed(name: str, bug: dict[str, frozenset[str]]) -> None:
    prepare, main, other = RACES[name]
    with pytest.raises(AssertionError, match=r"without|pinned"):
        asyncio.run(everywhere(lambda: World(**bug), prepare, main, other))


async def told_to_drop(blind: frozenset[str] = frozenset()) -> None:
    """A directory records a replica at any moment of the collection of its chunk: it is refused, or told to drop it."""

    async def holds_it_too(world: World) -> None:
        replicas = Replicas(world.etcd(), world.keys)
        chunk = world.chain(0, 0)[1]
        replica = pb.Replica(node="node-z", group="g", state=pb.REPLICA_STATE_READY, content_id="ab" * 32)
        update = pb.ReplicaUpdate(fingerprint=FINGERPRINT, hash=chunk.hash, replica=replica)
        _, unknown = await replicas.set([update])
        recorded.append(not unknown)

    async def then_look(world: World, hook: Hook) -> None:
        recorded.clear()
        await world.collect(hook=hook)
        chunk = world.chain(0, 0)[1]
        told = world.keys.removal("node-z", FINGERPRINT, chunk.hash) in world.cluster.keys
        if recorded == [True]:
            assert chunk.hash in world.chunks() or told, "a directory without notice"

    recorded: list[bool] = []
    await everywhere(lambda: World(blind_collector=blind), idle_chain, then_look, holds_it_too)


def test_no_replica_is_forgotten_without_notice() -> None:
    asyncio.run(told_to_drop())
    with pytest.raises(AssertionError, match="without notice"):
        asyncio.run(told_to_drop(frozenset({"replicas"})))


class CrashError(Exception):
    """The process is gone."""


def test_a_publisher_that_dies_before_any_request_leaves_nothing_false() -> None:
    """A chain long enough for several transactions; published again, it is whole."""

    async def scenario() -> int:
        at = 0
        while True:
            at += 1
            world, count = World(), 0
            tokens = [5] * (70 * 256) + [9] * 32
            chunks = world.tenants[0].chain(tokens, tail=True, groups=[FULL])
            world.upload(0, chunks)

            async def hook(at: int = at) -> None:
                nonlocal count
                count += 1
                if count == at:
                    raise CrashError

            try:
                assert await world.publish(chunks, "node-a", hook)
                return at
            except CrashError:
                world.check()
                assert await world.publish(chunks, "node-a")
                world.check()
                assert len(world.chunks()) == len(chunks)

    assert asyncio.run(scenario()) > 75


def test_parents_before_children_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the order of removal turned round, and the process gone half way."""

    async def scenario() -> None:
        world = World()
        for stream in (0, 1, 2):
            chunks = world.chain(0, stream)
            world.upload(0, chunks)
            assert await world.publish(chunks)
        world.now_ms += 4 * DAY_MS
        count = 0

        async def hook() -> None:
            nonlocal count
            count += 1
            world.check()

        await world.collect(hook=hook)

    monkeypatch.setattr(facts, "_PER_TRANSACTION", 1)
    asyncio.run(scenario())
    from services.catalog.collect import collector

    monkeypatch.setattr(collector, "mark", lambda *given, **named: mark(*given, **named)[::-1])
    with pytest.raises(AssertionError, match="without its parent"):
        asyncio.run(scenario())


async def test_bytes_wait_for_their_grace_period_and_a_publication_saves_them() -> None:
    world = World()
    chunks = world.chain(0, 0)
    world.upload(0, chunks)
    assert await world.publish(chunks)
    world.now_ms += 4 * DAY_MS
    await world.collect()
    assert not world.chunks() and len(world.unnamed()) == 2 * len(chunks)
    world.now_ms += HOUR_MS - 1
    await world.collect()
    assert len(world.unnamed()) == 2 * len(chunks)
    assert await world.publish(chunks[:1])
    world.now_ms += 1
    await world.collect()
    assert not world.unnamed() and set(world.chunks()) == {chunks[0].hash}
    world.check()


async def test_what_was_deleted_is_named_again_only_when_no_late_deletion_can_come() -> None:
    """A collection that lost its lock may have sent one more request to the store."""
    world = World()
    chunks = world.chain(0, 0)[:1]
    world.upload(0, chunks)
    assert await world.publish(chunks)
    world.now_ms += 4 * DAY_MS
    await world.collect()
    world.now_ms += HOUR_MS
    await world.collect()
    assert not world.unnamed()
    world.upload(0, chunks)
    assert not await world.publish(chunks)
    # Other bytes for the same chunk are another object: nobody deletes those.
    others = world.chain(0, 0, b"other")[:1]
    world.upload(0, others)
    assert await world.publish(others)
    await world.purge(0)
    world.now_ms += HORIZON_MS
    world.upload(0, chunks)
    assert await world.publish(chunks)
    world.check()


async def test_a_superseded_tail_goes_and_another_continuations_stays() -> None:
    world = World()
    # Stream 3 ends in a tail of stream 0's third chunk; stream 2's third chunk stands under the same parent.
    for stream in (3, 2):
        chunks = world.chain(0, stream)
        world.upload(0, chunks)
        assert await world.publish(chunks)
    tail = world.chain(0, 3)[-1]
    assert tail.tail
    await world.collect()
    assert tail.hash in world.chunks()
    chunks = world.chain(0, 0)
    world.upload(0, chunks)
    assert await world.publish(chunks)
    done = await world.collect()
    assert [(c.hash, c.reason) for c in done] == [(tail.hash, pb.COLLECT_REASON_SUPERSEDED)]


async def test_an_unreadable_full_chunk_supersedes_nothing() -> None:
    world = World()
    for stream in (3, 0):
        chunks = world.chain(0, stream)
        world.upload(0, chunks)
        assert await world.publish(chunks)
    for receipt in world.chain(0, 0)[2].receipts:
        body, at = world.objects[receipt.key]
        world.objects[receipt.key] = (bytes(len(body)), at)
    assert await world.collect() == []


async def test_the_directories_are_told_what_to_drop_and_forgotten_when_unclaimed() -> None:
    world = World(claimed={"node-a", "node-b"})
    chunks = world.chain(0, 1)
    world.upload(0, chunks)
    assert await world.publish(chunks, "node-a")
    assert await world.publish(chunks[:1], "node-b")
    await world.pin(chunks[0].hash)
    await world.collect()
    world.now_ms += 4 * DAY_MS
    await world.collect()
    (gone,) = [c for c in chunks if c.hash not in world.chunks()][:1]
    assert world.keys.removal("node-a", FINGERPRINT, gone.hash) in world.cluster.keys
    assert world.keys.removal("node-b", FINGERPRINT, gone.hash) not in world.cluster.keys
    world.claimed = {"node-b"}
    world.now_ms += 5 * DAY_MS - 1
    done = await world.collect()
    assert not [c for c in done if c.reason == pb.COLLECT_REASON_UNCLAIMED]
    world.now_ms += DAY_MS
    done = await world.collect()
    assert {(c.node, c.hash) for c in done if c.reason == pb.COLLECT_REASON_UNCLAIMED} == {("node-a", chunks[0].hash)}
    assert world.keys.replica(FINGERPRINT, chunks[0].hash, "node-b") in world.cluster.keys
    assert world.keys.replica(FINGERPRINT, chunks[0].hash, "node-a") not in world.cluster.keys
    assert not [key for key in world.cluster.keys if key.startswith(world.keys.removals("node-a"))]


async def test_a_dry_run_counts_what_goes_with_a_chunk_once() -> None:
    """The replicas of a chunk that goes are no replicas of a forgotten directory besides."""
    world = World()
    chunks = world.chain(0, 0)
    world.upload(0, chunks)
    assert await world.publish(chunks, "node-a")
    await world.collect()
    world.now_ms += 9 * DAY_MS
    said = await world.collect(dry=True)
    assert len(said) == len(chunks)
    assert sorted(map(str, said)) == sorted(map(str, await world.collect()))


async def test_age_takes_what_follows_and_leaves_other_owners() -> None:
    world = World()
    for tenant in (0, 1):
        chunks = world.chain(tenant, 1)
        world.upload(tenant, chunks[:1])
        assert await world.publish(chunks[:1])
    old = world.chain(0, 1)
    await world.etcd().transact(success=[Put(world.keys.retention(old[0].owner), b'{"idle_days":0,"max_age_days":2}')])
    world.now_ms += DAY_MS
    world.upload(0, old)
    assert await world.publish(old)
    assert await world.collect() == []
    world.now_ms += DAY_MS
    done = await world.collect()
    assert {c.hash for c in done} == {c.hash for c in old}
    assert {c.reason for c in done} == {pb.COLLECT_REASON_AGE}
    assert set(world.chunks()) == {world.chain(1, 1)[0].hash}


async def test_a_purge_takes_everything_of_one_owner_at_once() -> None:
    world = World(claimed={"node-a"})
    for tenant in (0, 1):
        for stream in (0, 1):
            chunks = world.chain(tenant, stream)
            world.upload(tenant, chunks)
            assert await world.publish(chunks, "node-a")
    world.upload(0, world.chain(0, 2, b"b"))  # orphans
    await world.pin(world.chain(0, 1)[1].hash)
    done = await world.purge(0)
    kept = {chunk.hash for chunk in world.chain(0, 1)[:2]}
    owner = world.chain(0, 0)[0].owner
    assert done.pinned == 2 and list(done.nodes) == ["node-a"]
    assert {c.hash for c in world.chunks().values() if c.owner == owner} == kept
    assert not world.unnamed()
    done = await world.purge(0, include_pinned=True)
    assert done.pinned == 0
    assert not [key for key in world.objects if f"/{owner}/" in key]
    assert not [c for c in world.chunks().values() if c.owner == owner]
    assert not world.pins()
    assert len(world.chunks()) == len({c.hash for s in (0, 1) for c in world.chain(1, s)})
    world.check()


async def test_only_one_collects_and_losing_the_lock_stops_it() -> None:
    world = World()
    await idle_chain(world)
    etcd = world.etcd()
    async with holding(etcd, world.keys, "another"):
        with pytest.raises(CollectionRunningError, match="another"):
            await world.collect()
        assert await world.collect(dry=True)
    count = 0

    async def hook() -> None:
        nonlocal count
        count += 1
        if count == 9:
            world.cluster.expire()

    before = set(world.chunks())
    with pytest.raises(CollectionLostError):
        await world.collect(hook=hook)
    assert set(world.chunks()) == before
    (lock,) = (await etcd.read([Get(world.keys.collection_lock)])).found
    assert not lock
    await world.collect()
    assert not world.chunks()


def test_marking_is_prefix_closed_and_orders_leaves_first() -> None:
    def fact(name: int, parent: int, start: int, **more: object) -> Fact:
        return Fact(bytes([name]), bytes([parent]), start, start + 256, "o", 0, 1, **more)  # type: ignore[arg-type]

    chain = [fact(1, 0, 0), fact(2, 1, 256), fact(3, 2, 512, pinned=True), fact(4, 2, 512), fact(5, 4, 768)]
    marked = mark(chain, lambda fact: pb.COLLECT_REASON_IDLE)
    assert [m.fact.hash for m in marked] == [bytes([5]), bytes([4])]
    assert len(mark(chain, lambda fact: pb.COLLECT_REASON_IDLE, keep_pinned=False)) == 5
