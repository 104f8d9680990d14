from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.chunks.object_store import Bucket, ObjectStore
from libs.continuation.keys import ObjectKey
from tests.chunks.bench import Bench
from tests.chunks.peers import ServedPeer

pytest.register_assert_rewrite("tests.chunks.conformance")


@pytest.fixture
def bucket(s3_server) -> Bucket:
    return Bucket(s3_server.endpoint, s3_server.bucket, s3_server.access_key, s3_server.secret_key)


@pytest.fixture
def raw_client(s3_server):
    from minio import Minio

    return Minio(s3_server.endpoint, s3_server.access_key, s3_server.secret_key, secure=False, region="us-east-1")


@pytest.fixture
def store(bucket: Bucket) -> Iterator[ObjectStore]:
    made = ObjectStore(bucket)
    yield made
    made.close()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LocalDirectory]:
    made = LocalDirectory(tmp_path / "chunks", cap=1 << 30)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = HostMemory(1 << 30)
    yield made
    made.close()


@pytest.fixture
def served(directory: LocalDirectory) -> Iterator[ServedPeer]:
    """A peer with a chunk directory, behind a real socket, and this side's client."""
    made = ServedPeer(directory)
    yield made
    made.close()


def bend_memory(memory: HostMemory, key: ObjectKey, data: bytes) -> None:
    """Other bytes in the object's place, as a stray write would leave them."""
    memory._data[key] = np.frombuffer(bytearray(data), np.uint8).data if data else memoryview(b"")


@pytest.fixture(params=["memory", "local", "peer", "object_store"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Every tier there is, each over its real medium."""
    root: Path = request.getfixturevalue("tmp_path") / "chunks"

    def bend_file(key: ObjectKey, data: bytes) -> None:
        (root / key.text).write_bytes(data)

    make: dict[str, Callable[[], Bench]] = {}
    make["memory"] = lambda: _memory(request.getfixturevalue("memory"))
    make["local"] = lambda: _local(request.getfixturevalue("directory"), bend_file)
    make["peer"] = lambda: _peer(request.getfixturevalue("served"), bend_file)
    make["object_store"] = lambda: _store(request.getfixturevalue("store"), request.getfixturevalue("raw_client"))
    return make[request.param]()


def _memory(memory: HostMemory) -> Bench:
    return Bench(
        memory, memory, lambda key, data: bend_memory(memory, key, data), lambda: memory.counts.quarantined, aside=True
    )


def _local(directory: LocalDirectory, bend: Callable[[ObjectKey, bytes], None]) -> Bench:
    return Bench(directory, directory, bend, lambda: directory.counts.quarantined, aside=True)


def _peer(served: ServedPeer, bend: Callable[[ObjectKey, bytes], None]) -> Bench:
    return Bench(served.peer, served.directory, bend, lambda: served.client.counts.rejected, aside=False)


def _store(store: ObjectStore, client) -> Bench:
    def bend(key: ObjectKey, data: bytes) -> None:
        client.put_object(store.bucket, key.text, io.BytesIO(data), len(data))

    return Bench(store, store, bend, lambda: store.counts.rejected, aside=False)


@pytest.fixture(params=["memory", "local"])
def capped(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], HostMemory | LocalDirectory]:
    """A tier with a byte cap; made again under the same cap it is the same one after a restart."""
    made: list[HostMemory | LocalDirectory] = []

    def open_it(cap: int) -> HostMemory | LocalDirectory:
        if made:
            made[-1].close()
        made.append(HostMemory(cap) if request.param == "memory" else LocalDirectory(tmp_path / "capped", cap=cap))
        return made[-1]

    request.addfinalizer(lambda: made and made[-1].close())
    return open_it
