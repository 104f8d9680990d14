from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from libs.chunks.object_store import Bucket
from libs.contracts.segue.v1 import catalog_pb2 as pb
from tests.catalog.rig import Rig, running, settings
from tests.worker_storage.rig import Model

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer


@pytest.fixture
def bucket(s3_server: SeaweedServer) -> Bucket:
    return Bucket(s3_server.endpoint, s3_server.bucket, s3_server.access_key, s3_server.secret_key)


@pytest.fixture
async def catalog(etcd_server: EtcdServer, s3_server: SeaweedServer) -> AsyncIterator[Rig]:
    async with running(settings(etcd_server.endpoint, s3_server, f"storage-{secrets.token_hex(6)}/")) as rig:
        yield rig


@pytest.fixture
async def model(catalog: Rig) -> Model:
    """A registered model."""
    made = Model()
    await register(catalog, made)
    return made


async def register(catalog: Rig, model: Model, node: str = "", worker: str = "w", address: str = "127.0.0.1:1") -> None:
    """`node`: a chunk directory that counts as claimed."""
    await catalog.stub.Register(
        pb.RegisterRequest(
            endpoint=pb.Endpoint(worker=worker, address=address, family="ipv4", node=node),
            models=[model.proto()],
            names=["m"],
        ),
        timeout=5,
    )
