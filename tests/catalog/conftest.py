from __future__ import annotations

import os

# Tests here start and restart servers from a process that has gRPC channels open. gRPC's own fork handlers, which read
# this when gRPC is first used, may crash the child between fork and exec; nothing here forks without exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from tests.catalog.rig import Bucket, Rig, hex_id, running, settings

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer


@pytest.fixture
def prefix() -> str:
    """A part of the shared etcd of one's own."""
    return f"test-{hex_id(8)}/"


@pytest.fixture
async def catalog(etcd_server: EtcdServer, s3_server: SeaweedServer, prefix: str) -> AsyncIterator[Rig]:
    async with running(settings(etcd_server.endpoint, s3_server, prefix, lease_ttl_s=2)) as rig:
        yield rig


@pytest.fixture
def bucket(s3_server: SeaweedServer) -> Bucket:
    return Bucket(s3_server)
