"""Multipart uploads that nobody finished: given up after their grace period, and only then, and only ours."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.server import unix_ms
from services.catalog.store import StoreDeniedError, Upload
from tests.catalog.rig import Rig
from tests.catalog.test_collect_crash import HOUR_MS, OTHER_TOKENS, Bed, bed

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer


async def begin(world: Bed, key: str) -> str:
    upload: str = await asyncio.to_thread(world.client._create_multipart_upload, world.bucket, key, {})
    await asyncio.to_thread(world.client._upload_part, world.bucket, key, b"x" * 64, None, upload, 1)
    return upload


async def unfinished(world: Bed) -> set[str]:
    return {upload.key async for page in world.catalog.store.uploads("") for upload in page}


async def collected(world: Bed, dry: bool = False) -> tuple[list[pb.Collected], pb.CollectTotals]:
    items: list[pb.Collected] = []
    last = pb.CollectGarbageResponse()
    async for last in world.catalog.stub.CollectGarbage(pb.CollectGarbageRequest(dry_run=dry)):
        items += last.collected
    assert last.done
    return [item for item in items if item.reason == pb.COLLECT_REASON_UNFINISHED_UPLOAD], last.totals


async def test_an_old_upload_is_given_up_and_a_young_one_left(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str
) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        chunks = world.chain(OTHER_TOKENS)
        key, stranger = chunks[0].receipts[0].key, "elsewhere/backup.tar"
        upload = await begin(world, key)
        await begin(world, stranger)
        items, totals = await collected(world)
        assert not items and (totals.uploads_aborted, totals.uploads_waiting) == (0, 1)
        assert await unfinished(world) == {key, stranger}

        object.__setattr__(world.catalog.parts.collector, "_now_ms", lambda: unix_ms() + 2 * HOUR_MS)
        said, totals = await collected(world, dry=True)
        assert totals.uploads_aborted == 1 and await unfinished(world) == {key, stranger}
        done, totals = await collected(world)
        assert done == said and [item.key for item in done] == [key] and done[0].hash == chunks[0].hash
        assert await unfinished(world) == {stranger}
        assert world.catalog.metric("segue_catalog_collected_total", reason="unfinished_upload") == 1
        # Given up again (by two replicas, say): no error. And the chunk is published as ever.
        await world.catalog.store.abort(Upload(key, upload, 0))
        await world.publish(OTHER_TOKENS)
        assert not (await collected(world))[0]


async def test_a_store_that_hides_uploads_does_not_stop_a_collection(
    etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(etcd_server, s3_server, prefix) as world:
        await begin(world, world.chain(OTHER_TOKENS)[0].receipts[0].key)

        def denied(*_arguments: object, **_named: object) -> None:
            raise StoreDeniedError("store:1", "AccessDenied")

        monkeypatch.setattr(world.catalog.store._client, "_list_multipart_uploads", denied)
        items, totals = await collected(world)
        assert not items and (totals.uploads_aborted, totals.uploads_waiting) == (0, 0)


async def test_a_page_of_the_listing_is_not_its_end(catalog: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markers as S3 has them: behind this key, and behind this upload of it. (SeaweedFS takes the key for a filter.)"""
    begun = sorted((f"v1/key-{i // 2}", f"upload-{i}") for i in range(11))

    def page(_bucket: str, *, prefix: str, key_marker: str, upload_id_marker: str, max_uploads: int) -> SimpleNamespace:
        left = [one for one in begun if one[0].startswith(prefix) and one > (key_marker or "", upload_id_marker or "")]
        taken = [SimpleNamespace(object_name=key, upload_id=name, initiated_time=None) for key, name in left]
        return SimpleNamespace(uploads=taken[: min(3, max_uploads)], is_truncated=len(left) > 3)

    monkeypatch.setattr(catalog.store._client, "_list_multipart_uploads", page)
    pages = [found async for found in catalog.store.uploads("v1/")]
    assert [(upload.key, upload.upload_id) for found in pages for upload in found] == begun
    assert [len(found) for found in pages] == [3, 3, 3, 2]
