"""The process: ready only when it can serve, a clear end when it cannot, an ordered end on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cli.embedded.ports import free_ports
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.settings import SettingsError, load
from services.catalog.settings import CatalogSettings
from tests.catalog.rig import hex_id, registration

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer

WITHIN_S = 30.0


class Process:
    """`python -m services.catalog` with its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    @classmethod
    async def start(cls, etcd: str, s3: SeaweedServer, **variables: str) -> Process:
        given = {
            "ETCD_ENDPOINT": etcd,
            "ETCD_PREFIX": f"test-{hex_id(8)}/",
            "S3_ENDPOINT": s3.url,
            "S3_BUCKET": s3.bucket,
            "S3_ACCESS_KEY": s3.access_key,
            "S3_SECRET_KEY": s3.secret_key,
            "STARTUP_WAIT_S": "20",
            "LOG_FORMAT": "json",
            **variables,
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SEGUE_")}
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.catalog",
                env=clean | {f"SEGUE_CATALOG_{name}": value for name, value in given.items()},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        )

    async def line(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            while raw := await self.process.stdout.readline():
                self.lines.append(raw.decode())
                if match := re.search(pattern, self.lines[-1]):
                    return match
        raise AssertionError(f"no line with {pattern!r} in {''.join(self.lines)}")

    async def end(self) -> tuple[int, str]:
        async with asyncio.timeout(WITHIN_S):
            out, _ = await self.process.communicate()
        return int(self.process.returncode or 0), "".join(self.lines) + out.decode()

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def test_it_serves_health_reflection_and_calls_and_ends_in_order(
    etcd_server: EtcdServer, s3_server: SeaweedServer
) -> None:
    async with await Process.start(etcd_server.endpoint, s3_server) as catalog:
        target = (await catalog.line(r'"listen": ?"([^"]+)"'))[1]
        async with grpc.aio.insecure_channel(target) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="segue.v1.Catalog")
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            stub: Any = catalog_pb2_grpc.CatalogStub(channel)
            stream = stub.WatchEndpoints(pb.WatchEndpointsRequest())
            await stream.read()
            assert (await stub.Register(registration("w"))).epoch > 0
            assert len((await stream.read()).endpoints) == 1
            with grpc.insecure_channel(target) as blocking:
                services = await asyncio.to_thread(lambda: ProtoReflectionDescriptorDatabase(blocking).get_services())
            assert "segue.v1.Catalog" in services
            began = time.monotonic()
            catalog.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                while True:
                    await stream.read()
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        status, output = await catalog.end()
        assert status == 0, output
        assert time.monotonic() - began < 5


async def test_without_etcd_it_ends_and_names_the_endpoint(s3_server: SeaweedServer) -> None:
    (port,) = free_ports(1)
    async with await Process.start(f"127.0.0.1:{port}", s3_server, STARTUP_WAIT_S="0.5") as catalog:
        status, output = await catalog.end()
    assert status == 1
    assert f"etcd at 127.0.0.1:{port} is unavailable" in output and "etcd_endpoint" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"S3_SECRET_KEY": "wrong"}, "denies access"),
        ({"S3_BUCKET": "never-made", "S3_CREATE_BUCKET": "false"}, "has no bucket 'never-made'"),
        ({"S3_ENDPOINT": "http://127.0.0.1:9", "STARTUP_WAIT_S": "0.5"}, "127.0.0.1:9 is unavailable"),
        ({"ETCD_CA_FILE": "/nonexistent/ca.pem"}, "ca.pem cannot be read"),
    ],
)
async def test_a_start_that_cannot_succeed_says_why(
    etcd_server: EtcdServer, s3_server: SeaweedServer, variables: dict[str, str], said: str
) -> None:
    async with await Process.start(etcd_server.endpoint, s3_server, **variables) as catalog:
        status, output = await catalog.end()
    assert status == 1 and said in output
    assert "Traceback" not in output and s3_server.secret_key not in output


async def test_a_missing_bucket_is_created_where_allowed(etcd_server: EtcdServer, s3_server: SeaweedServer) -> None:
    async with await Process.start(etcd_server.endpoint, s3_server, S3_BUCKET=f"made-{hex_id(4)}") as catalog:
        await catalog.line('"listen"')


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ETCD_PREFIX", "no-slash"),
        ("S3_ENDPOINT", "127.0.0.1:9000"),
        ("LEASE_TTL_S", "1"),
        ("ETCD_USER", "alone"),
    ],
)
def test_wrong_settings_are_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(SettingsError) as failure:
        load(CatalogSettings, [], {f"SEGUE_CATALOG_{variable}": value})
    assert variable.lower() in str(failure.value).lower()
