"""Several tunnels to each worker, live: one lost, the elected one lost, drains, swaps, policy changes, no cover."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.contracts.segue.v1 import catalog_pb2, router_pb2
from libs.controller.discovery import Rejection
from libs.controller.protocol import ErrorDelivery, StatusCode
from libs.controller.router_effects import Outcome
from libs.pool.knobs import PoolPolicy
from libs.service.errors import read_error
from libs.tunnel import CloseReason
from services.router.pool_settings import PREFIX, PoolSettings
from services.router.settings import RouterSettings
from tests.router.direct import by_hand
from tests.router.fake_catalog import FINGERPRINT
from tests.router.fake_worker import LIMIT_S, Job, ScriptedWorker, scripted_worker
from tests.router.rig import Rig, Stream, eventually, request, running, status

CALM = {"offer_timeout_ms": 20_000, "pool_pick_mode": "round-robin"}
"""No offer is given up for a machine that is busy; the tunnels of a worker are taken in turn."""


async def set_policy(rig: Rig, **knobs: str) -> Any:
    return await rig.stub.SetPoolPolicy(router_pb2.SetPoolPolicyRequest(knobs=knobs), timeout=LIMIT_S)


async def both_tunnels(rig: Rig) -> None:
    active = 2 * len(rig.workers)
    await eventually(lambda: rig.metric("pool_writers", contour="active") == active, "two tunnels to each worker")


async def begun(rig: Rig, worker: ScriptedWorker, count: int, tokens: int = 6) -> list[tuple[Stream, Job]]:
    """Streams that run at this worker, one token each so far."""
    found = []
    for _ in range(count):
        stream = await rig.ingress.submit(request(8, tokens))
        job = await worker.next()
        job.accept()
        job.delta(1)
        await stream.until(1)
        found.append((stream, job))
    return found


def tunnel_of(worker: ScriptedWorker, job: Job) -> Any:
    return next(tunnel for tunnel in worker.tunnels if tunnel.tunnel_id == job.route.tunnel_id)


async def test_one_lost_tunnel_of_two_resumes_its_own_routes_and_no_others() -> None:
    async with running(None, worker_losses=1, **CALM) as rig:
        await both_tunnels(rig)
        worker = rig.worker
        running_there = await begun(rig, worker, 4)
        broken = tunnel_of(worker, running_there[0][1])
        hit = [one for one in running_there if tunnel_of(worker, one[1]) is broken]
        spared = [one for one in running_there if one not in hit]
        assert len(hit) == len(spared) == 2, "the tunnels are taken in turn"
        broken.close(CloseReason.PEER_LOST)
        resumed = [await worker.next() for _ in hit]
        assert all(job.index == 1 for job in resumed)
        for job in (*resumed, *(job for _, job in spared)):
            if job in resumed:
                job.accept()
            job.finish()
        for stream, _ in hit:
            end = await stream.completed(6)
            assert (end.served.attempts, end.served.workers) == (2, ("w0",))
        for stream, _ in spared:
            assert (await stream.completed(6)).served.attempts == 1
        for loss in ("process", "silence", "retired"):
            assert rig.metric("worker_losses_total", loss=loss) == 0
        await both_tunnels(rig)


async def test_a_route_lost_with_the_first_tunnel_of_a_dying_process_is_lost_with_its_worker() -> None:
    """Its tunnels break one after the other: one loss, which counts against the prompt, and one resume, elsewhere."""
    async with running(None, None, **CALM) as rig:
        await both_tunnels(rig)
        rig.router.assignments.settle_s = LIMIT_S
        stream = await rig.ingress.submit(request(8, 6))
        await eventually(lambda: sum(len(worker.jobs) for worker in rig.workers) == 1, "an offer")
        dying = next(worker for worker in rig.workers if worker.jobs)
        other = next(worker for worker in rig.workers if worker is not dying)
        job = await dying.next()
        job.accept()
        job.delta(1)
        await stream.until(1)

        def broken() -> float:
            return rig.metric("tunnels_closed_total", peer="worker", reason="peer_lost")

        before = broken()
        tunnel_of(dying, job).close(CloseReason.PEER_LOST)
        await eventually(lambda: broken() > before, "the router sees the first one break")
        assert (len(dying.jobs), len(other.jobs)) == (1, 0), "not resumed while the process may be dying"
        await dying.kill()
        resumed = await other.next()
        assert resumed.index == 1
        resumed.run()
        assert (await stream.completed(6)).served.attempts == 2
        assert rig.metric("worker_losses_total", loss="process") == 1
        assert [one.attempts[-1].outcome for one in rig.router.decisions.newest] == [
            Outcome.WORKER_LOST,
            Outcome.COMPLETED,
        ]


async def test_heartbeats_stay_single_through_the_loss_of_the_elected_tunnel() -> None:
    async with running(None) as rig:
        await both_tunnels(rig)
        worker = rig.worker
        for _ in range(3):
            before = worker._elected
            assert before is not None
            before[1].close(CloseReason.PEER_LOST)

            def another(term: int = before[0]) -> bool:
                return worker._elected is not None and worker._elected[0] > term

            await eventually(another, "another tunnel is elected")
            worker.say()

            def heard() -> bool:
                view = rig.router.observatory.fleet.view("w0")
                return view is not None and view.heartbeat.sequence == worker._sequence

            await eventually(heard, "its heartbeats count")
            await both_tunnels(rig)
        assert rig.router.observatory.registry.rejected[Rejection.OLD_SEQUENCE] == 0
        assert rig.metric("worker_losses_total", loss="process") == 0 and rig.metric("workers") == 1


@pytest.mark.parametrize(
    "comes", ["the heartbeat", "the loss of its tunnel", "another election", "the loss of the process", "nothing"]
)
async def test_a_result_that_overtakes_the_heartbeat_before_it_waits_for_it(comes: str) -> None:
    """The next turn, sent at once, must find what the worker kept. A heartbeat that cannot come is not waited for."""
    async with running(None, **CALM) as rig:
        await both_tunnels(rig)
        worker, order = rig.worker, rig.router.observatory.order
        order.patience_s = LIMIT_S
        job = (await begun(rig, worker, 1))[0]  # it stops after one token of six
        if comes == "nothing":
            order.patience_s = 0.01
        job[1].result(heartbeat=worker._sequence + 1)
        if comes != "nothing":
            await eventually(lambda: len(order) == 1, "kept")
            assert rig.metric("requests_total", outcome="completed") == 0
        if comes == "the heartbeat":
            worker.say()
        elif comes == "the loss of its tunnel":
            tunnel_of(worker, job[1]).close(CloseReason.PEER_LOST)
            await eventually(lambda: sum(not tunnel.closed for tunnel in worker.tunnels) == 2, "dialled again")
            worker.say()
        elif comes == "another election":
            assert worker._elected is not None
            worker._elected[1].close(CloseReason.PEER_LOST)
        elif comes == "the loss of the process":
            await worker.kill()
        assert (await job[0].completed(1)).served.attempts == 1
        assert not len(order)


async def test_tunnels_that_outrun_the_map_are_tunnels_to_the_new_process() -> None:
    """Both are dialled again before the map knows of the restart: also the one that is not elected joins the pair."""
    async with running(None) as rig:
        await both_tunnels(rig)
        await rig.worker.restart()
        await rig.heard(rig.worker)

        def paired() -> bool:
            record = rig.router.observatory.registry.record("w0")
            return record is not None and record.epoch == 2 and len(record.tunnels) == 2

        await eventually(paired, "both are known to lead to it")
        known = {writer.epoch for writer in (await rig.pool()).writers if not writer.closing}
        assert known == {2}


async def test_an_endpoint_is_drained_under_load_and_taken_back() -> None:
    async with running(None, None, **CALM) as rig:
        await both_tunnels(rig)
        first, second = rig.workers
        streams = [await rig.ingress.submit(request(8, 4)) for _ in range(8)]
        await eventually(lambda: sum(len(worker.jobs) for worker in rig.workers) == 8, "all offered")
        for job in (*first.jobs, *second.jobs):
            job.accept()
            job.delta(1)
        for stream in streams:
            await stream.until(1)
        here = list(first.jobs)
        assert here and second.jobs
        answer = await rig.stub.DrainEndpoint(router_pb2.DrainEndpointRequest(worker="w0"), timeout=LIMIT_S)
        assert (answer.endpoints, answer.routes) == (1, len(here))
        late = [await rig.ingress.submit(request(8, 1)) for _ in range(6)]
        await eventually(lambda: len(second.jobs) + len(here) == 14, "all offered to the other")
        assert first.jobs == here
        shown = {one.worker: one for one in (await rig.pool()).endpoints}
        assert shown["w0"].drained and not shown["w1"].drained
        for job in second.jobs[-6:]:
            job.run()
        for stream in late:
            await stream.completed(1)
        assert not any(tunnel.closed for tunnel in first.tunnels if tunnel.routes)
        for job in (*here, *second.jobs[:-6]):
            job.finish()
        for stream in streams:
            assert (await stream.completed(4)).served.attempts == 1
        await eventually(lambda: all(tunnel.closed for tunnel in first.tunnels), "its tunnels close once empty")
        assert rig.metric("worker_losses_total", loss="process") == 0
        await rig.stub.DrainEndpoint(router_pb2.DrainEndpointRequest(worker="w0", resume=True), timeout=LIMIT_S)
        await both_tunnels(rig)
        first.load = replace(first.load, queue_ms=1)

        def back() -> bool:
            first.say()  # as workers do, again and again
            view = rig.router.observatory.fleet.view("w0")
            return view is not None and view.load.queue_ms == 1

        await eventually(back, "heard on a tunnel of its own again")
        await busy(rig, second)
        again = await rig.ingress.submit(request(8, 1))
        await eventually(lambda: len(first.jobs) == len(here) + 1, "offered there again")
        first.jobs[-1].run()
        await again.completed(1)


async def test_a_drain_of_nobody_is_an_error() -> None:
    async with running(None) as rig:
        for asked in (
            router_pb2.DrainEndpointRequest(worker="nobody"),
            router_pb2.DrainEndpointRequest(worker="w0", address="192.0.2.1:1"),
            router_pb2.DrainEndpointRequest(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.stub.DrainEndpoint(asked, timeout=LIMIT_S)
            assert status(caught) is grpc.StatusCode.NOT_FOUND
            assert read_error(caught.value).reason == "UNKNOWN_ENDPOINT"


async def swapped(rig: Rig) -> None:
    before = (await rig.pool()).generation
    wanted = await rig.stub.SwapGeneration(router_pb2.SwapGenerationRequest(), timeout=LIMIT_S)
    assert wanted.generation > before
    await eventually(lambda: rig.metric("pool_generation") >= wanted.generation, "committed")


async def test_a_swap_lets_routes_drain() -> None:
    async with running(None, **CALM) as rig:
        await both_tunnels(rig)
        old = list(rig.worker.tunnels)
        running_there = await begun(rig, rig.worker, 4)
        await swapped(rig)
        assert not any(tunnel.closed for tunnel in old) and rig.metric("pool_writers", contour="draining") == 2
        newer = await begun(rig, rig.worker, 2)
        assert not {tunnel_of(rig.worker, job).tunnel_id for _, job in newer} & {tunnel.tunnel_id for tunnel in old}
        for stream, job in (*running_there, *newer):
            job.finish()
            assert (await stream.completed(6)).served.attempts == 1
        await eventually(lambda: all(tunnel.closed for tunnel in old), "closed once empty")
        assert {tunnel.closed.reason for tunnel in old if tunnel.closed} == {CloseReason.RETIRED}


async def test_a_swap_that_closes_what_it_covers_resumes_it_unaltered() -> None:
    async with running(None, worker_losses=1, **CALM) as rig:
        await both_tunnels(rig)
        await set_policy(rig, close_covered="true")
        running_there = await begun(rig, rig.worker, 4)
        await swapped(rig)
        resumed = [await rig.worker.next() for _ in running_there]
        for job in resumed:
            assert job.index == 1
            job.run()
        for stream, old in running_there:
            assert (await stream.completed(6)).served.attempts == 2
            await asyncio.wait_for(old.ended.wait(), LIMIT_S)
        assert rig.metric("worker_losses_total", loss="process") == 0
        assert (await rig.pool()).policy["close_covered"] == "true"


async def test_policy_changes_live_all_or_nothing() -> None:
    async with running(None, **CALM) as rig:
        await both_tunnels(rig)
        ((stream, job),) = await begun(rig, rig.worker, 1)
        answer = await set_policy(rig, writers_per_endpoint="4", stale_mode="never", required_cells="a@z, b@z")
        assert answer.policy["writers_per_endpoint"] == "4" and answer.policy["required_cells"] == "a@z,b@z"
        await eventually(lambda: rig.metric("pool_writers", contour="active") == 4, "four tunnels")
        job.finish()
        assert (await stream.completed(6)).served.attempts == 1
        for knobs, words in (
            ({"writers_per_endpiont": "2"}, "writers_per_endpoint"),
            ({"stale_mode": "sometimes"}, "ttl"),
            ({"probes": "maybe"}, "true or false"),
            ({"pick_sample": "1.5"}, "whole number"),
            ({"idle_s": "soon"}, "a number"),
            ({"idle_s": "nan"}, "idle_s"),
            ({"writers_per_endpoint": "3", "hold_max": "-1"}, "hold_max"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await set_policy(rig, **knobs)
            assert status(caught) is grpc.StatusCode.INVALID_ARGUMENT and words in (caught.value.details() or "")
            assert read_error(caught.value).values["knob"] in knobs
        assert (await rig.pool()).policy["writers_per_endpoint"] == "4"
        await set_policy(rig, required_cells="")


async def test_the_pool_is_shown() -> None:
    async with running(None, None, **CALM) as rig:
        await both_tunnels(rig)
        await busy(rig, rig.workers[1])
        ((stream, job),) = await begun(rig, rig.workers[0], 1)
        shown = await rig.pool()
        assert (shown.readiness, shown.generation, shown.routes, shown.held) == ("ready", 1, 1, 0)
        assert shown.cells == {f"{FINGERPRINT}@": 4}
        assert [(one.worker, one.active, one.floor, one.listed) for one in shown.endpoints] == [
            ("w0", 2, 2, True), ("w1", 2, 2, True),
        ]  # fmt: skip
        assert {(one.contour, one.family, one.epoch) for one in shown.writers} == {("active", "ipv4", 1)}
        assert sum(one.routes for one in shown.writers) == 1
        assert set(shown.policy) == {field.name for field in fields(PoolPolicy)}
        assert shown.map.hash == shown.map.committed_hash and not shown.HasField("pending")
        job.finish()
        await stream.completed(6)


async def busy(rig: Rig, worker: ScriptedWorker) -> None:
    """Nobody who can help it goes there."""
    worker.load = replace(worker.load, queue_ms=60_000)
    worker.say()

    def told() -> bool:
        view = rig.router.observatory.fleet.view(worker.name)
        return view is not None and view.load.queue_ms == 60_000

    await eventually(told, f"{worker.name} is known to be busy")


# --- readiness, and no cover at all ---


def readyz(rig: Rig) -> str:
    return rig.service.metrics._answer("GET /readyz HTTP/1.1", {})[2].decode().strip()


async def test_the_router_is_ready_when_its_pool_is_and_says_why_not() -> None:
    async with running() as rig, scripted_worker("late") as late:
        assert readyz(rig) == "not ready: no worker is in the endpoint map"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.SwapGeneration(router_pb2.SwapGenerationRequest(), timeout=LIMIT_S)
        assert status(caught) is grpc.StatusCode.FAILED_PRECONDITION
        await late.kill()
        await rig.catalog.put(late.endpoint)
        await eventually(lambda: readyz(rig).startswith("not ready: no tunnel to the workers"), "starting")
        assert FINGERPRINT in readyz(rig)
        await late.start()
        await eventually(lambda: readyz(rig) == "ready", "ready")
        await late.kill()
        await eventually(lambda: readyz(rig).startswith("not ready: the tunnels to the workers are lost"), "lost")


@pytest.mark.parametrize("knobs", [{"pool_no_coverage": "fail"}, {"pool_no_coverage_wait_s": 0.3}])
async def test_a_request_without_cover_is_answered_in_the_policys_time(knobs: dict[str, Any]) -> None:
    async with running(**knobs) as rig:
        end = await (await rig.ingress.submit()).end()
        assert isinstance(end, ErrorDelivery) and end.code is StatusCode.UNAVAILABLE and end.retry_after_ms > 0
        assert "no worker can be reached" in end.message
        assert len(rig.router.uncovered) == 0 and rig.metric("uncovered_refused_total") == 1


async def test_no_more_requests_are_held_than_policy_says() -> None:
    async with running(pool_no_coverage_wait_s=LIMIT_S, pool_hold_max=2) as rig:
        held = [await rig.ingress.submit() for _ in range(2)]
        await eventually(lambda: len(rig.router.uncovered) == 2, "held")
        end = await (await rig.ingress.submit()).end()
        assert isinstance(end, ErrorDelivery) and end.code is StatusCode.UNAVAILABLE and end.retry_after_ms > 0
        assert len(rig.router.uncovered) == 2
        for stream in held:
            stream.cancel()
            await stream.end()


async def test_a_held_request_goes_on_when_a_worker_comes_and_one_that_left_is_forgotten() -> None:
    async with running(pool_no_coverage_wait_s=LIMIT_S) as rig, scripted_worker("late", Job.run) as late:
        stream, gone = await rig.ingress.submit(), await rig.ingress.submit()
        await eventually(lambda: len(rig.router.uncovered) == 2, "held")
        gone.cancel()
        await gone.end()
        await rig.catalog.put(late.endpoint)
        await stream.completed(4)


async def test_direct_a_request_goes_round_the_pool_and_is_resumed_like_any_other() -> None:
    async with by_hand() as (worker, address), running(pool_no_coverage="direct", **CALM) as rig:
        endpoint = catalog_pb2.Endpoint(
            worker="w9", epoch=1, address=address, family="ipv4", models=[FINGERPRINT], node="n9"
        )
        await rig.catalog.put(endpoint)
        await eventually(lambda: bool(rig.router.endpoints.endpoints), "listed")
        stream = await rig.ingress.submit(request(8, 5))
        end = await stream.completed(5)
        assert (end.served.workers, end.served.attempts) == (("w9",), 2)
        assert [len(asked.request.tokens) for asked in worker.asked] == [8, 10]
        assert rig.metric("direct_calls_total") == 2


async def test_direct_a_drained_worker_is_not_called_either() -> None:
    async with by_hand() as (worker, address), running(pool_no_coverage="direct", **CALM) as rig:
        endpoint = catalog_pb2.Endpoint(worker="w9", epoch=1, address=address, family="ipv4", models=[FINGERPRINT])
        await rig.catalog.put(endpoint)
        asked = router_pb2.DrainEndpointRequest(worker="w9")

        def listed() -> bool:
            return any(one.key.worker == "w9" for one in rig.router.workers.pool.status().pool.endpoints)

        await eventually(listed, "in effect")
        await rig.stub.DrainEndpoint(asked, timeout=LIMIT_S)
        stream = await rig.ingress.submit(request(8, 5))
        await eventually(lambda: len(rig.router.uncovered) == 1, "held")
        assert not worker.asked
        asked.resume = True
        await rig.stub.DrainEndpoint(asked, timeout=LIMIT_S)
        await stream.completed(5)


async def test_who_is_held_hears_of_another_policy_and_another_map_at_once() -> None:
    async with by_hand() as (_, address), running(pool_no_coverage_wait_s=10 * LIMIT_S, **CALM) as rig:
        held = [await rig.ingress.submit(request(8, 5)) for _ in range(2)]
        await eventually(lambda: len(rig.router.uncovered) == 2, "held")
        await set_policy(rig, no_coverage="fail")
        for stream in held:
            assert isinstance(await stream.end(), ErrorDelivery)
        await set_policy(rig, no_coverage="direct")
        stream = await rig.ingress.submit(request(8, 5))
        await eventually(lambda: len(rig.router.uncovered) == 1, "held, for nobody is in the map")
        await rig.catalog.put(
            catalog_pb2.Endpoint(worker="w9", epoch=1, address=address, family="ipv4", models=[FINGERPRINT])
        )
        await stream.completed(5)


# --- settings ---


def test_every_knob_of_the_pool_is_a_setting() -> None:
    knobs = {field.name for field in fields(PoolPolicy)} - {"vanish_grace_s"}
    assert {name.removeprefix(PREFIX) for name in PoolSettings.model_fields if name.startswith(PREFIX)} == knobs
    settings = RouterSettings(catalog="127.0.0.1:1", endpoint_grace_s=7, pool_writers_per_endpoint=3, pool_cores=2)
    policy = settings.pool_policy()
    assert (policy.vanish_grace_s, policy.writers_per_endpoint, policy.cores) == (7, 3, 2)


def test_every_setting_of_the_pool_is_documented_with_its_default() -> None:
    text = Path(RouterSettings.__module__.replace(".", "/")).with_name("README.md").read_text()
    for name, info in PoolSettings.model_fields.items():
        if name.startswith(PREFIX):
            (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` | ")]
            default = row.split(" | ")[1]
            if isinstance(info.default, float | int) and not isinstance(info.default, bool):
                assert float(default) == info.default, name
            else:
                shown = {(): "none", True: "true", False: "false"}.get(info.default, str(info.default))
                assert default == shown, name


def test_a_policy_that_cannot_be_is_refused_with_the_setting_named() -> None:
    with pytest.raises(ValueError, match="pool_idle_writers_per_endpoint"):
        RouterSettings(catalog="127.0.0.1:1", pool_idle_writers_per_endpoint=3)
