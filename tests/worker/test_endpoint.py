"""The endpoint over real sockets, with the echo runtime: what a router sees of one worker."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from libs.contracts.segue.v1 import common_pb2, worker_pb2
from libs.controller.protocol import Cancel, DeclineReason, FinishReason, ResultStatus, Tier
from libs.controller.worker_table import Phase
from libs.service.errors import read_error
from libs.tunnel import ChannelLimits, CloseReason, TunnelConfig
from services.worker.echo.model import echo_token
from tests.worker.rig import EPOCH, SALT, Exchange, Router, Running, routing, running, until

PROMPT = tuple(range(100, 140))


def expected(exchange: Exchange, count: int) -> list[int]:
    request = exchange.offer.request
    first = len(request.tokens) - request.output_start
    return [echo_token(request, first + index) for index in range(count)]


async def test_an_offer_is_accepted_run_and_completed() -> None:
    async with running() as worker, routing(worker) as router:
        exchange = await router.offer(PROMPT, 5)
        reply = await exchange.accepted()
        assert reply.accepted
        assert reply.load.active == 1
        result = await exchange.finish()
        assert (result.status, result.finish_reason) == (ResultStatus.COMPLETED, FinishReason.LENGTH)
        assert exchange.tokens == expected(exchange, 5) == list(PROMPT[:5])
        assert exchange.deltas[0].index == 0
        usage = result.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (40, 0, 40)
        assert usage.generated_tokens == 5
        assert await exchange.ended() is CloseReason.DONE
        await worker.rest()


async def test_the_next_turn_finds_the_prefix_resident() -> None:
    async with running() as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 5)
        await first.finish()
        again = await router.offer((*PROMPT, *first.tokens, 1, 2, 3), 5, name="r2", tier=Tier.GPU, cached=32)
        result = await again.finish()
        # Everything but the last drawn token of the first turn was computed: 44 of 48.
        assert (result.usage.cached_tokens, result.usage.computed_tokens) == (44, 4)
        await worker.rest()


async def test_a_resumed_attempt_goes_on_with_the_declared_tokens() -> None:
    async with running() as worker, routing(worker) as router:
        whole = await router.offer(PROMPT, 12)
        await whole.finish()
        resumed = await router.offer((*PROMPT, *whole.tokens[:5]), 7, name="r2", attempt=2, output_start=len(PROMPT))
        await resumed.finish()
        assert resumed.tokens == whole.tokens[5:]
        assert resumed.deltas[0].index == 5


@pytest.mark.parametrize(
    ("reason", "offer"),
    [
        (DeclineReason.WRONG_EPOCH, {"epoch": 7}),
        (DeclineReason.MODEL_NOT_LOADED, {"fingerprint": "cd" * 32}),
        (DeclineReason.CONTEXT_EXCEEDED, {"max_new": 1 << 20}),
        (DeclineReason.INSUFFICIENT_PAGES, {"max_new": 8_000}),
        (DeclineReason.DEADLINE_PASSED, {"deadline_ms": 0}),
        (DeclineReason.PREFIX_GONE, {"tier": Tier.GPU, "cached": 16}),
    ],
)
async def test_decline_reasons_of_an_idle_worker(reason: DeclineReason, offer: dict[str, object]) -> None:
    async with running() as worker, routing(worker) as router:
        exchange = await router.offer(PROMPT, **{"max_new": 4, **offer})  # type: ignore[arg-type]
        reply = await exchange.accepted()
        assert (reply.accepted, reply.reason) == (False, reason)
        assert reply.detail
        assert reply.load.pages.total == 256
        assert await exchange.ended() is CloseReason.DONE
        await worker.rest()


async def test_decline_reasons_of_a_busy_worker() -> None:
    async with running(max_control_tasks=3, lanes=1, echo_decode_ms=20.0) as worker, routing(worker) as router:
        busy = [await router.offer(PROMPT, 200, name=f"busy{i}") for i in range(2)]
        for exchange in busy:
            assert (await exchange.accepted()).accepted
        await until(lambda: worker.worker.interpreter.load().queue_ms > 1_000)
        longer = await router.offer(PROMPT, name="r1", queue_ms=0.0)
        assert (await longer.accepted()).reason is DeclineReason.QUEUE_LONGER
        third = await router.offer(PROMPT, 200, name="busy2")
        assert (await third.accepted()).accepted
        full = await router.offer(PROMPT, name="r2")
        assert (await full.accepted()).reason is DeclineReason.QUEUE_FULL
        same = await router.offer(PROMPT, name="busy0")
        assert (await same.accepted()).reason is DeclineReason.DUPLICATE
        # The route of the duplicate ending takes nothing from the assignment it names.
        assert await same.ended() is CloseReason.DONE
        await busy[0].next()
        assert worker.worker.interpreter.machine.phase(busy[0].offer.assignment) is Phase.DECODING
        worker.worker.interpreter.drain()
        draining = await router.offer(PROMPT, name="r3")
        assert (await draining.accepted()).reason is DeclineReason.DRAINING


async def in_phase(worker: Running, router: Router, phase: Phase, name: str) -> Exchange:
    exchange = await router.offer(tuple(range(1000, 1000 + 64)), 400, name=name)
    assert (await exchange.accepted()).accepted
    await until(lambda: worker.worker.interpreter.machine.phase(exchange.offer.assignment) is phase)
    return exchange


PHASES = {
    Phase.QUEUED: {"lanes": 1, "echo_decode_ms": 5.0},
    Phase.PREFILLING: {"echo_prefill_ms": 2.0, "step_tokens": 8},
    Phase.DECODING: {"echo_decode_ms": 2.0},
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancel", "close", "tunnel"])
async def test_giving_up_in_each_phase_leaves_nothing(phase: Phase, how: str) -> None:
    async with running(**PHASES[phase]) as worker:
        async with routing(worker) as router:
            if phase is Phase.QUEUED:
                await in_phase(worker, router, Phase.DECODING, "first")
            exchange = await in_phase(worker, router, phase, "r1")
            if how == "cancel":
                exchange.cancel()
                assert (await exchange.finish()).status is ResultStatus.CANCELLED
                assert await exchange.ended() is CloseReason.DONE
            elif how == "close":
                exchange.route.close(CloseReason.CANCELLED)
                await until(lambda: worker.worker.interpreter.machine.phase(exchange.offer.assignment) is Phase.GONE)
        # The tunnel is gone by now, and with it whatever else it carried.
        await worker.rest()


async def test_a_late_cancel_of_an_earlier_attempt_or_epoch_touches_nothing() -> None:
    async with running() as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 3, attempt=1)
        await first.finish()
        second = await router.offer(PROMPT, 60, attempt=2)
        assert (await second.accepted()).accepted
        second.route.try_send(second.codec.encode(cancel_of(first)))
        second.cancel(epoch=EPOCH - 1)
        assert (await second.finish()).status is ResultStatus.COMPLETED
        await worker.rest()


def cancel_of(exchange: Exchange) -> Cancel:
    return Cancel(exchange.offer.assignment, EPOCH)


async def test_one_iteration_of_many_assignments_is_one_frame() -> None:
    costs = {"lanes": 16, "step_tokens": 512, "echo_decode_ms": 10.0, "echo_pages": 1024}
    async with running(**costs) as worker, routing(worker) as router:
        exchanges = [await router.offer(PROMPT, 30, name=f"r{i}") for i in range(16)]
        await asyncio.gather(*(exchange.finish() for exchange in exchanges))
        deltas = sum(len(exchange.deltas) for exchange in exchanges)
        frames = worker.worker.attach.counters.frames_sent
        assert deltas >= 16 * 25
        assert frames < 250, f"{frames} frames for {deltas} deltas"


async def test_a_slow_tunnel_gets_merged_deltas_and_misses_none() -> None:
    # As long as a busy machine takes for them, or the router would give the route up.
    patient = TunnelConfig(route=ChannelLimits(congested_s=20.0))
    async with running(echo_decode_ms=0.0) as worker, routing(worker, config=patient) as router:
        exchange = await router.offer(PROMPT, 2_000)
        await exchange.accepted()
        await until(lambda: not len(worker.worker.interpreter.machine), within=20)
        await exchange.finish()
        assert exchange.tokens == expected(exchange, 2_000)


async def test_garbage_on_a_route_ends_that_route_alone() -> None:
    async with running() as worker, routing(worker) as router:
        good = await router.offer(PROMPT, 40)
        bad = await router.tunnel.open(b"\xff\xff\xff")
        heartbeat = await router.tunnel.open(router.codec.encode(cancel_of(good)))
        for route in (bad, heartbeat):
            with pytest.raises(Exception) as caught:
                await route.receive(5.0)
            assert caught.value.closed.reason is CloseReason.PROTOCOL
        assert (await good.finish()).status is ResultStatus.COMPLETED
        await worker.rest()


# --- Generate ---


def call(tokens: tuple[int, ...] = PROMPT, **values: object) -> worker_pb2.WorkerGenerateRequest:
    given: dict[str, object] = {"request_id": "direct", "tokens": tokens, "max_new_tokens": 6, "tenant_salt": SALT}
    return worker_pb2.WorkerGenerateRequest(request=common_pb2.GenerationRequest(**{**given, **values}))  # type: ignore[arg-type]


async def test_generate_streams_acceptance_tokens_result() -> None:
    async with running() as worker:
        events = [event async for event in worker.stub.Generate(call(), timeout=5)]
        assert events[0].WhichOneof("event") == "accepted"
        tokens = [token for event in events if event.WhichOneof("event") == "delta" for token in event.delta.tokens]
        assert tokens == list(PROMPT[:6])
        assert events[-1].result.status == common_pb2.RESULT_STATUS_COMPLETED
        await worker.rest()


async def test_generate_refuses_with_status_and_reason() -> None:
    async with running() as worker:
        with pytest.raises(grpc.aio.AioRpcError) as declined:
            [event async for event in worker.stub.Generate(call(max_new_tokens=8_000), timeout=5)]
        details = read_error(declined.value)
        assert details.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details.values["reason"] == "INSUFFICIENT_PAGES"
        assert details.retry_after_s
        for bad in ({"tokens": ()}, {"max_new_tokens": 0}, {"tenant_salt": "xyz"}, {"request_id": ""}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [event async for event in worker.stub.Generate(call(**bad), timeout=5)]
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await worker.rest()


async def test_a_caller_that_leaves_cancels_its_generation() -> None:
    async with running(echo_decode_ms=5.0) as worker:
        stream = worker.stub.Generate(call(max_new_tokens=2_000), timeout=30)
        await stream.read()
        await stream.read()
        stream.cancel()
        await worker.rest()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            [event async for event in worker.stub.Generate(call(request_id="d2", max_new_tokens=2_000), timeout=0.2)]
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await worker.rest()


# --- describe and drain ---


async def test_describe_tells_what_the_worker_is_and_holds() -> None:
    async with running() as worker, routing(worker) as router:
        await (await router.offer(tuple(range(300)), 3)).finish()
        await worker.rest()
        said = await worker.stub.Describe(worker_pb2.DescribeRequest(), timeout=5)
        assert said.endpoint.worker == "w"
        assert said.endpoint.epoch == EPOCH
        assert said.endpoint.address == worker.target
        assert said.models[0].fingerprint == worker.model.fingerprint
        assert {resident.end for resident in said.observation.resident} == {256, 288}
        assert said.observation.snapshot
        assert all(pages.total == 256 for pages in said.pages.values())


async def test_fetch_chunk_is_fenced_by_epoch_and_knows_what_it_lacks() -> None:
    async with running() as worker:
        for epoch, code in ((EPOCH - 1, grpc.StatusCode.FAILED_PRECONDITION), (EPOCH, grpc.StatusCode.NOT_FOUND)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                request = worker_pb2.FetchChunkRequest(epoch=epoch, hash="aa" * 32)
                [piece async for piece in worker.stub.FetchChunk(request, timeout=5)]
            assert caught.value.code() is code


async def test_drain_waits_for_what_runs_and_declines_the_rest() -> None:
    async with running(echo_decode_ms=2.0) as worker, routing(worker) as router:
        exchange = await router.offer(PROMPT, 60)
        await exchange.accepted()
        drains = [asyncio.ensure_future(worker.stub.Drain(worker_pb2.DrainRequest(), timeout=10)) for _ in range(2)]
        await until(lambda: worker.worker.interpreter.machine.draining)
        late = await router.offer(PROMPT, name="r2")
        assert (await late.accepted()).reason is DeclineReason.DRAINING
        ends = await asyncio.gather(*drains)
        assert [(end.clean, end.cancelled) for end in ends] == [(True, 0), (True, 0)]
        assert (await exchange.finish()).status is ResultStatus.COMPLETED
        assert worker.registration.deregistered == 1
        await worker.rest()


async def test_drain_cancels_what_outlives_the_grace_period() -> None:
    async with running(echo_decode_ms=10.0) as worker, routing(worker) as router:
        exchange = await router.offer(PROMPT, 2_000)
        await exchange.accepted()
        end = await worker.stub.Drain(worker_pb2.DrainRequest(grace_ms=100), timeout=10)
        assert (end.clean, end.cancelled) == (False, 1)
        assert (await exchange.finish()).status is ResultStatus.CANCELLED
        await worker.rest()
