"""Two worker processes with the tiny model, a real catalog and a real object store: one continues the other's chat."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc, common_pb2, worker_pb2, worker_pb2_grpc
from tests.worker.conftest import Process, catalog_process, worker_process
from tests.worker.rig import SALT

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer

PROMPT = [3 + (position * 7919) % 200 for position in range(700)]


async def generate(
    worker: Process, name: str, tokens: list[int], nodes: list[catalog_pb2.Node] | None = None
) -> tuple[list[int], worker_pb2.Result]:
    async with grpc.aio.insecure_channel(worker.target) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        request = common_pb2.GenerationRequest(request_id=name, tokens=tokens, max_new_tokens=20, tenant_salt=SALT)
        drawn: list[int] = []
        async for event in stub.Generate(
            worker_pb2.WorkerGenerateRequest(request=request, chain=nodes or []), timeout=30
        ):
            drawn += event.delta.tokens
        return drawn, event.result


async def durable(catalog: Process, fingerprint: str, tokens: list[int], end: int) -> list[catalog_pb2.Node]:
    """The chain up to `end`, once the catalog has all of it."""
    nodes: list[catalog_pb2.Node] = []
    async with grpc.aio.insecure_channel(catalog.target) as channel:
        stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call]
        lookup = catalog_pb2.LookupRequest(fingerprint=fingerprint, tenant_salt=SALT, tokens=tokens)
        try:
            async with asyncio.timeout(20):
                while not nodes or nodes[-1].chunk.end != end:
                    found = await stub.Lookup(lookup, timeout=5)
                    nodes = [*found.nodes, *([found.tail] if found.HasField("tail") else [])]
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"chunks end at {[node.chunk.end for node in nodes]}, not at {end}") from None
        return nodes


async def test_a_chat_goes_on_at_another_worker_and_after_a_kill(
    etcd_server: EtcdServer, s3_settings: dict[str, str], processes: list[Process], tmp_path: Path
) -> None:
    catalog = catalog_process(etcd_server.endpoint, s3_settings)
    cache = os.environ.get("SEGUE_TEST_MODEL_CACHE", str(tmp_path / "models"))
    workers = [
        worker_process(
            catalog, echo="false", model="tiny", cache_dir=cache, chunk_dir=str(tmp_path / f"chunks{number}"),
            kv_bytes="32MiB", device="cpu", threads="1", **s3_settings,
        )
        for number in range(2)
    ]  # fmt: skip
    processes += [catalog, *workers]
    catalog.start()
    await catalog.until_ready()
    # One after the other: the first makes the model.
    for worker in workers:
        worker.start()
        await worker.until_ready(60)
    one, two = workers

    first, result = await generate(one, "turn1", PROMPT)
    assert (result.usage.cached_tokens, result.usage.computed_tokens) == (0, 700)
    turn = [*PROMPT, *first, 9, 8, 7]
    here, result = await generate(one, "turn2", turn)
    assert (result.usage.cached_tokens, result.usage.computed_tokens) == (719, 4)

    async with grpc.aio.insecure_channel(one.target) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        fingerprint = (await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)).models[0].fingerprint
    nodes = await durable(catalog, fingerprint, turn[:-4], 704)
    there, result = await generate(two, "turn2-there", turn, nodes)
    assert there == here, "another worker continues with other tokens"
    assert (result.usage.restored_tokens, result.usage.computed_tokens) == (704, 19)
    # The first is still there: which of its disk and the object store was the cheaper, the measurements say.
    tiers = {part.tier for part in result.usage.restored_by_tier}
    assert tiers and tiers <= {common_pb2.TIER_PEER, common_pb2.TIER_OBJECT}

    one.kill(signal.SIGKILL)
    await asyncio.to_thread(one.wait)
    back = Process("worker", one.settings)
    processes.append(back.start())
    await back.until_ready(60)
    again, result = await generate(back, "turn2-back", turn, nodes)
    assert again == here
    assert [part.tier for part in result.usage.restored_by_tier] == [common_pb2.TIER_SSD]
    for worker in (back, two):
        worker.kill(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) == 0, worker.output
