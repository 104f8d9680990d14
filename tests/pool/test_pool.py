"""The pool's shell on real sockets: echo workers that are killed, leave and come back."""

import asyncio
from dataclasses import replace

import pytest

from libs.pool.contours import Contour
from libs.pool.errors import GoDirectError, NoCoverageError, PoolClosingError
from libs.pool.knobs import NoCoverage
from libs.pool.model import CellTarget, Target, WorkerTarget
from libs.pool.readiness import Refusal, State
from libs.tunnel import CloseReason, Route, RouteClosedError, TooManyRoutesError
from tests.pool.rig import CALM, Rig, rig
from tests.tunnel.harness import LIMIT_S


async def echo(made: Rig, target: Target, payload: bytes = b"hello") -> Route:
    route = await made.pool.bind(target, payload, made.seen.on_closed)
    assert await route.receive(LIMIT_S) == payload
    return route


async def test_binds_to_the_chosen_worker_and_leaves_nothing() -> None:
    async with rig(3) as made:
        await made.full()
        by_tunnel = {writer.tunnel.tunnel_id: writer.endpoint.worker for writer in made.pool.writers()}
        for worker in made.workers:
            route = await echo(made, WorkerTarget(worker.name))
            assert by_tunnel[route.tunnel_id] == worker.name
            route.close()
        routes = [await echo(made, CellTarget("A")) for _ in range(24)]
        assert len({route.tunnel_id for route in routes}) == 6
        for route in routes:
            route.try_send(b"bye")
        await made.assert_rest()
        assert [len(closes) for closes in made.seen.closes.values()] == [1] * 27


async def test_a_killed_worker_is_told_once_replaced_and_redialled() -> None:
    async with rig(2) as made:
        await made.full()
        victim = made.workers[0]
        lost = [await echo(made, WorkerTarget("w0")) for _ in range(8)]
        kept = await echo(made, WorkerTarget("w1"))
        await victim.kill()
        for route in lost:
            with pytest.raises(RouteClosedError):
                await route.receive(LIMIT_S)
        await made.until(lambda: len(made.seen.closes) == 8)
        assert {closes[0].reason for closes in made.seen.closes.values()} == {CloseReason.PEER_LOST}
        assert all(len(closes) == 1 for closes in made.seen.closes.values())
        assert all(not loss.orderly for _, loss in made.seen.lost)
        kept.try_send(b"still here")
        assert await kept.receive(LIMIT_S) == b"still here"
        await victim.start()
        await made.full()
        (await echo(made, WorkerTarget("w0"))).close()
        kept.close()
        await made.assert_rest()


async def test_a_worker_that_leaves_in_order_goes_with_the_map() -> None:
    async with rig(2, vanish_grace_s=60) as made:
        await made.full()
        await made.workers[0].leave()
        await made.until(lambda: len(made.seen.lost) >= 2)
        assert all(loss.orderly for _, loss in made.seen.lost[:2])
        made.observe(made.workers[1].endpoint())
        await made.until(lambda: {view.key.worker for view in made.pool.status().pool.endpoints} == {"w1"})


async def test_hold_until_a_worker_comes() -> None:
    async with rig(1, observed=False) as made:
        assert made.pool.readiness.state is State.NO_MAP
        waiting = asyncio.create_task(echo(made, WorkerTarget("w0")))
        await made.until(lambda: made.pool.status().held == 1)
        made.observe_all()
        route = await waiting
        assert made.pool.status().held == 0
        route.close()
        await made.assert_rest()


async def test_who_has_another_candidate_need_not_wait() -> None:
    async with rig(1, no_coverage_wait_s=60) as made:
        await made.full()
        with pytest.raises(NoCoverageError) as caught:
            await made.pool.bind(WorkerTarget("w9"), b"x", wait_s=0)
        assert caught.value.waited_s < 1
        (await made.pool.bind(WorkerTarget("w0"), b"x", wait_s=0)).close()
        await made.assert_rest()


async def test_routes_go_to_the_process_that_was_asked_for() -> None:
    async with rig(1) as made:
        await made.full()
        for writer in made.pool.writers():
            made.pool.identify(writer.tunnel, 1)
        (await echo(made, WorkerTarget("w0", 1))).close()
        with pytest.raises(NoCoverageError):
            await made.pool.bind(WorkerTarget("w0", 2), b"x", wait_s=0)
        old = {writer.writer for writer in made.pool.writers()}
        made.workers[0].incarnation = 2  # the map knows of a new process; the tunnels that stand lead to the old one
        made.observe_all()
        await made.until(lambda: not old & {writer.writer for writer in made.pool.writers()})
        await made.full()
        assert all(loss.superseded and not loss.orderly for writer, loss in made.seen.lost if writer.writer in old)
        (await echo(made, WorkerTarget("w0", 2))).close()
        await made.assert_rest()


@pytest.mark.parametrize("ever_up", [False, True])
async def test_nobody_hangs_without_a_tunnel(ever_up: bool) -> None:
    async with rig(1, no_coverage_wait_s=0.2) as made:
        if ever_up:
            await made.full()
        await made.workers[0].kill()
        await made.until(lambda: not made.pool.writers())
        with pytest.raises(NoCoverageError) as caught:
            await made.pool.bind(WorkerTarget("w0"), b"x")
        assert caught.value.why is Refusal.NO_COVERAGE
        assert 0.2 <= caught.value.waited_s < LIMIT_S
        assert not made.pool.readiness.ready
        if not ever_up:
            assert made.pool.readiness.state is State.STARTING
        made.pool.set_policy(replace(CALM, no_coverage=NoCoverage.FAIL))
        with pytest.raises(NoCoverageError):
            await made.pool.bind(CellTarget("A"), b"x")
        made.pool.set_policy(replace(CALM, no_coverage=NoCoverage.DIRECT))
        with pytest.raises(GoDirectError):
            await made.pool.bind(CellTarget("A"), b"x")
        made.pool.set_policy(replace(CALM, hold_max=0))
        with pytest.raises(NoCoverageError) as caught:
            await made.pool.bind(CellTarget("A"), b"x")
        assert caught.value.why is Refusal.TOO_MANY_HELD
        await made.assert_rest()


async def test_a_held_bind_hears_of_a_new_policy_and_of_the_end() -> None:
    async with rig(1, observed=False, no_coverage_wait_s=60) as made:
        first = asyncio.create_task(made.pool.bind(CellTarget("A"), b"x"))
        await made.until(lambda: made.pool.status().held == 1)
        made.pool.set_policy(replace(CALM, no_coverage=NoCoverage.FAIL))
        with pytest.raises(NoCoverageError):
            await first
        made.pool.set_policy(replace(CALM, no_coverage_wait_s=60))
        second = asyncio.create_task(made.pool.bind(CellTarget("A"), b"x"))
        await made.until(lambda: made.pool.status().held == 1)
        assert await made.pool.shutdown(1.0)
        with pytest.raises(PoolClosingError):
            await second


async def test_a_cancelled_bind_leaves_nothing() -> None:
    async with rig(1, observed=False, no_coverage_wait_s=60) as made:
        waiting = asyncio.create_task(made.pool.bind(CellTarget("A"), b"x"))
        await made.until(lambda: made.pool.status().held == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert made.pool.status().held == 0
        made.observe_all()
        await made.full()
        async with made.registry.binding_lock:
            waiting = asyncio.create_task(made.pool.bind(CellTarget("A"), b"x"))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await made.assert_rest()


async def test_an_operators_swap_moves_new_routes_and_lets_old_ones_finish() -> None:
    async with rig(2) as made:
        await made.full()
        old = {writer.writer for writer in made.pool.writers()}
        route = await echo(made, WorkerTarget("w0"))
        made.pool.swap()
        await made.until(lambda: made.pool.status().pool.generation == 2)
        await made.full()
        (await echo(made, WorkerTarget("w0"))).close()
        route.try_send(b"on the old tunnel")
        assert await route.receive(LIMIT_S) == b"on the old tunnel"
        route.try_send(b"bye")
        await made.until(lambda: not old & {writer.writer for writer in made.pool.writers()})
        assert made.seen.closes[route.conn_id][0].reason is CloseReason.DONE
        await made.assert_rest()


async def test_a_commit_that_closes_ends_routes_as_retired() -> None:
    async with rig(1, close_covered=True) as made:
        await made.full()
        route = await echo(made, WorkerTarget("w0"))
        made.pool.swap()
        with pytest.raises(RouteClosedError) as caught:
            await route.receive(LIMIT_S)
        assert caught.value.closed.reason is CloseReason.RETIRED
        await made.full()
        await made.assert_rest()


async def test_an_operators_drain_and_its_end() -> None:
    async with rig(2) as made:
        await made.full()
        route = await echo(made, WorkerTarget("w0"))
        made.pool.drain("w0")
        with pytest.raises(NoCoverageError):
            made.pool.set_policy(replace(CALM, no_coverage=NoCoverage.FAIL))
            await made.pool.bind(WorkerTarget("w0"), b"x")
        assert made.pool.status().pool.by_contour[Contour.DRAINING] >= 1
        route.try_send(b"bye")
        await made.until(lambda: all(writer.endpoint.worker == "w1" for writer in made.pool.writers()))
        made.pool.drain("w0", drained=False)
        await made.full()
        await made.assert_rest()


async def test_both_families_are_covered_and_refilled() -> None:
    async with rig(1, hosts=("127.0.0.1", "[::1]")) as made:
        await made.until(lambda: made.pool.status().pool.by_family == {"ipv4": 2, "ipv6": 2})
        six = made.workers[1]
        await six.kill()
        await made.until(lambda: len(made.pool.status().pool.missing_groups) == 1)
        assert made.pool.status().pool.missing_groups[0].family == "ipv6"
        (await echo(made, WorkerTarget("w0"))).close()
        await six.start()
        await made.until(lambda: made.pool.status().pool.by_family["ipv6"] == 2)
        assert not made.pool.status().pool.missing_groups
        await made.assert_rest()


async def test_a_stopped_consumer_pays_alone() -> None:
    async with rig(1, route_items=16, route_bytes=4096, route_congested_s=0.1) as made:
        await made.full()
        stopped = await made.pool.bind(WorkerTarget("w0"), b"stream 100000", made.seen.on_closed)
        others = [await echo(made, WorkerTarget("w0")) for _ in range(4)]
        for _ in range(50):
            for route in others:
                route.try_send(b"x")
                assert await route.receive(LIMIT_S) == b"x"
        await made.until(lambda: stopped.conn_id in made.seen.closes)
        assert made.seen.closes[stopped.conn_id][0].reason is CloseReason.RESOURCE_EXHAUSTED
        assert made.seen.dropped == [stopped.conn_id]
        for route in others:
            route.close()
        await made.assert_rest()


async def test_a_ceiling_on_connections_is_live() -> None:
    async with rig(1, max_connections=1) as made:
        await made.full()
        route = await echo(made, WorkerTarget("w0"))
        with pytest.raises(TooManyRoutesError):
            await made.pool.bind(WorkerTarget("w0"), b"x")
        made.pool.set_policy(replace(CALM, max_connections=0))
        (await echo(made, WorkerTarget("w0"))).close()
        route.close()
        await made.assert_rest()


async def test_the_end_in_order() -> None:
    async with rig(2) as made:
        await made.full()
        route = await echo(made, WorkerTarget("w0"))
        ending = asyncio.create_task(made.pool.shutdown(LIMIT_S))
        await made.until(lambda: made.pool.readiness.state is State.CLOSING)
        with pytest.raises(PoolClosingError):
            await made.pool.bind(WorkerTarget("w1"), b"x")
        route.try_send(b"what runs may finish")
        assert await route.receive(LIMIT_S) == b"what runs may finish"
        route.close()
        assert await ending
        assert not made.pool.writers()
        assert {loss.closed.reason for _, loss in made.seen.lost} <= {CloseReason.SHUTDOWN, CloseReason.RETIRED}
        await made.assert_rest()
