"""The ingress's side: cancels, lost and slow ingresses, resubmissions, a router that leaves in order."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from libs.contracts.segue.v1 import router_pb2
from libs.controller.protocol import (
    CancelledDelivery,
    CancelRequest,
    ErrorDelivery,
    Served,
    StatusCode,
    UnknownMessage,
)
from libs.tunnel import Closed, CloseReason, RouteClosedError
from tests.router.fake_catalog import FINGERPRINT
from tests.router.fake_worker import LIMIT_S, TIMINGS, Job
from tests.router.rig import Stream, eventually, ingress_to, request, running, slow_ingress, status


async def closed(stream: Stream) -> Closed:
    """How the stream's route ended; nothing came on it."""
    with pytest.raises(RouteClosedError) as caught:
        await stream.route.receive(LIMIT_S)
    found: Closed = caught.value.closed
    return found


async def test_a_cancel_reaches_the_worker_and_is_answered_once() -> None:
    async with running(None) as rig:
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        job.accept()
        job.delta(2)
        await stream.until(2)
        stream.cancel()
        end = await stream.end()
        assert isinstance(end, CancelledDelivery)
        assert (end.usage.prompt_tokens, end.usage.generated_tokens) == (8, 2)
        served = end.served
        assert (served.worker, served.workers, served.epoch, served.attempts) == ("w0", ("w0",), 1, 1)
        assert served.timings == TIMINGS
        await asyncio.wait_for(job.cancelled.wait(), LIMIT_S)
        job.result()
        await rig.at_rest()
        assert rig.metric("requests_total", outcome="cancelled") == 1


async def test_a_closed_route_and_a_lost_ingress_cancel_what_they_asked_for() -> None:
    async with running(None) as rig:
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        stream.route.close(CloseReason.CANCELLED)
        await asyncio.wait_for(job.cancelled.wait(), LIMIT_S)
        job.route.close(CloseReason.DONE)
        async with ingress_to(rig.target) as other:
            await other.submit()
            await other.submit()
            jobs = [await rig.worker.next(), await rig.worker.next()]
        for one in jobs:
            await asyncio.wait_for(one.cancelled.wait(), LIMIT_S)
            one.route.close(CloseReason.DONE)


async def test_a_cancel_while_waiting_for_a_plan_or_for_capacity() -> None:
    async with running() as rig:
        stream = await rig.ingress.submit()
        await eventually(lambda: rig.router.shell.machine.waiting == 1, "waiting")
        stream.cancel()
        assert isinstance(await stream.end(), CancelledDelivery)
        at_once = await rig.ingress.submit()
        at_once.cancel()
        assert isinstance(await at_once.end(), CancelledDelivery)


async def test_a_consumer_that_does_not_read_loses_its_own_route_only() -> None:
    async with running(None) as rig, ingress_to(rig.target, slow_ingress()) as slow:
        stuck = await slow.submit(request(8, 500))
        job = await rig.worker.next()
        job.accept()
        other = await slow.submit(request(8, 40))
        fine = await rig.worker.next()
        fine.accept()
        for number in range(40):
            job.delta()
            fine.delta()
            await other.until(number + 1)
        await asyncio.wait_for(job.cancelled.wait(), LIMIT_S)
        assert stuck.route.closed is not None and stuck.route.closed.reason is CloseReason.RESOURCE_EXHAUSTED
        job.route.close(CloseReason.DONE)
        fine.result()
        await other.completed(40)
        await rig.at_rest()
        assert slow.tunnel.closed is None
        assert rig.metric("attach_slow_total") == 1


async def test_a_resubmission_goes_on_from_what_was_delivered() -> None:
    async with running(Job.run) as rig:
        asked = request(8, 3, tokens=(*range(1, 9), 100, 101), output_start=8)
        stream = await rig.ingress.submit(asked, delivered=2)
        await stream.completed(3)
        assert rig.worker.jobs[0].offer.request.output_start == 8
        assert rig.metric("resumes_total") == 0


async def test_a_resubmission_goes_on_with_its_variant_alone() -> None:
    async with running(Job.run) as rig:
        asked = request(8, 3, tokens=(*range(1, 9), 100, 101), output_start=8)
        other = await rig.ingress.submit(asked, delivered=2, fingerprint="cd" * 32)
        await eventually(lambda: rig.router.shell.machine.waiting == 1, "waiting for a variant that is not here")
        again = request(8, 3, tokens=asked.tokens, output_start=8)
        await (await rig.ingress.submit(again, delivered=2, fingerprint=FINGERPRINT)).completed(3)
        assert [job.offer.assignment.request_id for job in rig.worker.jobs] == [again.request_id]
        other.cancel()
        end = await other.end()
        assert isinstance(end, CancelledDelivery) and end.served == Served()


async def test_the_same_id_over_another_tunnel_takes_over() -> None:
    """A link that is broken at the ingress's end only: the router must not keep the old one's word for it."""
    async with running(None) as rig, ingress_to(rig.target) as again:
        asked = request(8, 4)
        old = await rig.ingress.submit(asked)
        first = await rig.worker.next()
        first.accept()
        first.delta(1)
        await old.until(1)
        resumed = request(8, 3, request_id=asked.request_id, tokens=(*range(1, 9), 100), output_start=8)
        new = await again.submit(resumed, delivered=1)
        assert isinstance(await old.end(), CancelledDelivery)
        await asyncio.wait_for(first.cancelled.wait(), LIMIT_S)
        first.route.close(CloseReason.DONE)
        (await rig.worker.next()).run()
        await new.completed(3)


async def test_a_duplicate_on_the_same_tunnel_or_of_another_tenant_is_refused_and_harms_nobody() -> None:
    async with running(None) as rig, ingress_to(rig.target) as other:
        asked = request()
        stream = await rig.ingress.submit(asked)
        job = await rig.worker.next()
        foreign = request(request_id=asked.request_id, tenant="somebody else")
        for copy in (await rig.ingress.submit(asked), await other.submit(foreign)):
            end = await copy.end()
            assert isinstance(end, ErrorDelivery) and end.code is StatusCode.ALREADY_EXISTS
        job.run()
        await stream.completed(4)


async def test_what_is_no_submission_is_refused_and_counted() -> None:
    async with running(Job.run) as rig:
        tunnel, codec = rig.ingress.tunnel, rig.ingress.codec
        future = UnknownMessage(b"\xfa\x01\x02hi")  # field 31, of a version to come
        for payload in (b"\xff\xff", codec.encode(CancelRequest("x")), codec.encode(future)):
            route = await tunnel.open(payload)
            assert (await closed(Stream("", route, codec))).reason is CloseReason.PROTOCOL
        stream = await rig.ingress.submit()
        stream.route.try_send(codec.encode(future))
        await stream.completed(4)
        for reason, times in (("malformed", 1), ("unknown-type", 2)):
            assert rig.metric("wire_total", peer="ingress", reason=reason) == times
        assert rig.metric("wire_total", peer="ingress", reason="out-of-place") >= 2
        assert rig.ingress.tunnel.closed is None


async def test_at_the_end_running_requests_finish_and_new_ones_go_elsewhere() -> None:
    async with running(None) as rig, ingress_to(rig.target) as idle:
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        job.accept()
        draining = asyncio.create_task(rig.router.drain(LIMIT_S))
        assert idle.run is not None
        assert (await asyncio.wait_for(idle.run, LIMIT_S)).reason is CloseReason.SHUTDOWN
        late = await rig.ingress.submit()
        assert (await closed(late)).reason is CloseReason.SHUTDOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Generate(router_pb2.GenerateRequest(), timeout=LIMIT_S).read()
        assert status(caught) is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        job.finish()
        await stream.completed(4)
        await asyncio.wait_for(draining, LIMIT_S)
        assert rig.ingress.run is not None
        assert (await asyncio.wait_for(rig.ingress.run, LIMIT_S)).reason is CloseReason.SHUTDOWN
        await eventually(lambda: rig.worker.tunnels[0].closed is not None, "the worker's tunnel")
        ends = {(tunnel.closed.reason, tunnel.closed.by_peer) for tunnel in rig.worker.tunnels if tunnel.closed}
        assert ends == {(CloseReason.SHUTDOWN, True)}


async def test_past_the_grace_what_runs_is_handed_back() -> None:
    async with running(None) as rig:
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        job.accept()
        job.delta(1)
        await stream.until(1)
        await asyncio.wait_for(rig.router.drain(1.1), LIMIT_S)
        assert (await closed(stream)).reason is CloseReason.SHUTDOWN
        await asyncio.wait_for(job.ended.wait(), LIMIT_S)
