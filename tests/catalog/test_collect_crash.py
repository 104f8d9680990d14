"""A real process killed after every step of a collection, on a real etcd and a real S3 server, and what it leaves."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minio import Minio

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.ownership import MARK
from services.catalog.collect.run import Step
from services.catalog.etcd.transaction import Get
from services.catalog.server import unix_ms
from tests.catalog.real_chunks import RealTenant
from tests.catalog.rig import FULL, Rig, Tenant, hex_id, model, registration, running, settings

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
TOKENS = [i // 256 for i in range(3 * 256)] + [5] * 40
OTHER_TOKENS = [9] * 512
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Bed:
    """A catalog of its own bucket. `objects` are those that are in it now."""

    catalog: Rig
    client: Minio
    bucket: str
    tenant: RealTenant

    def upload(self, chunks: list[pb.Chunk]) -> None:
        for receipt in (receipt for chunk in chunks for receipt in chunk.receipts):
            body = self.tenant.bodies[receipt.key]
            self.client.put_object(self.bucket, receipt.key, io.BytesIO(body), len(body))

    def chain(self, tokens: list[int], **options: Any) -> list[pb.Chunk]:
        return self.tenant.chain(tokens, tail=True, bucket=self.bucket, **options)

    async def publish(self, tokens: list[int], node: str = "") -> list[pb.Chunk]:
        chunks = self.chain(tokens)
        await asyncio.to_thread(self.upload, chunks)
        request = pb.PublishRequest(fingerprint=self.tenant.fingerprint, chunks=chunks, node=node)
        await self.catalog.stub.Publish(request)
        return chunks

    async def chunks(self) -> dict[str, pb.ListedChunk]:
        listed = await self.catalog.stub.ListChunks(pb.ListChunksRequest(fingerprint=self.tenant.fingerprint))
        return {item.chunk.hash: item for item in listed.chunks}

    def objects(self) -> set[str]:
        return {str(o.object_name) for o in self.client.list_objects(self.bucket, recursive=True)} - {MARK}

    async def check(self) -> None:
        """What must hold after any crash."""
        chunks, objects = await self.chunks(), await asyncio.to_thread(self.objects)
        for item in chunks.values():
            assert {receipt.key for receipt in item.chunk.receipts} <= objects, "a fact without bytes"
            assert item.chunk.start == 0 or item.chunk.parent in chunks, "a chunk without its parent"
        pins = await self.catalog.stub.ListPins(pb.ListPinsRequest())
        assert {pin.hash for pin in pins.pins} <= set(chunks), "a pinned chunk was removed"


@asynccontextmanager
async def bed(etcd: EtcdServer, s3: SeaweedServer, prefix: str, **changes: Any) -> AsyncIterator[Bed]:
    bucket = f"test-{hex_id(6)}"
    wanted = settings(etcd.endpoint, s3, prefix, s3_bucket=bucket, **changes)
    client = Minio(s3.endpoint, s3.access_key, s3.secret_key, secure=False, region="us-east-1")
    async with running(wanted) as catalog:
        await catalog.store.ensure_bucket(create=True)
        served = model()
        await catalog.stub.Register(registration("w", served, node="node-x"))
        yield Bed(catalog, client, bucket, RealTenant(served.fingerprint))


async def order(process: asyncio.subprocess.Process, **what: Any) -> dict[str, int]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(what).encode() + b"\n")
    await process.stdin.drain()
    async with asyncio.timeout(60):
        answer = await process.stdout.readline()
    found: dict[str, int] = json.loads(answer)
    return found


@asynccontextmanager
async def collecting(
    world: Bed, etcd: EtcdServer, s3: SeaweedServer, prefix: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that collects and dies as it is ordered."""
    facts = {
        "etcd_endpoint": etcd.endpoint,
        "etcd_prefix": prefix,
        "s3_endpoint": s3.url,
        "s3_bucket": world.bucket,
        "s3_access_key": s3.access_key,
        "s3_secret_key": s3.secret_key,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.catalog.collect_process",
        json.dumps(facts),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def test_killed_after_every_step_it_leaves_nothing_false_and_the_next_run_ends_it(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        gone = await world.publish(TOKENS, "node-x")
        kept = await world.publish(OTHER_TOKENS, "node-x")
        pin = pb.ChunkId(fingerprint=world.tenant.fingerprint, hash=kept[1].hash)
        await world.catalog.stub.Pin(pb.PinRequest(chunks=[pin], who="test", why="kept"))
        elsewhere = pb.Replica(node="node-y", group="g", state=pb.REPLICA_STATE_READY, content_id=hex_id())
        update = pb.ReplicaUpdate(fingerprint=pin.fingerprint, hash=pin.hash, replica=elsewhere)
        await world.catalog.stub.SetReplica(pb.SetReplicaRequest(updates=[update]))
        orphans = world.chain([4] * 256) + world.chain(TOKENS[:256], body=b"other")
        await asyncio.to_thread(world.upload, orphans)
        unfinished = orphans[0].receipts[0].key.replace(orphans[0].hash, hex_id())
        await asyncio.to_thread(world.client._create_multipart_upload, world.bucket, unfinished, {})
        record = pb.DecisionRecord(request_id="r", decided_ms=unix_ms())
        await world.catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=[record]))
        async with collecting(world, etcd_server, s3_server, prefix) as process:
            now_ms = unix_ms() + 40 * DAY_MS
            for step in Step:
                if step is Step.RECORD_DROPPED:
                    now_ms += 2 * HOUR_MS
                done = await order(process, now_ms=now_ms, step=step.value, nth=1)
                assert done == {"signal": 9}, f"{step} was not reached"
                await world.check()
                await free_lock(world)
            assert set(await world.chunks()) == {chunk.hash for chunk in kept}
            for _ in range(2):
                now_ms += 9 * DAY_MS
                await order(process, now_ms=now_ms, step="", nth=1)
                await world.check()
        assert world.objects() == {receipt.key for chunk in kept for receipt in chunk.receipts}
        assert not (await world.catalog.stub.ListDecisions(pb.ListDecisionsRequest())).records
        assert not any(item.replicas for item in (await world.chunks()).values())
        assert gone[0].hash not in await world.chunks()


async def free_lock(world: Bed) -> None:
    """As its lease does in time."""
    (lock,) = (await world.catalog.etcd.read([Get(world.catalog.keys.collection_lock)])).found
    assert lock, "the killed process held no lock"
    await world.catalog.etcd.revoke_lease(lock[0].lease)


async def test_a_dry_run_over_the_wire_reports_what_the_run_then_does(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        chunks = await world.publish(TOKENS)
        parts = world.catalog.parts
        object.__setattr__(parts.collector, "_now_ms", lambda: unix_ms() // DAY_MS * DAY_MS + 40 * DAY_MS)
        await asyncio.to_thread(world.upload, world.chain([4] * 256))

        async def collected(dry: bool) -> tuple[list[pb.Collected], pb.CollectGarbageResponse]:
            items: list[pb.Collected] = []
            last = pb.CollectGarbageResponse()
            async for report in world.catalog.stub.CollectGarbage(pb.CollectGarbageRequest(dry_run=dry)):
                items += report.collected
                last = report
            assert last.done and last.revision
            return sorted(items, key=str), last

        said, _ = await collected(dry=True)
        assert len(await world.chunks()) == 4
        done, last = await collected(dry=False)
        assert said == done and len(done) == 4 + 2
        assert (last.totals.chunks_removed, last.totals.objects_removed, last.totals.objects_waiting) == (4, 2, 8)
        assert not await world.chunks()
        assert world.objects() == {receipt.key for chunk in chunks for receipt in chunk.receipts}
        assert world.catalog.metric("segue_catalog_collected_total", reason="idle") == 4
        assert world.catalog.metric("segue_catalog_collected_total", reason="unnamed") == 2


async def test_a_purge_over_the_wire(etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        chunks = await world.publish(TOKENS, "node-x")
        last = pb.PurgeResponse()
        async for report in world.catalog.stub.Purge(pb.PurgeRequest(owner=chunks[0].owner)):
            last = report
        assert last.done and list(last.nodes) == ["node-x"]
        assert (last.totals.chunks_removed, last.totals.objects_removed) == (4, 8)
        assert not world.objects() and not await world.chunks()
        told = await anext(aiter(world.catalog.stub.WatchDemands(pb.WatchDemandsRequest(node="node-x"))))
        assert {r.hash for r in told.removals} == {chunk.hash for chunk in chunks}


async def test_look_ups_are_answered_while_many_facts_are_marked(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    """Ten thousand chunks and more: marking goes on beside the loop, over one snapshot in many pages."""
    async with bed(etcd_server, s3_server, prefix) as world:
        tenants = [Tenant(world.tenant.fingerprint) for _ in range(85)]
        tokens = [1] * (120 * 256)
        for tenant in tenants:
            await world.catalog.store_facts(tenant.fingerprint, tenant.chain(tokens, groups=[FULL]))
        asked = 0

        async def ask() -> None:
            nonlocal asked
            while True:
                found = await world.catalog.stub.Lookup(tenants[0].lookup(tokens[:512]))
                assert len(found.nodes) == 2
                asked += 1

        asking = asyncio.create_task(ask())
        last = pb.CollectGarbageResponse()
        async for report in world.catalog.stub.CollectGarbage(pb.CollectGarbageRequest(dry_run=True)):
            last = report
        asking.cancel()
        assert last.totals.chunks_examined == last.totals.chunks_removed == 85 * 120
        assert asked > 3
