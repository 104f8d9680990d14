"""What the demo asks the services themselves: is it durable, who is there, please drain. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio

from libs.continuation.chain import TAIL_TOKENS
from libs.continuation.tenancy import DEFAULT_TENANT, salt
from libs.contracts.segue.v1 import (
    catalog_pb2,
    catalog_pb2_grpc,
    common_pb2,
    router_pb2,
    router_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

_CALL_S = 5.0
_POLL_S = 0.05


class NotInTimeError(RuntimeError):
    """Something awaited did not come about."""

    def __init__(self, what: str, within: float) -> None:
        super().__init__(f"{what}: not within {within:g} s")


class Facts:
    """Calls to one cluster's catalog, router and workers."""

    def __init__(self, catalog: str, router: str, model: str, tenant_secret: str) -> None:
        self._model = model
        self._salt = salt(DEFAULT_TENANT, bytes.fromhex(tenant_secret))
        self._catalog_channel = grpc.aio.insecure_channel(catalog)
        self._router_channel = grpc.aio.insecure_channel(router)
        self.catalog = catalog_pb2_grpc.CatalogStub(self._catalog_channel)
        self.router = router_pb2_grpc.RouterStub(self._router_channel)

    async def aclose(self) -> None:
        await self._catalog_channel.close(None)
        await self._router_channel.close(None)

    async def durable(self, processed: Sequence[int], node: str | None = None, within: float = 60.0) -> float:
        """Waits until all of `processed` up to its last multiple of 16 is a catalog fact, and with `node` until that
        chunk directory has it too. Returns the wait in ms. Raises NotInTimeError.
        """
        reply = await self.catalog.ResolveName(catalog_pb2.ResolveNameRequest(name=self._model), timeout=_CALL_S)
        fingerprint = reply.models[0].fingerprint
        wanted = len(processed) - len(processed) % TAIL_TOKENS
        asked = catalog_pb2.LookupRequest(fingerprint=fingerprint, tenant_salt=self._salt, tokens=processed)
        began = time.perf_counter()
        while time.perf_counter() - began < within:
            found = await self.catalog.Lookup(asked, timeout=_CALL_S)
            nodes = [*found.nodes, found.tail] if found.HasField("tail") else list(found.nodes)
            end = nodes[-1].chunk.end if nodes else 0
            there = node is None or all(any(replica.node == node for replica in one.replicas) for one in nodes)
            if end >= wanted and there:
                return (time.perf_counter() - began) * 1e3
            await asyncio.sleep(_POLL_S)
        raise NotInTimeError(f"{wanted} tokens durable", within)

    async def worker_heard(self, worker: str, newer_than: int = 0, within: float = 120.0) -> router_pb2.WorkerStatus:
        """Waits until the router hears a listed, undrained worker process with an epoch above `newer_than`."""
        began = time.perf_counter()
        while time.perf_counter() - began < within:
            known = await self._workers()
            for status in known.workers:
                fresh = status.heartbeat.epoch > newer_than and status.endpoint.epoch == status.heartbeat.epoch
                if status.endpoint.worker == worker and fresh and status.listed and not status.heartbeat.draining:
                    return status
            await asyncio.sleep(_POLL_S)
        raise NotInTimeError(f"{worker} heard by the router with an epoch above {newer_than}", within)

    async def worker_gone(self, worker: str, within: float = 60.0) -> None:
        """Waits until the router would offer that worker nothing: unlisted, unheard or draining."""
        began = time.perf_counter()
        while time.perf_counter() - began < within:
            known = await self._workers()
            if not any(
                s.endpoint.worker == worker and s.listed and s.tunnels and not s.heartbeat.draining
                for s in known.workers
            ):
                return
            await asyncio.sleep(_POLL_S)
        raise NotInTimeError(f"{worker} gone for the router", within)

    async def resident(self, tokens: Sequence[int], within: float = 10.0) -> float:
        """Waits until the router would continue these tokens from device pages. Returns the wait in ms."""
        began = time.perf_counter()
        while time.perf_counter() - began < within:
            ranked = (await self.explain(tokens)).ranked
            if ranked and ranked[0].tier == common_pb2.TIER_GPU:
                return (time.perf_counter() - began) * 1e3
            await asyncio.sleep(_POLL_S)
        raise NotInTimeError(f"{len(tokens)} tokens known to be resident", within)

    async def explain(self, tokens: Sequence[int]) -> router_pb2.ExplainResponse:
        """How the router would route these tokens."""
        asked = router_pb2.ExplainRequest(model=self._model, tokens=tokens, max_new_tokens=16, tenant_salt=self._salt)
        reply: router_pb2.ExplainResponse = await self.router.Explain(asked, timeout=_CALL_S)
        return reply

    async def _workers(self) -> router_pb2.ListWorkersResponse:
        reply: router_pb2.ListWorkersResponse = await self.router.ListWorkers(
            router_pb2.ListWorkersRequest(), timeout=_CALL_S
        )
        return reply


async def drain(target: str, grace_ms: int = 20_000) -> worker_pb2.DrainResponse:
    """`Worker/Drain`."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        asked = worker_pb2.DrainRequest(grace_ms=grace_ms)
        reply: worker_pb2.DrainResponse = await stub.Drain(asked, timeout=grace_ms / 1e3 + 10)
        return reply


async def describe(target: str) -> worker_pb2.DescribeResponse:
    """`Worker/Describe`."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        reply: worker_pb2.DescribeResponse = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_CALL_S)
        return reply


def drop_from_page_cache(folder: Path) -> int:
    """Asks the kernel to forget every file under `folder`: the next read is from the disk. Returns their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                total += os.fstat(file.fileno()).st_size
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total
