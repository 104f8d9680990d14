"""A worker that is reached two ways, on 127.0.0.1 and on [::1]: one way lost is a cell-family missing, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2, router_pb2
from libs.controller.discovery import Rejection
from libs.pool.contours import Contour
from libs.tunnel import Registry
from tests.fixtures.attach_server import attach_server
from tests.router.fake_catalog import FINGERPRINT
from tests.router.fake_worker import LIMIT_S, ScriptedWorker
from tests.router.rig import Rig, eventually, request, running

CALM = {
    "offer_timeout_ms": 20_000, "pool_pick_mode": "round-robin", "pool_flap_s": 0, "pool_quarantine_s": 0.2,
    "worker_losses": 1,
}  # fmt: skip
LOOPBACK = {"ipv4": "127.0.0.1", "ipv6": "[::1]"}


class TwoWays(ScriptedWorker):
    """One process that listens on both loopbacks, each of which can be closed and opened again."""

    def __init__(self, name: str, registry: Registry) -> None:
        super().__init__(name, registry)
        self._ways: dict[str, grpc.aio.Server] = {}
        self._ports = dict.fromkeys(LOOPBACK, 0)

    def way(self, family: str) -> catalog_pb2.Endpoint:
        """As the map has it."""
        return catalog_pb2.Endpoint(
            worker=self.name, epoch=self.epoch, address=f"{LOOPBACK[family]}:{self._ports[family]}", family=family,
            models=[FINGERPRINT],
        )  # fmt: skip

    async def open(self, family: str) -> None:
        server = attach_server(self._attach)
        self._ports[family] = server.add_insecure_port(f"{LOOPBACK[family]}:{self._ports[family]}")
        self._ways[family] = server
        await server.start()

    async def close(self, family: str) -> None:
        await self._ways.pop(family).stop(None)

    async def kill(self) -> None:
        await super().kill()
        for family in tuple(self._ways):
            await self.close(family)


@asynccontextmanager
async def two_ways(rig: Rig) -> AsyncIterator[TwoWays]:
    """Listed, heard, with two tunnels each way."""
    async with Registry() as registry:
        worker = TwoWays("w0", registry)
        try:
            for family in LOOPBACK:
                await worker.open(family)
                rig.catalog.endpoints[f"w0 over {family}"] = worker.way(family)
            await rig.catalog.moved()
            await rig.heard(worker)
            await eventually(lambda: active(rig) == {"ipv4": 2, "ipv6": 2}, "two tunnels each way")
            yield worker
        finally:
            await worker.kill()


def active(rig: Rig) -> Counter[str]:
    """Active tunnels by family."""
    writers = rig.router.workers.pool.status().pool.writers
    return Counter(one.family for one in writers if one.contour is Contour.ACTIVE)


@pytest.mark.parametrize("lost", ["ipv4", "ipv6"])
async def test_one_family_lost_is_missing_costs_its_own_routes_a_resume_and_is_refilled(lost: str) -> None:
    async with running(**CALM) as rig, two_ways(rig) as worker:
        assert not (await rig.pool()).missing
        begun = []
        for _ in range(8):
            stream = await rig.ingress.submit(request(8, 6))
            job = await worker.next()
            job.accept()
            job.delta(1)
            await stream.until(1)
            begun.append((stream, job))
        await worker.close(lost)
        resumed = [await worker.next() for _ in range(4)]  # of eight, for four tunnels were taken in turn
        assert all(job.index == 1 for job in resumed)
        hit = {job.offer.request.request_id for job in resumed}
        await eventually(lambda: rig.metric("pool_missing_cell_families") == 1, "a cell-family is missing")
        pool = await rig.pool()
        assert [(one.cell, one.family) for one in pool.missing] == [(f"{FINGERPRINT}@", lost)]
        assert pool.readiness == "ready" and not pool.missing_cells
        for job in resumed:
            job.run()
        for stream, job in begun:
            if stream.request_id not in hit:
                job.finish()
        for stream, _ in begun:
            end = await stream.completed(6)
            assert (end.served.attempts, end.served.workers) == (1 + (stream.request_id in hit), ("w0",))
        for loss in ("process", "silence", "retired"):
            assert rig.metric("worker_losses_total", loss=loss) == 0
        worker.say()
        await eventually(lambda: heard(rig) == worker._sequence, "its heartbeats come the other way, if they have to")
        assert rig.router.observatory.registry.rejected[Rejection.OLD_SEQUENCE] == 0
        await worker.open(lost)
        await eventually(lambda: rig.metric("pool_missing_cell_families") == 0, "covered again")
        await eventually(lambda: min(active(rig)[family] for family in LOOPBACK) >= 2, "two tunnels each way")
        again = await rig.ingress.submit()
        (await worker.next()).run()
        await again.completed(4)


async def test_one_way_to_a_worker_is_drained_and_the_other_goes_on() -> None:
    async with running(**CALM) as rig, two_ways(rig) as worker:
        answer = await rig.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=LIMIT_S)
        assert [(one.endpoint.worker, one.tunnels) for one in answer.workers] == [("w0", 4)]
        one_way = router_pb2.DrainEndpointRequest(worker="w0", address=worker.way("ipv6").address)
        assert (await rig.stub.DrainEndpoint(one_way, timeout=LIMIT_S)).endpoints == 1
        await eventually(lambda: set(active(rig)) == {"ipv4"}, "no more tunnels over ipv6")
        stream = await rig.ingress.submit()
        (await worker.next()).run()
        await stream.completed(4)
        both = router_pb2.DrainEndpointRequest(worker="w0")
        assert (await rig.stub.DrainEndpoint(both, timeout=LIMIT_S)).endpoints == 2
        waiting = await rig.ingress.submit()
        await eventually(lambda: rig.router.shell.machine.waiting == 1, "nothing goes there")
        both.resume = True
        await rig.stub.DrainEndpoint(both, timeout=LIMIT_S)
        (await worker.next()).run()
        await waiting.completed(4)
        await eventually(lambda: min(active(rig)[family] for family in LOOPBACK) >= 2, "two tunnels each way")


def heard(rig: Rig) -> int:
    view = rig.router.observatory.fleet.view("w0")
    return view.heartbeat.sequence if view is not None else 0
