"""Fifty processes of one worker id over lost leases, kills of etcd and a restore from a backup: epochs only grow."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from cli.embedded.children import Supervisor
from cli.embedded.etcd import EtcdServer
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import read_error
from services.catalog.etcd.transaction import Get
from services.catalog.facts.workers import unpack_number
from tests.catalog.rig import code, registration, running, settings
from tests.catalog.test_outage import retried

if TYPE_CHECKING:
    from cli.embedded.seaweed import SeaweedServer

PROCESSES = 50


async def test_epochs_grow_over_everything_that_can_happen_to_etcd(
    tmp_path: Path, s3_server: SeaweedServer, prefix: str
) -> None:
    server = EtcdServer.in_dir(tmp_path / "etcd")
    backup = tmp_path / "backup"
    if not server.safe_to_kill:
        pytest.skip(f"unsupported here: etcd {server.version} may lose data under SIGKILL")
    epochs: list[int] = []
    # Two replicas with different clocks: one an hour behind.
    behind = [0]

    def late_clock() -> int:
        behind[0] += 1
        return behind[0]

    async with Supervisor() as supervisor:
        child = await supervisor.start(server.spec())
        wanted = settings(server.endpoint, s3_server, prefix, etcd_timeout_s=1.0, lease_ttl_s=5)
        async with running(wanted) as one, running(wanted, now_ms=late_clock) as late:
            kills = 0
            for process in range(PROCESSES):
                replica = late if process % 3 == 1 else one
                done = await retried(lambda replica=replica: replica.stub.Register(registration("w")))
                epochs.append(done.epoch)
                if process % 5 == 2:  # its lease is lost; it attaches again under the same epoch
                    await one.etcd.revoke_lease(done.lease_id)
                    again = await late.stub.Register(registration("w", epoch=done.epoch))
                    assert again.epoch == done.epoch
                if process in (12, 30):
                    child.kill()
                    kills += 1
                    await child.wait_restarted(kills)
                if process in (20, 40):
                    await supervisor.stop(child)
                    if process == 20:
                        shutil.copytree(server.data_dir, backup)
                    else:  # twenty processes are forgotten
                        shutil.rmtree(server.data_dir)
                        shutil.copytree(backup, server.data_dir)
                        server.data_dir.chmod(0o700)
                    child, kills = await supervisor.start(server.spec()), 0
                if process == 40:
                    # The newest process attaches again although etcd knows only an older one, and keeps what it is.
                    newest = await retried(lambda: one.stub.Register(registration("w", epoch=epochs[-1])))
                    assert newest.epoch == epochs[-1]
                    (stored,) = (await one.etcd.read([Get(one.keys.epoch("w"))])).found
                    assert unpack_number(stored[0].value) == epochs[-1]
            assert len(epochs) == PROCESSES and epochs == sorted(set(epochs))
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await one.stub.Register(registration("w", epoch=epochs[-2]))
            assert code(failure) is grpc.StatusCode.FAILED_PRECONDITION
            assert read_error(failure.value).reason == "DUPLICATE_WORKER"


async def test_the_clock_carries_a_new_process_past_what_a_backup_forgot(
    tmp_path: Path, s3_server: SeaweedServer, prefix: str
) -> None:
    """No process attaches again in between: only the clock is left to know better."""
    server = EtcdServer.in_dir(tmp_path / "etcd")
    async with Supervisor() as supervisor:
        child = await supervisor.start(server.spec())
        wanted = settings(server.endpoint, s3_server, prefix, etcd_timeout_s=1.0)
        async with running(wanted) as catalog:
            first = await catalog.stub.Register(registration("w"))
            await supervisor.stop(child)
            shutil.copytree(server.data_dir, tmp_path / "backup")
            child = await supervisor.start(server.spec())
            forgotten = [(await retried(lambda: catalog.stub.Register(registration("w")))).epoch for _ in range(5)]
            await supervisor.stop(child)
            shutil.rmtree(server.data_dir)
            shutil.copytree(tmp_path / "backup", server.data_dir)
            server.data_dir.chmod(0o700)
            await supervisor.start(server.spec())
            after = await retried(lambda: catalog.stub.Register(registration("w")))
            assert first.epoch < min(forgotten) and max(forgotten) < after.epoch
            # And the streams of this replica follow the restored etcd.
            async with asyncio.timeout(20):
                async for newest in catalog.stub.WatchEndpoints(pb.WatchEndpointsRequest()):
                    if [e.epoch for e in newest.endpoints] == [after.epoch]:
                        break
