"""Attempts over real tunnels: accepted, declined, timed out, lost, resumed. The requester sees one exact stream."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from libs.controller.protocol import (
    AssignmentId,
    Candidate,
    DeclineReason,
    ErrorDelivery,
    FinishReason,
    Offer,
    ResultStatus,
    StatusCode,
    Tier,
)
from libs.controller.router_effects import CloseRoute, Outcome, SendOffer
from libs.tunnel import CloseReason
from tests.router.fake_catalog import FINGERPRINT, model
from tests.router.fake_worker import Job, ScriptedWorker, scripted_worker
from tests.router.rig import Rig, eventually, request, running


async def prefer(rig: Rig, wanted: ScriptedWorker) -> None:
    """All others report a long queue from now on."""
    for worker in rig.workers:
        worker.load = replace(worker.load, queue_ms=0.0 if worker is wanted else 20_000.0)
        worker.say()
    views = rig.router.observatory.fleet.views

    def holds() -> bool:
        return all(view.load.queue_ms == (0.0 if name == wanted.name else 20_000.0) for name, view in views().items())

    await eventually(holds, "loads heard")


async def test_the_regular_course() -> None:
    async with running(Job.run) as rig:
        stream = await rig.ingress.submit(request(8, 4))
        end = await stream.completed(4)
        assert (end.finish_reason, end.served.worker, end.served.epoch) == (FinishReason.LENGTH, "w0", 1)
        assert (end.served.workers, end.served.attempts, end.served.tier) == (("w0",), 1, Tier.NONE)
        assert end.served.timings.ttft_ms == 3.0 and end.served.predicted_ttft_ms > 0
        assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.computed_tokens) == (8, 0, 8)
        await rig.at_rest()
        assert rig.worker.jobs[0].closed is not None and rig.worker.jobs[0].closed.reason is CloseReason.DONE
        assert not rig.worker.jobs[0].cancelled.is_set()
        decision = rig.router.decisions.newest[-1]
        assert [record.outcome for record in decision.attempts] == [Outcome.COMPLETED]
        assert decision.attempts[0].measured_ttft_ms is not None
        assert rig.metric("requests_total", outcome="completed") == 1
        assert rig.metric("attempts_total", outcome="completed") == 1
        assert rig.metric("offers_total") == 1
        for kind in ("predicted", "measured"):
            assert rig.metric("ttft_seconds_count", kind=kind, tier="none") == 1
        assert rig.metric("ttft_error_ratio_count", tier="none") == 1
        off_ms = abs(decision.attempts[0].predicted_ttft_ms - decision.attempts[0].measured_ttft_ms)
        assert rig.metric("ttft_error_seconds_sum", tier="none") == off_ms / 1_000
        assert rig.metric("plan_seconds_count") == rig.metric("rank_seconds_count") == 1
        await eventually(lambda: rig.metric("pool_writers", contour="active") == 2, "two tunnels")
        assert rig.metric("workers") == 1


async def test_many_at_once_each_exact() -> None:
    async with running(Job.run, Job.run, offer_timeout_ms=20_000) as rig:
        streams = [await rig.ingress.submit(request(6, 1 + i % 7)) for i in range(200)]
        async with asyncio.TaskGroup() as group:
            for i, stream in enumerate(streams):
                group.create_task(stream.completed(1 + i % 7))
        assert all(worker.jobs for worker in rig.workers)


async def test_a_decline_goes_to_the_next_candidate() -> None:
    async with running(lambda job: job.decline(DeclineReason.QUEUE_LONGER), Job.run) as rig:
        await prefer(rig, rig.workers[0])
        end = await (await rig.ingress.submit()).completed(4)
        assert (end.served.worker, end.served.attempts) == ("w1", 2)
        await rig.at_rest()
        assert rig.metric("declines_total", reason="queue_longer") == 1
        assert rig.metric("attempts_total", outcome="declined") == 1


async def test_an_offer_timeout_falls_back_and_the_late_acceptance_is_fenced_and_cancelled() -> None:
    async with running(None, None, offer_timeout_ms=150) as rig:
        await prefer(rig, rig.workers[0])
        stream = await rig.ingress.submit()
        late = await rig.workers[0].next()
        job = await rig.workers[1].next()
        assert job.offer.assignment.attempt == 2
        await asyncio.wait_for(late.cancelled.wait(), 5)
        job.accept()
        late.cancelled.clear()
        late.accept()
        late.delta(2)
        # The acceptance is answered by another cancel; neither it nor the delta changed anything.
        await asyncio.wait_for(late.cancelled.wait(), 5)
        await eventually(lambda: rig.fenced("stale-attempt") == 2, "fenced acceptance and delta")
        job.finish()
        end = await stream.completed(4)
        assert (end.served.worker, end.served.workers, end.served.attempts) == ("w1", ("w1",), 2)
        # Its result ends the late one's route, long before it would be closed for being slow.
        late.result(ResultStatus.CANCELLED)
        await rig.at_rest()
        assert rig.metric("offer_timeouts_total") == 1


async def test_an_offer_that_was_answered_does_not_time_out() -> None:
    async with running(None, offer_timeout_ms=80) as rig:
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        job.accept()
        # A younger offer runs out of time: so would the older one have, long ago.
        other = await rig.ingress.submit(request(priority=1))
        late = await rig.worker.next()
        await asyncio.wait_for(late.cancelled.wait(), 5)
        late.route.close()
        # With nobody else to ask it waits for a worker with room; this one says that it has some.
        await eventually(lambda: rig.router.shell.machine.waiting == 1, "waiting")
        rig.worker.say()
        (await rig.worker.next()).run()
        await other.completed(4)
        job.finish()
        end = await stream.completed(4)
        assert end.served.attempts == 1
        assert rig.metric("offer_timeouts_total") == 1


async def test_a_worker_killed_before_the_first_delta_costs_an_attempt_and_no_token() -> None:
    async with running(None, None) as rig:
        await prefer(rig, rig.workers[0])
        stream = await rig.ingress.submit()
        (await rig.workers[0].next()).accept()
        await rig.workers[0].kill()
        (await rig.workers[1].next()).run()
        end = await stream.completed(4)
        assert (end.served.worker, end.served.workers, end.served.attempts) == ("w1", ("w1",), 2)
        assert end.usage.computed_tokens == 8
        assert rig.metric("worker_losses_total", loss="process") == 1
        assert rig.metric("resumes_total") == 0


async def test_a_worker_killed_in_mid_stream_is_resumed_with_exact_indices() -> None:
    async with running(None, None) as rig:
        await prefer(rig, rig.workers[0])
        stream = await rig.ingress.submit(request(8, 6))
        first = await rig.workers[0].next()
        first.accept()
        first.delta(2)
        await stream.until(2)
        await rig.workers[0].kill()
        second = await rig.workers[1].next()
        asked = second.offer.request
        assert asked.tokens == (*range(1, 9), 100, 101)
        assert (asked.output_start, asked.max_new_tokens) == (8, 4)
        second.run()
        end = await stream.completed(6)
        assert end.served.workers == ("w0", "w1")
        assert (end.usage.prompt_tokens, end.usage.computed_tokens) == (8, 8)
        assert rig.metric("resumes_total") == 1


async def test_two_losses_end_the_request_and_spare_the_third_worker() -> None:
    async with running(Job.accept, Job.accept, Job.accept) as rig:
        asked = request()
        stream = await rig.ingress.submit(asked)
        killed: list[ScriptedWorker] = []
        for number in (1, 2):
            await eventually(
                lambda many=number: sum(len(worker.jobs) for worker in rig.workers) == many, f"attempt {number}"
            )
            hit = next(worker for worker in rig.workers if worker.jobs and worker not in killed)
            killed.append(hit)
            await hit.kill()
        end = await stream.end()
        assert isinstance(end, ErrorDelivery)
        assert end.code is StatusCode.INTERNAL and asked.request_id in end.message
        third = next(worker for worker in rig.workers if worker not in killed)
        # The same prompt again, under another id: refused, and the last worker never sees it.
        again = await (await rig.ingress.submit(request())).end()
        assert isinstance(again, ErrorDelivery) and again.code is StatusCode.FAILED_PRECONDITION
        assert third.jobs == []
        assert rig.metric("requests_total", outcome="internal") == 1


async def test_a_resume_stays_with_the_variant_that_drew_the_first_token() -> None:
    async with running(None, None, None, names_refresh_s=0.05) as rig:
        first, foreign, twin = rig.workers
        foreign.beat = replace(foreign.beat, models=("cd" * 32,))
        await prefer(rig, first)
        rig.catalog.names["m"] = [model("cd" * 32), model()]
        stream = await rig.ingress.submit()
        job = await first.next()
        job.accept()
        job.delta(1)
        await stream.until(1)
        await prefer(rig, foreign)  # and its name does not even list the other one any more
        rig.catalog.names["m"] = [model("cd" * 32)]
        asked = rig.metric("names_asked_total")
        await eventually(lambda: rig.metric("names_asked_total") > asked + 1, "looked at again")
        await first.kill()
        (await twin.next()).run()
        await stream.completed(4)
        assert foreign.jobs == []


async def test_what_was_assigned_since_the_last_heartbeat_counts() -> None:
    async with running(None, None, offers_unanswered=40) as rig:
        streams = [await rig.ingress.submit(request(600, 2)) for _ in range(40)]
        await eventually(lambda: sum(len(worker.jobs) for worker in rig.workers) == 40, "all offered")
        assert [len(worker.jobs) for worker in rig.workers] == [20, 20]
        for job in (job for worker in rig.workers for job in worker.jobs):
            job.run()
        for stream in streams:
            await stream.completed(2)


async def test_a_slow_worker_is_asked_a_few_at_a_time_and_nobody_fails() -> None:
    # No offer can time out: what is told here is who waits for whose answer.
    async with running(None, offers_unanswered=3, offer_timeout_ms=60_000) as rig:
        streams = [await rig.ingress.submit(request(40, 2)) for _ in range(20)]
        machine, answered = rig.router.shell.machine, 0
        while answered < 20:
            due = min(20, answered + 3)
            await eventually(lambda due=due: len(rig.worker.jobs) == due, "offered")  # type: ignore[misc]
            await eventually(lambda due=due: machine.held == 20 - due, "the others are held")  # type: ignore[misc]
            rig.worker.jobs[answered].run()
            answered += 1
        for stream in streams:
            assert (await stream.completed(2)).served.attempts == 1


async def test_what_the_router_was_late_by_does_not_count_against_a_worker() -> None:
    async with running(None, offer_timeout_ms=200) as rig:
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        job.accept()
        # The answer is under way while this loop, the router's too, does nothing else until long after the timeout.
        time.sleep(0.5)  # noqa: ASYNC251
        job.finish()
        assert (await stream.completed(4)).served.attempts == 1
        assert rig.metric("offer_timeouts_total") == 0


async def test_an_answer_brings_fresh_counts() -> None:
    async with running(None, None) as rig:
        await prefer(rig, rig.workers[0])
        first = await rig.ingress.submit()
        job = await rig.workers[0].next()
        rig.workers[0].load = replace(rig.workers[0].load, queue_ms=60_000.0)  # no heartbeat says so
        job.accept()
        await eventually(lambda: rig.router.shell.machine.phase(first.request_id).value == "accepted", "accepted")
        second = await rig.ingress.submit()
        (await rig.workers[1].next()).run()
        assert (await second.completed(4)).served.attempts == 1
        job.finish()
        await first.completed(4)


async def test_an_offer_taken_back_before_it_was_sent_is_never_sent() -> None:
    async with running(Job.run) as rig:
        assignments = rig.router.assignments
        offer = Offer(
            AssignmentId("early", 1), 1, request(request_id="early"), FINGERPRINT, Candidate("w0", 1, "", Tier.NONE)
        )
        assignments.offer(SendOffer("w0", offer))
        assignments.close(CloseRoute("w0", offer.assignment))
        await (await rig.ingress.submit()).completed(4)
        assert len(rig.worker.jobs) == 1 and len(assignments) == 0


async def test_a_silent_worker_is_lost_though_its_tunnel_stands() -> None:
    async with running(None, heartbeat_expiry_s=0.3) as rig:
        stream = await rig.ingress.submit(request(8, 2))
        job = await rig.worker.next()
        job.accept()
        job.delta()
        await stream.until(1)
        await asyncio.wait_for(job.cancelled.wait(), 5)  # silence: told, in case it hears
        assert rig.metric("worker_losses_total", loss="silence") == 1
        rig.worker.say()  # and welcome back
        resumed = await rig.worker.next()
        job.result(ResultStatus.CANCELLED)
        resumed.run()
        end = await stream.completed(2)
        assert end.served.attempts == 2


async def test_a_worker_that_leaves_in_order_is_no_loss() -> None:
    async with running(None, None, worker_losses=1) as rig:
        await prefer(rig, rig.workers[0])
        stream = await rig.ingress.submit()
        job = await rig.workers[0].next()
        job.accept()
        job.delta(3)
        await stream.until(3)
        await eventually(lambda: len(rig.workers[0].tunnels) == 2, "both tunnels")
        for tunnel in rig.workers[0].tunnels:
            tunnel.close(CloseReason.SHUTDOWN)
        (await rig.workers[1].next()).run()
        end = await stream.completed(4)
        assert end.served.workers == ("w0", "w1")
        assert rig.metric("worker_losses_total", loss="retired") == 1
        assert rig.metric("worker_losses_total", loss="process") == 0


async def test_the_last_words_of_a_lost_tunnel_still_count() -> None:
    async with running(None, None) as rig:
        await prefer(rig, rig.workers[0])
        stream = await rig.ingress.submit(request(8, 3))
        job = await rig.workers[0].next()
        job.run()
        rig.workers[0].tunnels[0].close(CloseReason.SHUTDOWN)  # result and goodbye arrive together
        end = await stream.completed(3)
        assert end.served.attempts == 1
        assert rig.workers[1].jobs == []


async def test_a_failed_result_goes_elsewhere() -> None:
    def fail(job: Job) -> None:
        job.accept()
        job.delta(1)
        job.result(ResultStatus.FAILED, "device lost")

    async with running(fail, Job.run) as rig:
        await prefer(rig, rig.workers[0])
        end = await (await rig.ingress.submit()).completed(4)
        assert end.served.workers == ("w0", "w1")
        assert rig.metric("resumes_total") == 1


async def test_a_route_that_its_worker_drops_is_resumed_where_the_state_is() -> None:
    async with running(None, None) as rig:
        await prefer(rig, rig.workers[0])
        stream = await rig.ingress.submit()
        job = await rig.workers[0].next()
        job.accept()
        job.delta(1)
        job.route.close(CloseReason.RESOURCE_EXHAUSTED)
        (await rig.workers[0].next()).run()
        end = await stream.completed(4)
        assert (end.served.workers, end.served.attempts) == (("w0",), 2)
        assert rig.metric("worker_losses_total", loss="process") == 0


async def test_garbage_on_a_route_is_counted_and_costs_an_attempt_only() -> None:
    def garbage(job: Job) -> None:
        job.route.post(b"\xff\xff\xff")

    async with running(garbage, Job.run) as rig:
        await prefer(rig, rig.workers[0])
        end = await (await rig.ingress.submit()).completed(4)
        assert end.served.worker == "w1"
        rig.worker.tunnels[0].try_control(b"\xff\xff\xff")
        rig.worker.tunnels[0].try_control(rig.worker.codec.encode(rig.worker.beat))  # epoch 0: an old process's
        await eventually(
            lambda: (
                rig.metric("wire_total", peer="worker", reason="malformed") == 2
                and rig.metric("rejected_heartbeats_total", reason="old-epoch") == 1
            ),
            "counted",
        )
        assert rig.worker.tunnels[0].closed is None


async def test_without_a_worker_a_request_waits_for_one() -> None:
    async with running() as rig:
        stream = await rig.ingress.submit()
        await eventually(lambda: rig.router.shell.machine.waiting == 1, "waiting")
        assert rig.metric("queue_length") == rig.metric("active", phase="waiting") == 1
        async with scripted_worker("late", Job.run) as late:
            await rig.catalog.put(late.endpoint)
            end = await stream.completed(4)
            assert end.served.worker == "late"
            await rig.at_rest()


async def test_waiting_ends_with_the_deadline() -> None:
    async with running() as rig:
        end = await (await rig.ingress.submit(request(deadline_ms=100))).end()
        assert isinstance(end, ErrorDelivery) and end.code is StatusCode.DEADLINE_EXCEEDED
        assert "no worker serves" in end.message


async def test_a_full_worker_is_tried_again_when_it_says_there_is_room() -> None:
    async with running(None) as rig:
        stream = await rig.ingress.submit()
        (await rig.worker.next()).decline(DeclineReason.INSUFFICIENT_PAGES)
        await eventually(lambda: rig.router.shell.machine.waiting == 1, "waiting")
        rig.worker.say()
        (await rig.worker.next()).run()
        await stream.completed(4)
        assert rig.metric("declines_total", reason="insufficient_pages") == 1


async def test_what_can_never_run_fails_at_once_with_the_reason() -> None:
    async with running(Job.run) as rig:
        for wanted, code, word in (
            (request(model="nobody"), StatusCode.NOT_FOUND, "nobody"),
            (request(8, 100_000), StatusCode.INVALID_ARGUMENT, "8192"),
            (request(tenant_salt="zz"), StatusCode.INVALID_ARGUMENT, "tenant_salt"),
            (request(8, 0), StatusCode.INVALID_ARGUMENT, "max_new_tokens"),
        ):
            end = await (await rig.ingress.submit(wanted)).end()
            assert isinstance(end, ErrorDelivery)
            assert end.code is code and word in end.message, end
        assert rig.worker.jobs == []


async def test_a_crash_of_the_machine_ends_the_service() -> None:
    async with running(None, rest=False) as rig:
        stream = await rig.ingress.submit()
        await rig.worker.next()
        from libs.controller.router_events import Plan, Planned

        state = rig.router.shell.machine._requests[stream.request_id]
        try:
            rig.router.shell.feed(Planned(stream.request_id, state.plan_id, Plan()))
        except AssertionError:
            pass
        else:
            raise AssertionError("a plan of nothing was taken")
        assert rig.service._end.is_set() and rig.service._failure is not None
