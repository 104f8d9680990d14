"""The catalog rebuilt from the bucket: everything that can be read comes back, nothing else, and again changes
nothing."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING

import pytest

from libs.continuation.keys import parse_key
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.transaction import DeletePrefix, Put
from services.catalog.facts.garbage import Condemned, pack_garbage
from tests.catalog.rig import FULL, WINDOWED, hex_id
from tests.catalog.test_collect_crash import OTHER_TOKENS, TOKENS, Bed, bed

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer


async def rebuild(world: Bed, fingerprint: str = "", dry: bool = False) -> tuple[pb.RebuildResponse, dict[str, str]]:
    """The last message, and key → reason of what was unusable."""
    unusable: dict[str, str] = {}
    last = pb.RebuildResponse()
    async for report in world.catalog.stub.Rebuild(pb.RebuildRequest(fingerprint=fingerprint, dry_run=dry)):
        unusable |= {item.key: item.reason for item in report.unusable}
        last = report
    assert last.done
    return last, unusable


async def forget_chunks(world: Bed) -> None:
    keys = world.catalog.keys
    await world.catalog.etcd.transact(success=[DeletePrefix(keys.of_model("chunks"))])


async def test_every_fact_comes_back_and_again_changes_nothing(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        await world.publish(TOKENS)
        await world.publish(OTHER_TOKENS)
        before = {hash: item.chunk for hash, item in (await world.chunks()).items()}
        await forget_chunks(world)
        said, _ = await rebuild(world, dry=True)
        assert said.published == len(before) and not await world.chunks()
        last, unusable = await rebuild(world)
        assert (last.published, last.standing, unusable) == (len(before), 0, {})
        after = {hash: item.chunk for hash, item in (await world.chunks()).items()}
        for chunk in (*before.values(), *after.values()):
            chunk.created_ms = 0
            chunk.receipts.sort(key=lambda receipt: receipt.group)
        assert after == before
        again, _ = await rebuild(world, world.tenant.fingerprint)
        assert (again.published, again.standing) == (0, len(before))


async def test_what_must_not_be_used_is_reported_and_left_out(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        good = await world.publish(OTHER_TOKENS)
        chunks = world.chain(TOKENS)
        await asyncio.to_thread(world.upload, chunks)
        keys = {(i, r.group): r.key for i, chunk in enumerate(chunks) for r in chunk.receipts}
        bodies = world.tenant.bodies

        def put(key: str, body: bytes) -> None:
            world.client.put_object(world.bucket, key, io.BytesIO(body), len(body))

        whole = bodies[keys[1, FULL]]
        put(keys[1, FULL], whole[:-1])
        put(keys[2, WINDOWED], bodies[keys[0, WINDOWED]])
        flipped = bytearray(bodies[keys[0, WINDOWED]])
        flipped[-1] ^= 1  # the last token id
        put(keys[0, WINDOWED], bytes(flipped))
        put("v1/stray", b"x")
        put(keys[3, WINDOWED], b"\xff" * 64)
        removed = [r.key for r in chunks[3].receipts if r.group == FULL]
        world.client.remove_object(world.bucket, removed[0])
        stranger = hex_id()
        unknown = keys[0, FULL].replace(world.tenant.fingerprint, stranger)
        put(unknown, bodies[keys[0, FULL]])
        await forget_chunks(world)
        last, unusable = await rebuild(world)
        assert unusable == {
            keys[1, FULL]: "truncated",
            keys[2, WINDOWED]: "swapped",
            keys[0, WINDOWED]: "token_mismatch",
            keys[3, WINDOWED]: "malformed",
            "v1/stray": "unnamed",
            unknown: "swapped",
            keys[1, WINDOWED]: "incomplete",
            keys[2, FULL]: "missing_parent",
        }
        found = await world.chunks()
        assert set(found) == {chunks[0].hash, *(chunk.hash for chunk in good)}
        assert [r.group for r in found[chunks[0].hash].chunk.receipts] == [FULL]
        assert last.published == 3
        await world.check()


async def test_what_collection_condemned_stays_condemned(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        chunks = await world.publish(OTHER_TOKENS)
        await forget_chunks(world)
        condemned = {r.key: Condemned(1, r.size) for r in chunks[1].receipts}
        key = world.catalog.keys.garbage(world.tenant.fingerprint, chunks[1].hash)
        await world.catalog.etcd.transact(success=[Put(key, pack_garbage(condemned))])
        _, unusable = await rebuild(world)
        assert set(unusable.values()) == {"condemned"}
        assert set(await world.chunks()) == {chunks[0].hash}


@pytest.mark.parametrize("known", [True, False])
async def test_an_unknown_model_is_reported(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str, known: bool
) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        chunks = await world.publish(OTHER_TOKENS)
        await forget_chunks(world)
        if not known:
            await world.catalog.etcd.transact(success=[DeletePrefix(world.catalog.keys.models)])
            object.__setattr__(world.catalog.parts.servicer._facts.models, "_groups", {})
        last, unusable = await rebuild(world)
        assert last.published == (2 if known else 0)
        assert set(unusable.values()) == (set() if known else {"unknown_model"})
        assert {parse_key(key).hash for key in unusable} == (set() if known else {c.hash for c in chunks})
