"""`segue cache` as a process against a running catalog: what it prints is what is stored, and every fault is found."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.transaction import Delete, Put
from services.catalog.facts.values import pack
from tests.catalog.rig import FULL, WINDOWED
from tests.catalog.test_collect_crash import OTHER_TOKENS, TOKENS, Bed, bed

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer

ROOT = Path(__file__).resolve().parents[2]


class Shell:
    """Runs the command against one bed."""

    def __init__(self, world: Bed, s3: SeaweedServer) -> None:
        self.world = world
        self.env = {
            **os.environ,
            "SEGUE_CATALOG": world.catalog.target,
            "SEGUE_CATALOG_S3_ENDPOINT": s3.url,
            "SEGUE_CATALOG_S3_BUCKET": world.bucket,
            "SEGUE_CATALOG_S3_ACCESS_KEY": s3.access_key,
            "SEGUE_CATALOG_S3_SECRET_KEY": s3.secret_key,
            "COLUMNS": "200",
        }

    async def __call__(self, *arguments: str, code: int = 0) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli",
            "cache",
            *arguments,
            cwd=ROOT,
            env=self.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        assert process.returncode == code, (arguments, out.decode(), err.decode())
        return out.decode() if code in (0, 1) and out else err.decode()

    async def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(await self(*arguments, "--json", code=code))


@pytest.fixture
async def world(etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str) -> AsyncIterator[Bed]:
    async with bed(etcd_server, s3_server, prefix) as found:
        async for newest in found.catalog.stub.WatchEndpoints(pb.WatchEndpointsRequest()):
            if newest.endpoints:
                break
        yield found


@pytest.fixture
def segue(world: Bed, s3_server: SeaweedServer) -> Shell:
    return Shell(world, s3_server)


async def test_what_is_stored_is_listed_shown_pinned_and_purged(world: Bed, segue: Shell) -> None:
    chunks = await world.publish(TOKENS, "node-x")
    owner = chunks[0].owner
    (row,) = await segue.json("ls")
    size = sum(r.size for chunk in chunks for r in chunk.receipts)
    assert (row["chunks"], row["tails"], row["tokens"], row["bytes"]) == (3, 1, 3 * 256 + 32, size)
    assert (row["owner"], row["replicas"]) == (owner, {"node-x": 4})
    every = await segue.json("ls", "--chunks", "--owner", owner)
    assert {one["hash"] for one in every} == {chunk.hash for chunk in chunks}
    assert owner[:12] in await segue("ls")
    assert chunks[2].hash[:16] in await segue("ls", "--chunks")

    shown = await segue.json("show", chunks[3].hash[:12])
    assert shown["chain"] == [chunk.hash for chunk in chunks]
    assert {r["group"] for r in shown["objects"]} == {FULL, WINDOWED}
    assert "chain" in await segue("show", chunks[3].hash)

    assert await segue.json("pin", chunks[1].hash[:12], "--who", "ann", "--why", "demo") == {"pinned": [chunks[1].hash]}
    assert (await segue.json("show", chunks[1].hash))["pin"]["who"] == "ann"
    assert chunks[1].hash in await segue("pin", chunks[1].hash)
    would = await segue.json("purge", owner, "--dry-run")
    assert would["totals"]["chunks_removed"] == 2 and would["pinned"] == 2
    assert len(await world.chunks()) == 4
    await segue("unpin", chunks[1].hash)
    await segue("purge", owner, code=1)  # nobody confirmed
    done = await segue.json("purge", owner, "--yes")
    assert (done["totals"]["chunks_removed"], done["nodes"]) == (4, ["node-x"])
    assert await segue.json("ls") == [] and not world.objects()


async def test_rebuild_and_gc_report_what_they_did(world: Bed, segue: Shell) -> None:
    chunks = await world.publish(OTHER_TOKENS)
    keys = [world.catalog.keys.chunk(world.tenant.fingerprint, chunk.hash) for chunk in chunks]
    await world.catalog.etcd.transact(success=[Delete(key) for key in keys])
    said = await segue.json("rebuild", "--dry-run")
    assert (said["published"], said["unusable"]) == (2, [])
    assert "2 chunks published" in await segue("rebuild")
    assert (await segue.json("rebuild"))["standing"] == 2
    done = await segue.json("gc")
    assert done["collected"] == [] and done["totals"]["chunks_examined"] == 2
    assert "nothing to remove" in await segue("gc", "--dry-run")


async def test_verify_finds_each_fault_and_nothing_in_a_sound_cache(world: Bed, segue: Shell) -> None:
    good = await world.publish(OTHER_TOKENS)
    chunks = await world.publish(TOKENS)
    sound = await segue.json("verify")
    assert sound["faults"] == [] and sound["chunks"] == 6 and sound["bytes"] > 0
    assert "0 faults" in await segue("verify", "--facts-only")

    keys = {(i, r.group): r.key for i, chunk in enumerate(chunks) for r in chunk.receipts}
    bodies = world.tenant.bodies

    def put(key: str, body: bytes) -> None:
        world.client.put_object(world.bucket, key, io.BytesIO(body), len(body))

    flipped = bytearray(bodies[keys[0, FULL]])
    flipped[len(flipped) // 2] ^= 1
    put(keys[0, FULL], bytes(flipped))
    put(keys[0, WINDOWED], bodies[keys[0, WINDOWED]][:-4])
    put(keys[1, FULL], bodies[keys[2, FULL]])
    world.client.remove_object(world.bucket, keys[1, WINDOWED])
    stored = (await world.chunks())[chunks[2].hash].chunk
    stored.tokens_sha256 = "0" * 64
    fact = world.catalog.keys.chunk(world.tenant.fingerprint, stored.hash)
    # The last chunk's parent goes, and the third says something false.
    parentless = world.catalog.keys.chunk(world.tenant.fingerprint, good[0].hash)
    await world.catalog.etcd.transact(success=[Put(fact, pack(stored)), Delete(parentless)])
    found = await segue.json("verify", code=1)
    assert {(f["hash"], f["group"], f["reason"]) for f in found["faults"]} == {
        (chunks[0].hash, FULL, "content_mismatch"),
        (chunks[0].hash, WINDOWED, "size"),
        (chunks[0].hash, WINDOWED, "truncated"),
        (chunks[1].hash, FULL, "swapped"),
        (chunks[1].hash, WINDOWED, "missing"),
        (chunks[2].hash, FULL, "fact_mismatch"),
        (chunks[2].hash, WINDOWED, "fact_mismatch"),
        (good[1].hash, "", "parent_missing"),
    }
    table = await segue("verify", "--hash", chunks[1].hash[:10], code=1)
    assert "swapped" in table and "missing" in table and "content_mismatch" not in table


async def test_verify_repairs_what_is_gone_and_says_what_it_would(world: Bed, segue: Shell) -> None:
    await segue.json("gc")  # marks the bucket as this etcd's
    chunks = await world.publish(TOKENS)
    await segue.json("pin", chunks[2].hash)
    world.client.remove_object(world.bucket, chunks[1].receipts[0].key)
    would = await segue.json("verify", "--facts-only", "--repair", "--dry-run", code=1)
    assert (would["faults"], would["repair"]["dry_run"]) == ([], True)
    assert [missing["key"] for missing in would["repair"]["missing"]] == [chunks[1].receipts[0].key]
    assert would["repair"]["totals"]["chunks_removed"] == 3 and len(await world.chunks()) == 4
    done = await segue.json("verify", "--repair")
    assert [fault["reason"] for fault in done["faults"]] == ["missing"]
    assert done["repair"]["collected"] == would["repair"]["collected"] and done["repair"]["pinned"] == 1
    assert set(await world.chunks()) == {chunks[0].hash}
    assert "0 objects are missing" in await segue("verify", "--facts-only", "--repair")
    await segue("verify", "--dry-run", code=2)
    await segue("verify", "--repair", "--hash", chunks[0].hash, code=2)


async def test_failures_are_one_line_that_names_the_catalog(segue: Shell, world: Bed) -> None:
    segue.env["SEGUE_CATALOG"] = "127.0.0.1:1"
    said = await segue("ls", code=1)
    assert said.startswith("segue cache: catalog at 127.0.0.1:1") and said.count("\n") == 1
    segue.env["SEGUE_CATALOG"] = world.catalog.target
    assert "no chunk begins with abcd" in await segue("show", "abcd", code=1)
    assert "owner" in await segue("purge", "xyz", "--yes", code=1)
    segue.env["SEGUE_CATALOG_S3_SECRET_KEY"] = "wrong"
    await world.publish(OTHER_TOKENS)
    assert "secret key" in await segue("verify", code=1)
