"""The endpoint map: workers come, vanish, return, restart; the catalog goes away. Tunnels follow, healthy ones last."""

from __future__ import annotations

from libs.controller.protocol import CompletedDelivery, ResultStatus
from libs.tunnel import CloseReason
from tests.router.fake_worker import Job, scripted_worker
from tests.router.rig import eventually, request, running


async def test_a_worker_that_vanishes_and_returns_keeps_its_tunnel() -> None:
    async with running(Job.run) as rig:
        worker = rig.worker
        await rig.catalog.remove("w0")
        await eventually(lambda: rig.metric("pool_map_empty_refused_seconds") > 0, "an empty map is not taken")
        assert rig.metric("map_endpoints") == 0
        # Kept, and used.
        await (await rig.ingress.submit()).completed(4)
        await rig.catalog.put(worker.endpoint)
        await eventually(lambda: rig.metric("pool_map_empty_refused_seconds") == 0, "listed again")
        await (await rig.ingress.submit()).completed(4)
        assert len(worker.tunnels) == 2 and not any(tunnel.closed for tunnel in worker.tunnels)


async def test_past_the_grace_a_vanished_worker_drains_and_is_retired_and_not_lost() -> None:
    short = {"endpoint_grace_s": 0.3, "pool_drain_ttl_s": 0.4, "pool_force_close_s": 0.4}
    async with running(None, None, worker_losses=1, **short) as rig:
        stream = await rig.ingress.submit()
        await eventually(lambda: any(worker.jobs for worker in rig.workers), "offered")
        hit = next(worker for worker in rig.workers if worker.jobs)
        other = next(worker for worker in rig.workers if worker is not hit)
        job = hit.jobs[0]
        job.accept()
        job.delta(1)
        await stream.until(1)
        await rig.catalog.remove(hit.name)
        await eventually(lambda: rig.metric("pool_writers", contour="draining") > 0, "draining")
        assert job.closed is None
        # Nothing new goes there.
        (await rig.ingress.submit()).cancel()
        (await other.next()).result(ResultStatus.CANCELLED)
        resumed = await other.next()  # only the end of the drain can bring it there
        resumed.run()
        end = await stream.completed(4)
        assert end.served.workers == (hit.name, other.name)
        await eventually(lambda: all(tunnel.closed for tunnel in hit.tunnels), "both tunnels")
        assert {tunnel.closed.reason for tunnel in hit.tunnels if tunnel.closed} == {CloseReason.RETIRED}
        await eventually(lambda: rig.metric("worker_losses_total", loss="retired") == 1, "retired")
        assert rig.metric("worker_losses_total", loss="process") == 0
        # It is not dialled again, until it is listed again.
        assert len(hit.tunnels) == 2
        await rig.catalog.put(hit.endpoint)
        await rig.heard(*rig.workers)
        await eventually(lambda: len(hit.tunnels) == 4, "dialled again")


async def test_a_worker_that_vanished_is_redialled_within_the_grace() -> None:
    async with running(None, None) as rig:
        await rig.catalog.remove("w0")
        await eventually(lambda: rig.metric("pool_endpoints", state="vanished") == 1, "unlisted")
        await rig.worker.restart()
        await rig.heard(*rig.workers)
        assert rig.router.observatory.registry.record("w0") is not None


async def test_a_worker_that_left_in_order_is_redialled_only_when_listed() -> None:
    async with running(None, None) as rig:
        await rig.catalog.remove("w0")
        await eventually(lambda: rig.metric("pool_endpoints", state="vanished") == 1, "unlisted")
        for tunnel in rig.worker.tunnels:
            tunnel.close(CloseReason.SHUTDOWN)
        await eventually(lambda: rig.metric("pool_endpoints", state="vanished") == 0, "given up")
        assert rig.metric("pool_endpoints", state="listed") == 1
        dialled = len(rig.worker.tunnels)
        await rig.catalog.put(rig.worker.endpoint)
        await rig.heard(*rig.workers)
        await eventually(lambda: len(rig.worker.tunnels) == dialled + 2, "dialled again")


async def test_a_restarted_worker_under_the_same_address_is_a_new_process() -> None:
    async with running(None) as rig:
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        job.accept()
        job.delta(2)
        await stream.until(2)
        await rig.worker.restart()
        # The map still names the old epoch: the heartbeat tells.
        await rig.heard(rig.worker)
        (await rig.worker.next()).run()
        end = await stream.completed(4)
        assert end.served.epoch == 2 and end.served.attempts == 2
        await rig.catalog.put(rig.worker.endpoint)
        again = await rig.ingress.submit()
        (await rig.worker.next()).run()
        await again.completed(4)
        await eventually(lambda: rig.metric("pool_writers", contour="active") == 2, "two tunnels")


async def test_a_new_epoch_in_the_map_outranks_a_tunnel_that_hangs() -> None:
    """The old process's host was cut off: nothing breaks, nothing comes. Its successor has its address."""
    async with running(None) as rig:
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        job.accept()
        rig.worker.epoch = 2  # who answers the next connection
        await rig.catalog.put(rig.worker.endpoint)
        await rig.heard(rig.worker)
        old, new = rig.worker.tunnels[:2], rig.worker.tunnels[2:]
        await eventually(lambda: all(tunnel.closed for tunnel in old), "both old tunnels")
        assert {tunnel.closed.reason for tunnel in old if tunnel.closed} == {CloseReason.RETIRED}
        assert any(tunnel.closed is None for tunnel in new)
        (await rig.worker.next()).run()
        end = await stream.completed(4)
        # One more if the second old tunnel was tried while only the first had been given up.
        assert end.served.epoch == 2 and end.served.attempts in (2, 3)
        assert rig.metric("worker_losses_total", loss="process") == 1


async def test_a_worker_that_cannot_be_reached_is_dialled_until_it_can() -> None:
    async with running() as rig, scripted_worker("late", Job.run) as late:
        await late.kill()
        await rig.catalog.put(late.endpoint)
        await eventually(lambda: rig.metric("pool_dials_total") >= 3, "several dials")
        stream = await rig.ingress.submit()
        await late.start()
        assert isinstance(await stream.end(), CompletedDelivery)
        assert len(set(late.routers)) == 1 and late.routers[0]


async def test_the_catalog_away_serving_goes_on() -> None:
    async with running(Job.run) as rig:
        await (await rig.ingress.submit()).completed(4)
        await rig.catalog.stop()
        await eventually(lambda: rig.metric("map_connected") == 0, "stream ended")
        for _ in range(3):
            await (await rig.ingress.submit()).completed(4)
        # A name that was never heard of has to wait for it.
        rig.catalog.names["new"] = rig.catalog.names["m"]
        waiting = await rig.ingress.submit(request(model="new"))
        await eventually(lambda: rig.router.shell.machine.waiting == 1, "waiting for the catalog")
        # It returns, at first without a worker.
        kept = rig.catalog.endpoints.pop("w0")
        await rig.catalog.start()
        await eventually(lambda: rig.metric("pool_map_empty_refused_seconds") > 0, "empty map")
        await waiting.completed(4)
        await rig.catalog.put(kept)
        await eventually(lambda: rig.metric("pool_map_empty_refused_seconds") == 0, "listed again")
        assert len(rig.worker.tunnels) == 2 and not any(tunnel.closed for tunnel in rig.worker.tunnels)


async def test_tunnels_of_a_router_are_one_pair_and_the_elected_one_is_asked_for_a_snapshot() -> None:
    async with running(None) as rig:
        await eventually(lambda: rig.worker.snapshots_asked == 1, "snapshot asked")
        await eventually(lambda: len(rig.worker.routers) == 2, "both tunnels")
        for tunnel in rig.worker.tunnels:
            tunnel.close(CloseReason.IDLE)
        await eventually(lambda: len(rig.worker.routers) == 4, "redialled")
        assert len(set(rig.worker.routers)) == 1
        await rig.heard(rig.worker)
