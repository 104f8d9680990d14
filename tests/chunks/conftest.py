from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from libs.chunks.local import LocalDirectory
from libs.chunks.object_store import Bucket, ObjectStore
from libs.chunks.tier import Tier
from libs.continuation.keys import ObjectKey


@dataclass
class Bench:
    """A tier, and a way to put bytes under a key behind its back."""

    tier: Tier
    bend: Callable[[ObjectKey, bytes], None]


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


@pytest.fixture(params=["local", "object_store"])
def bench(request: pytest.FixtureRequest) -> Bench:
    if request.param == "local":
        directory: LocalDirectory = request.getfixturevalue("directory")
        root: Path = request.getfixturevalue("tmp_path") / "chunks"
        return Bench(directory, lambda key, data: (root / key.text).write_bytes(data) and None)
    store: ObjectStore = request.getfixturevalue("store")
    client = request.getfixturevalue("raw_client")
    return Bench(
        store, lambda key, data: client.put_object(store.bucket, key.text, io.BytesIO(data), len(data)) and None
    )
