"""Mutual TLS with several tunnels to each worker: every one of them, also one dialled again, and the calls that go
round them, lead to whom the certificate names, wherever that one listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.contracts.segue.v1 import catalog_pb2
from libs.controller.protocol import ErrorDelivery, StatusCode
from libs.tunnel import CloseReason
from tests.router.direct import by_hand
from tests.router.fake_catalog import FINGERPRINT
from tests.router.fake_worker import Job, scripted_worker
from tests.router.pki import Authority
from tests.router.rig import Rig, eventually, request, running

CALM = {"offer_timeout_ms": 20_000, "pool_pick_mode": "round-robin", "pool_flap_s": 0}
"""No offer is given up for a machine that is busy; tunnels are taken in turn; no endpoint rests for having flapped."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


async def tunnels(rig: Rig) -> dict[str, int]:
    """Active ones, by worker."""
    return {one.worker: one.active for one in (await rig.pool()).endpoints}


async def refused(rig: Rig, more: int = 3) -> None:
    """So many more dials have failed."""
    before = rig.metric("pool_dial_failures_total")
    await eventually(lambda: rig.metric("pool_dial_failures_total") >= before + more, "dials that fail")


async def test_both_tunnels_of_a_worker_are_to_the_name_it_claims(authority: Authority) -> None:
    async with running(None, None, identity=authority, **CALM) as rig:
        await eventually(lambda: rig.metric("pool_writers", contour="active") == 4, "two tunnels to each")
        for worker in rig.workers:
            assert len(worker.tunnels) == 2
        streams = [await rig.ingress.submit(request(8, 3)) for _ in range(8)]
        await eventually(lambda: sum(len(worker.jobs) for worker in rig.workers) == 8, "all offered")
        for worker in rig.workers:
            assert {job.route.tunnel_id for job in worker.jobs} == {one.tunnel_id for one in worker.tunnels}
            for job in worker.jobs:
                job.run()
        for stream in streams:
            await stream.completed(3)
        rig.worker.tunnels[0].close(CloseReason.PEER_LOST)
        await eventually(lambda: len(rig.worker.tunnels) == 3, "dialled again")
        await eventually(lambda: rig.metric("pool_writers", contour="active") == 4, "two tunnels to each")
        assert rig.metric("pool_dial_failures_total") == 0


async def test_who_shows_another_workers_certificate_gets_none_of_its_tunnels(authority: Authority) -> None:
    async with (
        running(Job.run, identity=authority, **CALM) as rig,
        scripted_worker("w1", Job.run, transport=authority("w0")) as false,
    ):
        await rig.catalog.put(false.endpoint)
        await refused(rig)
        for _ in range(4):
            await (await rig.ingress.submit()).completed(4)
        assert not false.tunnels and not false.jobs
        assert rig.router.observatory.registry.record("w1") is None
        assert (await tunnels(rig))["w1"] == 0
        await false.kill()
        false.transport = authority("w1")
        await false.start()
        await eventually(lambda: len(false.tunnels) == 2, "two tunnels, now that it shows its own")


async def test_an_address_that_has_come_to_another_worker_is_given_nothing(authority: Authority) -> None:
    """The map is behind: where w0 listened, w1 does. Both tunnels are dialled again and again, in vain."""
    async with running(None, identity=authority, **CALM) as rig:
        await eventually(lambda: rig.metric("pool_writers", contour="active") == 2, "two tunnels")
        before = len(rig.worker.tunnels)
        await rig.worker.kill()
        rig.worker.transport = authority("w1")
        await rig.worker.start()
        stream = await rig.ingress.submit()
        await refused(rig, 6)
        assert len(rig.worker.tunnels) == before and not rig.worker.jobs
        await rig.worker.kill()
        rig.worker.transport = authority("w0")
        await rig.worker.restart()
        (await rig.worker.next()).run()
        await stream.completed(4)
        await eventually(lambda: rig.metric("pool_writers", contour="active") == 2, "two tunnels")


@pytest.mark.parametrize(("shown", "served"), [("w9", True), ("w0", False)])
async def test_a_call_round_the_pool_is_to_that_name_too(authority: Authority, shown: str, served: bool) -> None:
    async with (
        by_hand(authority(shown)) as (worker, address),
        running(pool_no_coverage="direct", attempts=2, identity=authority, **CALM) as rig,
    ):
        await rig.catalog.put(
            catalog_pb2.Endpoint(worker="w9", epoch=1, address=address, family="ipv4", models=[FINGERPRINT])
        )
        await eventually(lambda: bool(rig.router.endpoints.endpoints), "listed")
        stream = await rig.ingress.submit(request(8, 5))
        if served:
            assert (await stream.completed(5)).served.workers == ("w9",)
            return
        end = await stream.end()
        assert isinstance(end, ErrorDelivery) and end.code is StatusCode.UNAVAILABLE
        assert not worker.asked and rig.metric("direct_calls_total") == 2


async def test_a_router_without_a_certificate_of_the_authority_gets_no_tunnel(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    async with (
        running(identity=stranger, **CALM) as rig,
        scripted_worker("w0", Job.run, transport=authority("w0")) as worker,
    ):
        await rig.catalog.put(worker.endpoint)
        await refused(rig)
        assert not worker.tunnels
