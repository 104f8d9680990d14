"""No fact without bytes, no chunk without its parent, no second truth under one hash."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import read_error
from services.catalog.etcd.transaction import Delete, GetPrefix
from tests.catalog.rig import FULL, WINDOWED, Bucket, Rig, Tenant, code, hex_id, model, registration, running, settings

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer

TOKENS = [i // 256 for i in range(3 * 256)] + [5] * 40


@pytest.fixture
async def tenant(catalog: Rig) -> Tenant:
    served = model()
    await catalog.stub.Register(registration("w", served))
    return Tenant(served.fingerprint)


async def publish(catalog: Rig, tenant: Tenant, chunks: list[pb.Chunk], node: str = "") -> pb.PublishResponse:
    request = pb.PublishRequest(fingerprint=tenant.fingerprint, chunks=chunks, node=node)
    reply: pb.PublishResponse = await catalog.stub.Publish(request)
    return reply


async def refused(catalog: Rig, tenant: Tenant, chunks: list[pb.Chunk]) -> tuple[grpc.StatusCode, str]:
    """Code and reason; and nothing was written."""
    before = await facts(catalog, tenant)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await publish(catalog, tenant, chunks)
    assert await facts(catalog, tenant) == before
    return code(failure), read_error(failure.value).reason


async def facts(catalog: Rig, tenant: Tenant) -> dict[str, bytes]:
    """Chunk hash → value."""
    prefix = catalog.keys.chunk(tenant.fingerprint, "")
    (found,) = (await catalog.etcd.read([GetPrefix(prefix)])).found
    return {kv.key[len(prefix) :].decode(): kv.value for kv in found}


async def test_a_chain_with_its_tail_is_published_once_and_found(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    chunks = tenant.chain(TOKENS, tail=True)
    await bucket.upload(chunks)
    first = await publish(catalog, tenant, chunks)
    assert [p.created for p in first.chunks] == [True] * 4
    assert all(receipt.etag for p in first.chunks for receipt in p.receipts)
    again = await publish(catalog, tenant, chunks)
    assert [p.created for p in again.chunks] == [False] * 4
    assert [p.receipts for p in again.chunks] == [p.receipts for p in first.chunks]
    found = await catalog.stub.Lookup(tenant.lookup(TOKENS))
    assert [node.chunk.hash for node in found.nodes] == [chunk.hash for chunk in chunks[:3]]
    assert found.tail.chunk.hash == chunks[3].hash and found.nodes[0].chunk.created_ms > 0


async def test_no_bytes_no_fact(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    chunks = tenant.chain(TOKENS)
    assert await refused(catalog, tenant, chunks) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_DURABLE")
    await bucket.upload(chunks[:2])
    assert await refused(catalog, tenant, chunks) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_DURABLE")
    assert [p.created for p in (await publish(catalog, tenant, chunks[:2])).chunks] == [True, True]


async def test_other_sizes_are_not_durable(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    chunks = tenant.chain(TOKENS[:256])
    await bucket.upload(chunks)
    chunks[0].receipts[1].size += 1
    assert await refused(catalog, tenant, chunks) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_DURABLE")


async def test_a_missing_parent_is_refused(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    chunks = tenant.chain(TOKENS, tail=True)
    await bucket.upload(chunks)
    parent_missing = (grpc.StatusCode.FAILED_PRECONDITION, "MISSING_PARENT")
    assert await refused(catalog, tenant, [chunks[1]]) == parent_missing
    assert await refused(catalog, tenant, [chunks[3]]) == parent_missing
    assert await refused(catalog, tenant, [chunks[1], chunks[0]]) == parent_missing  # children first
    assert (await publish(catalog, tenant, chunks[:1])).chunks[0].created
    assert (await publish(catalog, tenant, chunks[1:3])).chunks[0].created
    # Nothing follows a tail, and a parent must end where its child starts.
    assert (await publish(catalog, tenant, chunks[3:])).chunks[0].created
    after_tail = pb.Chunk()
    after_tail.CopyFrom(chunks[2])
    after_tail.hash, after_tail.parent, after_tail.start, after_tail.end = hex_id(), chunks[3].hash, 1_024, 1_280
    del after_tail.receipts[:]
    for receipt in chunks[2].receipts:
        key = receipt.key.replace(chunks[2].hash, after_tail.hash)
        after_tail.receipts.add(
            group=receipt.group, bucket=receipt.bucket, key=key, size=receipt.size, content_id=receipt.content_id
        )
    await bucket.upload([after_tail])
    assert await refused(catalog, tenant, [after_tail]) == parent_missing


async def test_a_parent_collected_meanwhile_leaves_no_orphan(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    """The parent vanishes between the check and the write."""
    chunks = tenant.chain(TOKENS[:512])
    await bucket.upload(chunks)
    await publish(catalog, tenant, chunks[:1])
    stat = catalog.store.stat

    async def stat_then_collect(key: str) -> object:
        found = await stat(key)
        await catalog.etcd.transact(success=[Delete(catalog.keys.chunk(tenant.fingerprint, chunks[0].hash))])
        return found

    catalog.store.stat = stat_then_collect  # type: ignore[method-assign, assignment]
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await publish(catalog, tenant, chunks[1:])
    assert read_error(failure.value).reason == "MISSING_PARENT"
    assert not await facts(catalog, tenant)


async def test_other_tokens_under_a_known_hash_are_a_conflict(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    chunks = tenant.chain(TOKENS[:256])
    await bucket.upload(chunks)
    await publish(catalog, tenant, chunks)
    chunks[0].tokens_sha256 = "00" * 32
    assert await refused(catalog, tenant, chunks) == (grpc.StatusCode.ALREADY_EXISTS, "CHUNK_CONFLICT")
    assert catalog.metric("segue_catalog_conflicts_total", where="publish") == 1


async def test_a_conflict_within_one_call_writes_nothing(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    chunks = [*tenant.chain(TOKENS[:256]), *tenant.chain(TOKENS[:256])]
    await bucket.upload(chunks)
    chunks[1].tokens_sha256 = "00" * 32
    assert await refused(catalog, tenant, chunks) == (grpc.StatusCode.ALREADY_EXISTS, "CHUNK_CONFLICT")


async def test_another_content_id_is_ignored_and_answered_with_the_one_that_stands(
    catalog: Rig, tenant: Tenant, bucket: Bucket
) -> None:
    first = tenant.chain(TOKENS[:256], body=b"first ")
    second = tenant.chain(TOKENS[:256], body=b"second, never uploaded ")
    await bucket.upload(first, body=b"first ")
    await publish(catalog, tenant, first)
    reply = await publish(catalog, tenant, second)
    assert not reply.chunks[0].created
    assert [r.content_id for r in reply.chunks[0].receipts] == [r.content_id for r in first[0].receipts]


async def test_windowed_groups_may_follow_but_never_come_first(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    whole, full = tenant.chain(TOKENS[:256]), tenant.chain(TOKENS[:256], groups=[FULL])
    windowed = tenant.chain(TOKENS[:256], groups=[WINDOWED])
    await bucket.upload(whole)
    assert await refused(catalog, tenant, windowed) == (grpc.StatusCode.FAILED_PRECONDITION, "MISSING_GROUP")
    assert (await publish(catalog, tenant, full)).chunks[0].created
    reply = await publish(catalog, tenant, windowed)
    assert not reply.chunks[0].created
    assert [r.group for r in reply.chunks[0].receipts] == [FULL, WINDOWED]
    assert [r.group for r in pb.Chunk.FromString((await facts(catalog, tenant))[whole[0].hash]).receipts] == [
        FULL,
        WINDOWED,
    ]


async def test_concurrent_publishers_through_two_replicas_agree(
    catalog: Rig, tenant: Tenant, bucket: Bucket, etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    bodies = [b"%d " % i for i in range(6)]
    chains = [tenant.chain(TOKENS, tail=True, body=body) for body in bodies]
    for chain, body in zip(chains, bodies, strict=True):
        await bucket.upload(chain, body=body)
    async with running(settings(etcd_server.endpoint, s3_server, prefix)) as other:
        sides = [catalog, other]
        replies = await asyncio.gather(*(publish(sides[i % 2], tenant, chain) for i, chain in enumerate(chains)))
    for i in range(4):
        assert sum(reply.chunks[i].created for reply in replies) == 1
        assert len({reply.chunks[i].receipts[0].content_id for reply in replies}) == 1
    assert len(await facts(catalog, tenant)) == 4


async def test_replicas_of_the_publishers_directory_are_recorded_and_merged(
    catalog: Rig, tenant: Tenant, bucket: Bucket
) -> None:
    node = hex_id(16)
    await catalog.stub.Register(registration("w-2", node=node))
    full, windowed = tenant.chain(TOKENS, groups=[FULL]), tenant.chain(TOKENS, groups=[WINDOWED])
    await bucket.upload([*full, *windowed])
    await publish(catalog, tenant, full, node)
    await asyncio.gather(*(publish(catalog, tenant, windowed, node) for _ in range(3)))
    async with asyncio.timeout(10):
        async for newest in catalog.stub.WatchEndpoints(pb.WatchEndpointsRequest()):
            if len(newest.endpoints) == 2:
                break
    found = await catalog.stub.Lookup(tenant.lookup(TOKENS))
    for node_found in found.nodes:
        assert [(r.node, r.group, r.state) for r in node_found.replicas] == [
            (node, FULL, pb.REPLICA_STATE_READY),
            (node, WINDOWED, pb.REPLICA_STATE_READY),
        ]


async def test_more_chunks_than_one_transaction_holds(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    tokens = [i // 256 for i in range(120 * 256)]
    chunks = tenant.chain(tokens, groups=[FULL])
    await bucket.upload(chunks)
    node = hex_id(16)
    assert all(p.created for p in (await publish(catalog, tenant, chunks, node)).chunks)
    assert len((await catalog.stub.Lookup(tenant.lookup(tokens))).nodes) == 120
    (replicas,) = (await catalog.etcd.read([GetPrefix(catalog.keys.prefix.encode() + b"replicas/")])).found
    assert len(replicas) == 120


async def test_replicas_of_unknown_chunks_are_left_out_and_named(catalog: Rig, tenant: Tenant, bucket: Bucket) -> None:
    chunks = tenant.chain([i // 256 for i in range(60 * 256)], groups=[FULL])
    await bucket.upload(chunks)
    await publish(catalog, tenant, chunks)
    missing = [hex_id() for _ in range(60)]

    def update(hash: str, group: str, state: pb.ReplicaState = pb.REPLICA_STATE_READY) -> pb.ReplicaUpdate:
        replica = pb.Replica(node="n-1", group=group, state=state, content_id=hex_id())
        return pb.ReplicaUpdate(fingerprint=tenant.fingerprint, hash=hash, replica=replica)

    # Known and unknown ones take turns, over more than one transaction.
    hashes = [hash for pair in zip((chunk.hash for chunk in chunks), missing, strict=True) for hash in pair]
    updates = [update(hash, group) for hash in hashes for group in (FULL, WINDOWED)]
    updates.append(update(hex_id(), FULL, pb.REPLICA_STATE_REMOVED))
    reply = await catalog.stub.SetReplica(pb.SetReplicaRequest(updates=updates))
    assert list(reply.unknown) == missing
    (found,) = (await catalog.etcd.read([GetPrefix(catalog.keys.prefix.encode() + b"replicas/")])).found
    assert len(found) == 60 and catalog.metric("segue_catalog_replicas_of_unknown_chunks_total") == 60


async def test_an_unknown_model_is_refused(catalog: Rig) -> None:
    tenant = Tenant()
    assert await refused(catalog, tenant, tenant.chain(TOKENS)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "UNKNOWN_MODEL",
    )


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("start, end", {"end": 255}),
        ("start, end", {"start": 16}),
        ("start, end", {"start": 256, "end": 0}),
        ("tail", {"tail": True}),
        ("hash", {"hash": "abc"}),
        ("parent", {"parent": ""}),
        ("owner", {"owner": "ab"}),
        ("tokens_sha256", {"tokens_sha256": "AB" * 32}),
    ],
)
async def test_bad_chunks_say_which_field(catalog: Rig, tenant: Tenant, field: str, change: dict[str, object]) -> None:
    (chunk,) = tenant.chain(TOKENS[:256])
    for name, value in change.items():
        setattr(chunk, name, value)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await publish(catalog, tenant, [chunk])
    assert code(failure) is grpc.StatusCode.INVALID_ARGUMENT
    assert read_error(failure.value).values["field"] == field


@pytest.mark.parametrize(
    ("field", "change"),
    [("bucket", {"bucket": "elsewhere"}), ("key", {"key": "v1/x"}), ("group", {"group": "w1-kv1-d4-float32"})],
)
async def test_bad_receipts_say_which_field(catalog: Rig, tenant: Tenant, field: str, change: dict[str, str]) -> None:
    (chunk,) = tenant.chain(TOKENS[:256])
    for name, value in change.items():
        setattr(chunk.receipts[1], name, value)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await publish(catalog, tenant, [chunk])
    assert code(failure) is grpc.StatusCode.INVALID_ARGUMENT
    assert read_error(failure.value).values["field"] == field
