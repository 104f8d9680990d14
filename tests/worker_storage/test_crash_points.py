"""Publishing and promoting, killed at every step: no fact without bytes, ever; begun again, all is as it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.chunks.local import LocalDirectory
from libs.chunks.object_store import ObjectStore
from libs.continuation.keys import parse_key
from libs.continuation.objects import open_by_key
from libs.contracts.segue.v1 import catalog_pb2 as pb
from tests.worker_storage.conftest import register
from tests.worker_storage.crash_child import STEPS, TOKENS
from tests.worker_storage.rig import LAYOUT

REPOSITORY = Path(__file__).parents[2]
# Six objects of three chunks: the first call of each kind, and one in the middle.
POINTS = [
    (what, call, when, nth)
    for what, calls in STEPS.items()
    for call in calls
    for when in ("before", "after")
    for nth in ((1,) if call in ("publish", "replicas", "withdraw") else (1, 4))
]


class Forker:
    """See crash_child."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker_storage.crash_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def play(self, **job: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    made = Forker()
    yield made
    made.close()


async def chunks(catalog, model) -> list[pb.ListedChunk]:
    found = await catalog.stub.ListChunks(pb.ListChunksRequest(fingerprint=model.fingerprint), timeout=5)
    return list(found.chunks)


async def facts_have_bytes(catalog, model, store: ObjectStore, folder: Path) -> tuple[int, int]:
    """Every receipt names an object that is whole, every ready replica a file that is; how many there are of each."""
    receipts = ready = 0
    local = LocalDirectory(folder, cap=1 << 30)
    try:
        for listed in await chunks(catalog, model):
            for receipt in listed.chunk.receipts:
                key = parse_key(receipt.key)
                open_by_key(bytearray(store.get(key, receipt.size, within=10).data), key).release()
                receipts += 1
            for replica in listed.replicas:
                if replica.node == local.node and replica.state == pb.REPLICA_STATE_READY:
                    chunk = listed.chunk
                    keys = local.find(model.fingerprint, chunk.owner, chunk.hash, replica.group)
                    assert replica.content_id in {key.content_id for key in keys}
                    open_by_key((folder / keys[0].text).read_bytes(), keys[0]).release()
                    ready += 1
        # What lies there is whole, fact or none.
        for key in local.objects():
            open_by_key((folder / key.text).read_bytes(), key).release()
    finally:
        local.close()
    return receipts, ready


@pytest.mark.parametrize(("what", "call", "when", "nth"), POINTS)
async def test_killed_there(catalog, model, bucket, tmp_path, forker, what, call, when, nth):
    folder = tmp_path / "chunks"
    job: dict[str, object] = {
        "fingerprint": model.fingerprint, "salt": model.salt, "catalog": catalog.target, "folder": str(folder),
        "bucket": {
            "endpoint": bucket.endpoint, "bucket": bucket.bucket, "access_key": bucket.access_key,
            "secret_key": bucket.secret_key,
        },
    }  # fmt: skip
    local = LocalDirectory(folder, cap=1 << 30)
    node = local.node
    local.close()
    store = ObjectStore(bucket)
    names = [one.hash for one in model.chain(TOKENS)]
    whole = len(names) * len(LAYOUT.groups)
    try:
        if what == "promote":
            assert await played(forker, **{**job, "what": "publish", "folder": str(tmp_path / "origin")}) == "exit 0"
            await register(catalog, model, node=node, worker="w2")
            demands = [pb.Demand(fingerprint=model.fingerprint, hash=name, node=node) for name in names]
            await catalog.stub.SetDemands(pb.SetDemandsRequest(demands=demands), timeout=5)
            job["objects"] = whole
        else:
            await register(catalog, model, node=node, worker="w2")
        assert await played(forker, **job, what=what, call=call, when=when, nth=nth) == "killed"
        await facts_have_bytes(catalog, model, store, folder)
        if what == "promote":
            # Withdrawn ones are asked for again: what is there already costs nothing.
            await catalog.stub.SetDemands(pb.SetDemandsRequest(demands=demands), timeout=5)
        assert await played(forker, **job, what=what) == "exit 0"
        receipts, ready = await facts_have_bytes(catalog, model, store, folder)
        assert receipts == whole and ready == whole
        assert {listed.chunk.hash for listed in await chunks(catalog, model)} == set(names)
    finally:
        store.close()


async def played(forker: Forker, **job: object) -> str:
    """Beside the catalog, which runs on this loop."""
    import asyncio

    return await asyncio.to_thread(forker.play, **job)


async def test_a_fact_that_runs_ahead_of_its_bytes_is_found(catalog, model, bucket, tmp_path, forker):
    """Planted: the file of a ready replica goes, and the check of this file says so."""
    folder = tmp_path / "chunks"
    await register(catalog, model)
    job = {
        "fingerprint": model.fingerprint, "salt": model.salt, "catalog": catalog.target, "folder": str(folder),
        "bucket": {
            "endpoint": bucket.endpoint, "bucket": bucket.bucket, "access_key": bucket.access_key,
            "secret_key": bucket.secret_key,
        },
    }  # fmt: skip
    assert await played(forker, **job, what="publish") == "exit 0"
    store = ObjectStore(bucket)
    try:
        local = LocalDirectory(folder, cap=1 << 30)
        await register(catalog, model, node=local.node, worker="w2")
        local.close()
        await facts_have_bytes(catalog, model, store, folder)
        next((folder / "v1").rglob("*.safetensors")).unlink()
        with pytest.raises(AssertionError):
            await facts_have_bytes(catalog, model, store, folder)
    finally:
        store.close()
