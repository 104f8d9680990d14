"""Beside a real catalog on a real etcd, killed and restarted: serving goes on, nothing is closed, the map is found."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc
from libs.service.channel import open_channel
from libs.service.lifecycle import Service
from libs.service.transport import Transport
from services.router.server import assemble
from services.router.settings import RouterSettings
from tests.router.fake_catalog import model
from tests.router.fake_worker import Job, scripted_worker
from tests.router.rig import FAST, eventually, ingress_to, leave

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer

pytest.importorskip("aetcd", reason="needs the catalog's extra")

ROOT = Path(__file__).parents[2]


class CatalogProcess:
    def __init__(self, etcd: EtcdServer, s3: SeaweedServer, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        given = {
            "listen": self.address, "etcd_endpoint": etcd.endpoint, "etcd_prefix": f"router-{port}/",
            "s3_endpoint": s3.url, "s3_bucket": s3.bucket, "s3_access_key": s3.access_key,
            "s3_secret_key": s3.secret_key, "lease_ttl_s": "2",
        }  # fmt: skip
        self._env = {f"SEGUE_CATALOG_{key.upper()}": value for key, value in given.items()}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.catalog", cwd=ROOT, env=os.environ | self._env,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


async def registered(stub: Any, endpoint: catalog_pb2.Endpoint, epoch: int = 0) -> catalog_pb2.RegisterResponse:
    asked = catalog_pb2.RegisterRequest(endpoint=endpoint, models=[model()], names=["m"], epoch=epoch)
    async with asyncio.timeout(20):
        while True:
            try:
                answer: catalog_pb2.RegisterResponse = await stub.Register(asked, timeout=2)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)  # not up yet
            else:
                return answer


async def test_a_catalog_killed_and_back(etcd_server: EtcdServer, s3_server: SeaweedServer) -> None:
    from cli.embedded.ports import free_ports

    catalog = CatalogProcess(etcd_server, s3_server, free_ports(1)[0])
    await catalog.start()
    channel = open_channel(catalog.address, Transport())
    stub: Any = catalog_pb2_grpc.CatalogStub(channel)
    try:
        async with scripted_worker("w0", Job.run) as worker, asyncio.TaskGroup() as tasks:
            worker.epoch = (await registered(stub, worker.endpoint)).epoch
            wanted = RouterSettings(
                listen="127.0.0.1:0", catalog=catalog.address, decisions_interval_s=0.1, heartbeat_expiry_s=60
            )
            service = Service(wanted, tasks)
            router = await assemble(service.settings, service, FAST)  # type: ignore[arg-type]
            found = router.workers.pool.status
            try:
                async with ingress_to(service.target) as ingress:
                    await eventually(lambda: bool(router.observatory.fleet.views()), "heard")
                    await (await ingress.submit()).completed(4)
                    await catalog.kill()
                    await eventually(lambda: not router.endpoints.counters.connected, "noticed")
                    await (await ingress.submit()).completed(4)
                    # Nobody kept its lease alive meanwhile: the map is empty when the catalog is back.
                    await catalog.start()
                    await eventually(lambda: bool(router.endpoints.counters.connected), "followed again")
                    await eventually(lambda: found().pool.map.empty_refused_s is not None, "empty map refused")
                    await (await ingress.submit()).completed(4)
                    await registered(stub, worker.endpoint, worker.epoch)
                    await eventually(lambda: found().pool.map.empty_refused_s is None, "listed again")
                    await (await ingress.submit()).completed(4)
                    assert len(worker.tunnels) == 2 and not any(tunnel.closed for tunnel in worker.tunnels)
                # What was decided while it was away is recorded too, once.
                sent = router.batches.counters
                await eventually(lambda: sent.waiting == 0 and sent.appended == 4, "decisions appended")
                kept = await stub.ListDecisions(catalog_pb2.ListDecisionsRequest())
                assert len(kept.records) == 4 == len({record.request_id for record in kept.records})
                assert all(record.worker == "w0" and record.terms for record in kept.records)
                assert sent.failures >= 1 and sent.dropped == 0
            finally:
                await leave(service)
    finally:
        await channel.close(None)
        await catalog.kill()
