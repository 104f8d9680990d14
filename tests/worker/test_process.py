"""Worker processes and a real catalog: epochs over kill -9, leases, duplicates, signals, bad settings."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc, common_pb2, worker_pb2, worker_pb2_grpc
from libs.controller.catalog_facts import Endpoint
from libs.service.channel import open_channel
from libs.service.transport import Transport
from services.worker.echo.model import echo_model
from services.worker.registration import CatalogAbsentError, DuplicateWorkerError, Registration
from tests.worker.conftest import Process, catalog_process, worker_process
from tests.worker.rig import until

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer

REPOSITORY = Path(__file__).parents[2]


async def endpoints(catalog: Process) -> dict[str, catalog_pb2.Endpoint]:
    """The endpoint map now."""
    async with grpc.aio.insecure_channel(catalog.target) as channel:
        stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]
        found = await stub.WatchEndpoints(catalog_pb2.WatchEndpointsRequest(), timeout=5).read()
    return {endpoint.worker: endpoint for endpoint in found.endpoints}


async def test_a_worker_registers_serves_and_leaves_in_order(catalog: Process, processes: list[Process]) -> None:
    worker = worker_process(catalog, name="parrot")
    processes.append(worker.start())
    await worker.until_ready()
    name = worker.settings["worker"]
    endpoint = (await endpoints(catalog))[name]
    assert endpoint.address == worker.target
    async with grpc.aio.insecure_channel(worker.target) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        request = common_pb2.GenerationRequest(request_id="r", tokens=[1, 2, 3], max_new_tokens=3)
        events = [event async for event in stub.Generate(worker_pb2.WorkerGenerateRequest(request=request), timeout=5)]
        assert events[-1].result.usage.generated_tokens == 3
        described = await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)
        assert described.endpoint.epoch == endpoint.epoch > 0
    worker.kill(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait) == 0, worker.output
    assert name not in await endpoints(catalog)


async def test_a_killed_worker_comes_back_with_a_larger_epoch(catalog: Process, processes: list[Process]) -> None:
    worker = worker_process(catalog)
    processes.append(worker.start())
    await worker.until_ready()
    first = (await endpoints(catalog))[worker.settings["worker"]].epoch
    worker.kill(signal.SIGKILL)
    await asyncio.to_thread(worker.wait)
    again = Process("worker", worker.settings)
    processes.append(again.start())
    await again.until_ready()
    assert (await endpoints(catalog))[worker.settings["worker"]].epoch > first


async def test_a_duplicate_makes_the_older_process_exit_with_a_clear_error(
    catalog: Process, processes: list[Process]
) -> None:
    older = worker_process(catalog)
    processes.append(older.start())
    await older.until_ready()
    newer = worker_process(catalog, worker=older.settings["worker"])
    processes.append(newer.start())
    await newer.until_ready()
    assert await asyncio.to_thread(older.wait) == 1
    assert "duplicate" in older.output
    assert older.settings["worker"] in older.output
    # The duplicate leaves the newer one's endpoint alone.
    assert (await endpoints(catalog))[older.settings["worker"]].address == newer.target


async def test_a_lease_lost_with_the_catalog_comes_back_under_the_same_epoch(
    etcd_server: EtcdServer, s3_settings: dict[str, str], processes: list[Process]
) -> None:
    catalog = catalog_process(etcd_server.endpoint, s3_settings)
    processes.append(catalog.start())
    await catalog.until_ready()
    channel = open_channel(catalog.target, Transport())
    registration = Registration(channel, catalog.target, "survivor")
    model = echo_model("echo", 100, 100)
    endpoint = Endpoint("survivor", 0, "127.0.0.1:1", family="ipv4", models=(model.fingerprint,))
    epoch = await registration.register(endpoint, [model], ["echo"], 5)
    life = asyncio.create_task(registration.run())
    catalog.kill(signal.SIGKILL)
    await asyncio.to_thread(catalog.wait)
    await until(lambda: not registration.listed, within=10)
    assert not life.done(), "an absent catalog fences nobody"
    back = Process("catalog", catalog.settings)
    processes.append(back.start())
    await back.until_ready()
    await until(lambda: registration.listed, within=15)
    assert registration.reattached >= 1
    assert (await endpoints(back))["survivor"].epoch == epoch
    await registration.deregister()
    assert not registration.listed
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    await channel.close()


async def test_a_larger_epoch_ends_the_keeping_of_the_lease(catalog: Process) -> None:
    channel = open_channel(catalog.target, Transport())
    model = echo_model("echo", 100, 100)
    endpoint = Endpoint("twin", 0, "127.0.0.1:1", family="ipv4", models=(model.fingerprint,))
    older, newer = (Registration(channel, catalog.target, "twin") for _ in range(2))
    first = await older.register(endpoint, [model], ["echo"], 5)
    second = await newer.register(endpoint, [model], ["echo"], 5)
    assert second > first
    with pytest.raises(DuplicateWorkerError, match="twin"):
        async with asyncio.timeout(5):
            await older.run()
    await channel.close()


async def test_no_catalog_at_the_first_start_is_a_clear_error(processes: list[Process]) -> None:
    channel = open_channel("127.0.0.1:1", Transport())
    model = echo_model("echo", 100, 100)
    with pytest.raises(CatalogAbsentError, match=r"127\.0\.0\.1:1"):
        await Registration(channel, "127.0.0.1:1", "w").register(Endpoint("w", 0, "x:1"), [model], ["echo"], 0.3)
    await channel.close()


def test_an_echo_worker_never_loads_torch(tmp_path: Path) -> None:
    """The whole echo path, in a process of its own: what it imports is what an image without torch must hold."""
    program = """
import asyncio, json, sys
from tests.worker.rig import routing, running
async def main():
    async with running() as worker, routing(worker, "r") as router:
        exchange = await router.offer((1, 2, 3), 4)
        await exchange.finish()
        return exchange.tokens
tokens = asyncio.run(main())
import services.worker.server
heavy = [name for name in ("torch", "transformers", "safetensors", "minio") if name in sys.modules]
print(json.dumps({"tokens": tokens, "heavy": heavy}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"tokens": [1, 2, 3, 1], "heavy": []}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lanes": "0"}, ["SEGUE_WORKER_LANES", "0"]),
        ({"lanes": "8", "step_tokens": "8"}, ["step_tokens", "8 lanes"]),
        ({"kv_byte": "1GiB"}, ["SEGUE_WORKER_KV_BYTE", "SEGUE_WORKER_KV_BYTES"]),
        ({"s3_endpoint": "nonsense"}, ["http://HOST:PORT"]),
    ],
)
def test_wrong_settings_end_the_start_with_what_to_change(given: dict[str, str], words: list[str]) -> None:
    process = Process("worker", {"echo": "true", **given}).start()
    assert process.wait() == 2
    for word in words:
        assert word in process.output
