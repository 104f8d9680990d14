"""Calls made by hand: Generate, Cancel, Explain, ListWorkers, with their status codes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from libs.continuation.chain import plan, root
from libs.contracts.segue.v1 import common_pb2, router_pb2
from libs.controller.protocol import Resident, Tier, TierCost
from libs.service.errors import read_error
from tests.router.fake_catalog import FINGERPRINT, model
from tests.router.fake_worker import LIMIT_S, Job
from tests.router.rig import Rig, eventually, request, running, status


def by_hand(prompt: int = 8, budget: int = 4, **changes: Any) -> router_pb2.GenerateRequest:
    facts = {"model": "m", "tokens": range(1, prompt + 1), "max_new_tokens": budget}
    return router_pb2.GenerateRequest(request=common_pb2.GenerationRequest(**{**facts, **changes}))


async def read(call: AsyncIterator[router_pb2.Delivery]) -> list[router_pb2.Delivery]:
    return [delivery async for delivery in call]


async def test_generate_needs_a_model_and_tokens_only() -> None:
    async with running(None) as rig:
        call = rig.stub.Generate(by_hand(), timeout=LIMIT_S)
        job = await rig.worker.next()
        assert job.offer.request.output_start == 8 and job.offer.request.tenant_salt == "00" * 32
        assert 0 < job.offer.request.deadline_ms <= LIMIT_S * 1_000 + 500  # gRPC rounds the call's deadline up
        job.run()
        got = await read(call)
        assert [token for one in got for token in one.tokens.tokens] == [100, 101, 102, 103]
        assert got[-1].completed.served.worker == "w0" and got[-1].request_id.startswith("hand-")
        assert await call.code() is grpc.StatusCode.OK
        endless = rig.stub.Generate(by_hand())
        job = await rig.worker.next()
        assert job.offer.request.deadline_ms > 60_000  # the router's default, or a day: no deadline is none
        job.run()
        assert (await read(endless))[-1].WhichOneof("event") == "completed"


async def test_a_terminal_error_is_delivered_and_ends_the_call_with_its_status() -> None:
    async with running(Job.run) as rig:
        for wanted, code in (
            (by_hand(model="nobody"), grpc.StatusCode.NOT_FOUND),
            (by_hand(0), grpc.StatusCode.INVALID_ARGUMENT),
            (by_hand(tenant_salt="xy"), grpc.StatusCode.INVALID_ARGUMENT),
            (by_hand(budget=1 << 20), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            call = rig.stub.Generate(wanted, timeout=LIMIT_S)
            got: list[router_pb2.Delivery] = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for delivery in call:
                    got.append(delivery)  # noqa: PERF401 - kept also when the call fails
            assert status(caught) is code
            assert [one.WhichOneof("event") for one in got] == ["error"]
            assert got[0].error.code == code.value[0]
            assert caught.value.details() == got[0].error.message


async def test_a_caller_that_leaves_cancels_its_request() -> None:
    async with running(None) as rig:
        call = rig.stub.Generate(by_hand(), timeout=10 * LIMIT_S)
        job = await rig.worker.next()
        job.accept()
        call.cancel()
        await asyncio.wait_for(job.cancelled.wait(), LIMIT_S)
        job.route.close()


async def test_cancel_finds_a_request_wherever_it_came_from() -> None:
    async with running(None) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Cancel(router_pb2.CancelRequest(request_id="nobody"), timeout=LIMIT_S)
        assert status(caught) is grpc.StatusCode.NOT_FOUND
        assert read_error(caught.value).reason == "NOT_ACTIVE"
        stream = await rig.ingress.submit()
        job = await rig.worker.next()
        call = rig.stub.Generate(by_hand(request_id="mine"), timeout=LIMIT_S)
        other = await rig.worker.next()
        for request_id in (stream.request_id, "mine"):
            await rig.stub.Cancel(router_pb2.CancelRequest(request_id=request_id), timeout=LIMIT_S)
        assert type(await stream.end()).__name__ == "CancelledDelivery"
        assert [one.WhichOneof("event") for one in await read(call)] == ["cancelled"]
        for one in (job, other):
            await asyncio.wait_for(one.cancelled.wait(), LIMIT_S)
            one.route.close()


async def explain(rig: Rig, tokens: list[int], **changes: Any) -> router_pb2.ExplainResponse:
    asked = router_pb2.ExplainRequest(**{"model": "m", "tokens": tokens, "max_new_tokens": 16, **changes})
    answer: router_pb2.ExplainResponse = await rig.stub.Explain(asked, timeout=LIMIT_S)
    return answer


async def test_explain_shows_every_term_the_chain_and_what_was_pruned() -> None:
    async with running(None, None) as rig:
        tokens = list(range(600))
        rig.catalog.publish(tokens[:-1])
        chain = plan(root(FINGERPRINT, "00" * 32), tokens[:-1])
        near, far = rig.workers
        near.resident = (Resident(chain.chunks[0].hash, 256, Tier.GPU, FINGERPRINT),)
        near.beat = replace(
            near.beat, tiers=(TierCost(Tier.OBJECT, 5.0, 1_000.0), TierCost(Tier.GPU, 0.5, 1_000_000.0))
        )
        near.say()
        far.load = replace(far.load, queue_ms=40.0)
        far.say()
        await eventually(lambda: len(rig.router.observatory.fleet.index) == 1, "residency")
        await eventually(lambda: rig.router.observatory.fleet.views()["w1"].load.queue_ms == 40.0, "load")
        answer = await explain(rig, tokens)
        assert answer.revision == rig.catalog.revision and answer.infeasible == ""
        by_key = {(one.worker, common_pb2.Tier.Name(one.tier).removeprefix("TIER_")): one for one in answer.ranked}
        assert set(by_key) == {("w0", "GPU"), ("w0", "OBJECT"), ("w0", "NONE"), ("w1", "OBJECT"), ("w1", "NONE")}
        resident, restored, computed = by_key["w0", "GPU"], by_key["w0", "OBJECT"], by_key["w1", "NONE"]
        assert (resident.cached_tokens, resident.compute_tokens, resident.load_ms) == (256, 344, 0.0)
        # 599 processed tokens: two chunks and a tail of 80 (592), two nodes of them on top of what is resident.
        assert (restored.cached_tokens, restored.cached_bytes, restored.compute_tokens) == (592, 2_000, 8)
        assert restored.load_ms == pytest.approx(5.0 + 2_000 / 1_000)
        assert restored.restore_ms == pytest.approx(0.5 + 2_000 / 1_000_000)
        assert (computed.cached_tokens, computed.compute_tokens) == (0, 600) and 0.0 <= computed.queue_ms <= 40.0
        for one in answer.ranked:
            terms = max(one.queue_ms, one.load_ms) + one.restore_ms + one.compute_tokens * one.prefill_ms_per_token
            assert one.ttft_ms == pytest.approx((terms + one.first_token_ms) * one.correction, rel=1e-5)
            assert (one.page_tokens, one.free_pages, one.max_context) == (16, 1_000, 8_192)
        assert [one.ttft_ms for one in answer.ranked] == sorted(one.ttft_ms for one in answer.ranked)
        assert {one.reason for one in answer.pruned} == {"dominated"}
        (shown,) = answer.chains
        assert (shown.fingerprint, shown.root) == (FINGERPRINT, chain.base)
        assert [(one.hash, one.start, one.end, one.tail) for one in shown.nodes] == [
            (one.hash, one.start, one.end, one.is_tail) for one in chain.nodes
        ]
        assert all(one.durable for one in shown.nodes)
        # It is an explanation of what really happens.
        asked = request(600, 16, tokens=tuple(tokens))
        stream = await rig.ingress.submit(asked)
        jobs = {"w0": near, "w1": far}
        best = answer.ranked[0]
        job = await jobs[best.worker].next()
        assert int(job.offer.candidate.tier) == best.tier == common_pb2.Tier.TIER_OBJECT
        # The offer carries the nodes to restore: from the first not resident to the boundary.
        wanted = chain.nodes[1:] if best.worker == "w0" else chain.nodes
        assert [node.chunk.hash for node in job.offer.chain] == [one.hash for one in wanted]
        job.run()
        await stream.completed(16)


async def test_explain_says_why_nothing_is_feasible_and_what_is_wrong_with_the_question() -> None:
    async with running() as rig:
        assert "no worker serves" in (await explain(rig, [1, 2, 3])).infeasible
        assert "8192" in (await explain(rig, [1, 2, 3], max_new_tokens=10_000)).infeasible
        rig.catalog.names["two"] = [model(), model("cd" * 32)]
        assert len((await explain(rig, [1, 2, 3], model="two")).chains) == 2
        for changes, code in (
            ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND),
            ({"tokens": []}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"tenant_salt": "xyz"}, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await explain(rig, **{"tokens": [1, 2], **changes})
            assert status(caught) is code
        await rig.catalog.stop()
        assert (await explain(rig, [1, 2, 3])).revision == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await explain(rig, [1], model="never heard of")
        assert status(caught) is grpc.StatusCode.UNAVAILABLE
        assert read_error(caught.value).retry_after_s == 1.0


async def test_list_workers() -> None:
    async with running(None, None) as rig:
        rig.worker.resident = (Resident("ef" * 32, 256, Tier.GPU, FINGERPRINT),)
        rig.worker.say()
        await eventually(lambda: len(rig.router.observatory.fleet.index) == 1, "residency")
        answer = await rig.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=LIMIT_S)
        assert answer.revision == rig.catalog.revision
        assert [one.endpoint.worker for one in answer.workers] == ["w0", "w1"]
        shown = answer.workers[0]
        assert (shown.tunnels, shown.resident, shown.listed) == (2, 1, True)
        assert (shown.heartbeat.epoch, shown.heartbeat.lanes, len(shown.heartbeat.resident)) == (1, 4, 0)
        assert shown.heartbeat.load.pages.free == 1_000 and shown.heard_ms < 10_000
        assert shown.endpoint.address == rig.worker.address
