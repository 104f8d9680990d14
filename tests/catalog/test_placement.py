"""Demands, removals, pins, uses and the listing: kept where the chunk is a fact, and only there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.transaction import Delete, Get, Put
from services.catalog.facts.uses import Use, pack_use, unpack_use, used
from tests.catalog.rig import Bucket, Rig, Tenant, code, hex_id, model, registration, running, settings, until

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer

TOKENS = [i // 256 for i in range(3 * 256)] + [5] * 40
DAY_MS = 86_400_000


@pytest.fixture
async def tenant(catalog: Rig) -> Tenant:
    served = model()
    await catalog.stub.Register(registration("w", served, node="here"))
    return Tenant(served.fingerprint)


@pytest.fixture
async def chain(catalog: Rig, tenant: Tenant) -> list[pb.Chunk]:
    chunks = tenant.chain(TOKENS, tail=True)
    await catalog.store_facts(tenant.fingerprint, chunks)
    return chunks


def ids(tenant: Tenant, *chunks: pb.Chunk) -> list[pb.ChunkId]:
    return [pb.ChunkId(fingerprint=tenant.fingerprint, hash=chunk.hash) for chunk in chunks]


def demand(tenant: Tenant, hash: str, node: str = "here", priority: int = 0) -> pb.Demand:
    return pb.Demand(fingerprint=tenant.fingerprint, hash=hash, node=node, priority=priority, requester="r")


async def test_demands_are_listed_by_node_and_those_of_unknown_chunks_left_out(
    catalog: Rig, tenant: Tenant, chain: list[pb.Chunk]
) -> None:
    stranger = hex_id()
    wanted = [demand(tenant, chain[0].hash), demand(tenant, chain[1].hash, "there", 3), demand(tenant, stranger)]
    reply = await catalog.stub.SetDemands(pb.SetDemandsRequest(demands=wanted, ttl_ms=30_000))
    assert (list(reply.unknown), reply.ttl_ms) == ([stranger], 30_000)
    everywhere = await catalog.stub.ListDemands(pb.ListDemandsRequest())
    assert {(d.hash, d.node, d.priority) for d in everywhere.demands} == {
        (chain[0].hash, "here", 0),
        (chain[1].hash, "there", 3),
    }
    there = await catalog.stub.ListDemands(pb.ListDemandsRequest(node="there"))
    assert [d.hash for d in there.demands] == [chain[1].hash]
    gone = pb.DemandId(fingerprint=tenant.fingerprint, hash=chain[1].hash, node="there")
    for there_were in (1, 0):
        twice = pb.RemoveDemandsRequest(demands=[gone, gone])
        assert (await catalog.stub.RemoveDemands(twice)).removed == there_were
    assert not (await catalog.stub.ListDemands(pb.ListDemandsRequest(node="there"))).demands


async def test_a_demand_goes_with_its_lease_and_a_renewed_one_stays(
    catalog: Rig, tenant: Tenant, chain: list[pb.Chunk]
) -> None:
    both = [demand(tenant, chain[0].hash), demand(tenant, chain[1].hash)]
    await catalog.stub.SetDemands(pb.SetDemandsRequest(demands=both, ttl_ms=1_000))
    await catalog.stub.SetDemands(pb.SetDemandsRequest(demands=both[:1], ttl_ms=60_000))
    async with asyncio.timeout(20):
        async for newest in catalog.stub.WatchDemands(pb.WatchDemandsRequest(node="here")):
            if len(newest.demands) == 1:
                break
    left = await catalog.stub.ListDemands(pb.ListDemandsRequest())
    assert [d.hash for d in left.demands] == [chain[0].hash]


async def test_the_watch_tells_one_directory_what_to_hold_best_first_with_its_facts(
    catalog: Rig, tenant: Tenant, chain: list[pb.Chunk]
) -> None:
    async with asyncio.timeout(20):
        maps = aiter(catalog.stub.WatchDemands(pb.WatchDemandsRequest(node="here")))
        assert not (await anext(maps)).demands
        elsewhere = [demand(tenant, chain[2].hash, "there")]
        await catalog.stub.SetDemands(pb.SetDemandsRequest(demands=elsewhere))
        mine = [demand(tenant, chain[0].hash, priority=1), demand(tenant, chain[1].hash, priority=7)]
        await catalog.stub.SetDemands(pb.SetDemandsRequest(demands=mine))
        newest = await anext(maps)
        while len(newest.demands) < 2:
            newest = await anext(maps)
        assert [(d.priority, d.chunk) for d in newest.demands] == [(7, chain[1]), (1, chain[0])]
        withdrawn = pb.DemandId(fingerprint=tenant.fingerprint, hash=chain[1].hash, node="here")
        await catalog.stub.RemoveDemands(pb.RemoveDemandsRequest(demands=[withdrawn]))
        assert [d.hash for d in (await anext(maps)).demands] == [chain[0].hash]


async def test_the_watch_tells_what_to_drop_until_it_is_confirmed(
    catalog: Rig, tenant: Tenant, chain: list[pb.Chunk]
) -> None:
    key = catalog.keys.removal("here", tenant.fingerprint, chain[0].hash)
    async with asyncio.timeout(20):
        maps = aiter(catalog.stub.WatchDemands(pb.WatchDemandsRequest(node="here")))
        await anext(maps)
        await catalog.etcd.transact(success=[Put(key, chain[0].owner.encode())])
        told = await anext(maps)
        assert [(r.fingerprint, r.owner, r.hash) for r in told.removals] == [
            (tenant.fingerprint, chain[0].owner, chain[0].hash)
        ]
        request = pb.ConfirmRemovalsRequest(node="here", chunks=ids(tenant, chain[0]))
        await catalog.stub.ConfirmRemovals(request)
        assert not (await anext(maps)).removals


async def test_a_publication_with_a_directory_takes_back_its_removal(
    catalog: Rig, tenant: Tenant, bucket: Bucket
) -> None:
    (chunk,) = tenant.chain(TOKENS[:256])
    await bucket.upload([chunk])
    key = catalog.keys.removal("here", tenant.fingerprint, chunk.hash)
    await catalog.etcd.transact(success=[Put(key, chunk.owner.encode())])
    request = pb.PublishRequest(fingerprint=tenant.fingerprint, chunks=[chunk], node="here")
    await catalog.stub.Publish(request)
    assert (await catalog.etcd.read([Get(key)])).found == ((),)


async def test_pins_are_kept_once_listed_and_taken_away(catalog: Rig, tenant: Tenant, chain: list[pb.Chunk]) -> None:
    stranger = pb.ChunkId(fingerprint=tenant.fingerprint, hash=hex_id())
    pinned = await catalog.stub.Pin(pb.PinRequest(chunks=[*ids(tenant, chain[1]), stranger], who="ann", why="demo"))
    assert list(pinned.unknown) == [stranger.hash]
    await catalog.stub.Pin(pb.PinRequest(chunks=ids(tenant, chain[1]), who="bob", why="talk"))
    listed = await catalog.stub.ListPins(pb.ListPinsRequest(fingerprint=tenant.fingerprint))
    assert [(p.hash, p.who, p.why) for p in listed.pins] == [(chain[1].hash, "bob", "talk")]
    assert (await catalog.stub.Unpin(pb.UnpinRequest(chunks=ids(tenant, *chain)))).removed == 1
    assert not (await catalog.stub.ListPins(pb.ListPinsRequest())).pins


async def test_uses_are_written_once_a_day_and_counted_by_day(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    now = [20_000 * DAY_MS]
    async with running(settings(etcd_server.endpoint, s3_server, prefix), now_ms=lambda: now[0]) as catalog:
        tenant = Tenant()
        chunks = tenant.chain(TOKENS)
        await catalog.store_facts(tenant.fingerprint, chunks)
        request = pb.RecordUseRequest(chunks=[*ids(tenant, *chunks[:2]), *ids(tenant, *chunks[:1])])
        assert (await catalog.stub.RecordUse(request)).written == 2
        assert (await catalog.stub.RecordUse(request)).written == 0
        revision = (await catalog.stub.RecordUse(request)).revision
        now[0] += DAY_MS
        later = await catalog.stub.RecordUse(pb.RecordUseRequest(chunks=ids(tenant, chunks[0])))
        assert later.written == 1 and later.revision > revision
        listed = await catalog.stub.ListChunks(pb.ListChunksRequest())
        by_hash = {c.chunk.hash: (c.last_use_day, c.use_days) for c in listed.chunks}
        assert by_hash == {chunks[0].hash: (20_001, 2), chunks[1].hash: (20_000, 1), chunks[2].hash: (0, 0)}


async def test_another_replica_that_noted_the_use_makes_no_second_write(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    wanted = settings(etcd_server.endpoint, s3_server, prefix)
    async with running(wanted) as one, running(wanted) as other:
        tenant = Tenant()
        chunks = tenant.chain(TOKENS[:256])
        await one.store_facts(tenant.fingerprint, chunks)
        request = pb.RecordUseRequest(chunks=ids(tenant, *chunks))
        assert [(await c.stub.RecordUse(request)).written for c in (one, other)] == [1, 0]


async def test_a_use_of_an_unknown_chunk_is_not_remembered(catalog: Rig, tenant: Tenant) -> None:
    (chunk,) = tenant.chain(TOKENS[:256])
    request = pb.RecordUseRequest(chunks=ids(tenant, chunk))
    assert (await catalog.stub.RecordUse(request)).written == 0
    await catalog.store_facts(tenant.fingerprint, [chunk])
    assert (await catalog.stub.RecordUse(request)).written == 1


def test_a_clock_that_went_back_takes_no_use_back() -> None:
    assert used(pack_use(Use(100, 3)), 99) == Use(100, 3)
    assert used(pack_use(Use(100, 3)), 100) == Use(100, 3)
    assert used(pack_use(Use(100, 3)), 101) == Use(101, 4)
    assert unpack_use(pack_use(used(None, 7))) == Use(7, 1)


async def test_publishing_a_child_is_a_use_of_its_parent(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    chunks = tenant.chain(TOKENS)
    await bucket.upload(chunks)
    key = catalog.keys.use(tenant.fingerprint, chunks[1].hash)
    await catalog.stub.Publish(pb.PublishRequest(fingerprint=tenant.fingerprint, chunks=chunks[:2]))
    assert (await catalog.etcd.read([Get(key)])).found == ((),)
    await catalog.stub.Publish(pb.PublishRequest(fingerprint=tenant.fingerprint, chunks=chunks[2:]))
    assert len((await catalog.etcd.read([Get(key)])).found[0]) == 1


async def test_the_listing_pages_over_everything_and_filters(
    catalog: Rig, tenant: Tenant, chain: list[pb.Chunk]
) -> None:
    other = Tenant(tenant.fingerprint)
    others = other.chain(TOKENS)
    await catalog.store_facts(tenant.fingerprint, others)
    replica = pb.Replica(node="gone", group="g", state=pb.REPLICA_STATE_COPYING, content_id=hex_id())
    update = pb.ReplicaUpdate(fingerprint=tenant.fingerprint, hash=chain[0].hash, replica=replica)
    await catalog.stub.SetReplica(pb.SetReplicaRequest(updates=[update]))
    await catalog.stub.Pin(pb.PinRequest(chunks=ids(tenant, chain[0]), who="ann", why="demo"))

    async def pages(**filters: str) -> list[pb.ListedChunk]:
        found: list[pb.ListedChunk] = []
        token = ""
        while True:
            page = await catalog.stub.ListChunks(pb.ListChunksRequest(page_size=2, page_token=token, **filters))
            found += page.chunks
            token = page.next_page_token
            if not token:
                return found

    everything = await pages()
    assert sorted(c.chunk.hash for c in everything) == sorted(c.hash for c in [*chain, *others])
    assert {c.chunk.hash for c in await pages(owner=chain[0].owner)} == {c.hash for c in chain}
    (one,) = await pages(fingerprint=tenant.fingerprint, hash_prefix=chain[0].hash[:10])
    assert (one.chunk, list(one.replicas), one.pin.who) == (chain[0], [replica], "ann")
    assert one == next(c for c in await pages(hash_prefix=chain[0].hash[:10]))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.ListChunks(pb.ListChunksRequest(fingerprint=hex_id(), page_token="elsewhere"))
    assert code(failure) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_pin_never_outlives_its_chunk(catalog: Rig, tenant: Tenant, chain: list[pb.Chunk]) -> None:
    """The chunk goes between the read and the write: the pin is decided again."""
    key = catalog.keys.chunk(tenant.fingerprint, chain[3].hash)
    results = await asyncio.gather(
        *(catalog.stub.Pin(pb.PinRequest(chunks=ids(tenant, chain[3]), who=str(i), why="race")) for i in range(10)),
        catalog.etcd.transact(success=[Delete(key)]),
    )
    listed = await catalog.stub.ListPins(pb.ListPinsRequest())
    assert all(len(r.unknown) <= 1 for r in results[:-1])
    assert not [p for p in listed.pins if p.hash == chain[3].hash] or results[0].unknown == []


async def test_every_watch_ends_when_the_catalog_stops(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    async with running(settings(etcd_server.endpoint, s3_server, prefix)) as catalog:
        maps = aiter(catalog.stub.WatchDemands(pb.WatchDemandsRequest(node="n")))
        await anext(maps)
        await catalog.parts.demands.close()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await anext(maps)
        assert code(failure) is grpc.StatusCode.UNAVAILABLE
    await until(lambda: True)
