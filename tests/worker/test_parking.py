"""Who waits for a prefix that another one is on its way to: every way the other one may end, and what waiting costs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import cast

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.segue.v1 import common_pb2, worker_pb2
from libs.controller.protocol import AssignmentId, DeclineReason, GenerationRequest, ResultStatus, Tier
from libs.controller.worker_table import Phase
from services.worker.endpoint.parking import Parking
from services.worker.handlers import Job, QueueState, RestoreEnd, Runtime
from services.worker.pages.admission import Awaited, Wanted, _common
from services.worker.pages.pool import PagePool
from services.worker.pages.route import Continuation
from services.worker.pages.sizing import GroupSpec, PageSizes
from tests.worker.pool_device import key
from tests.worker.rig import SALT, Exchange, Running, routing, running, until
from tests.worker.test_restoring import Scripted, chain, scripted

PROMPT = tuple(range(1_500))
SHARED = 1_280
"""Its full chunks."""
COSTS = {"echo_prefill_ms": 0.1, "step_tokens": 64, "lanes": 4, "echo_pages": 2_048}


def parked(worker: Running) -> int:
    return len(worker.worker.interpreter.parking)


async def has_lane(worker: Running, exchange: Exchange) -> None:
    machine = worker.worker.interpreter.machine
    await until(lambda: machine.phase(exchange.offer.assignment) is Phase.PREFILLING)


async def test_a_restore_that_fails_is_gone_on_with_as_a_computation_and_waited_for() -> None:
    restorer = Scripted([(3, RestoreEnd.GONE), (0, RestoreEnd.UNAVAILABLE)], gate=asyncio.Event())
    async with running(scripted(restorer), **{**COSTS, "echo_prefill_ms": 0.5}) as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 3, name="r1", tier=Tier.SSD, cached=1_488, chain=chain(worker))
        await first.accepted()
        second = await router.offer((*PROMPT[:1_400], 7), 3, name="r2")
        await second.accepted()
        assert parked(worker) == 1
        assert restorer.gate is not None
        restorer.gate.set()
        failed, result = await asyncio.gather(first.finish(), second.finish())
        assert failed.status is ResultStatus.COMPLETED and failed.usage.computed_tokens == 1_500
        assert (result.usage.cached_tokens, result.usage.computed_tokens) == (SHARED, 121)
        await worker.rest()


@pytest.mark.parametrize("resident", [0, 512])
async def test_whose_restore_brings_nothing_waits_for_who_computes_the_same(resident: int) -> None:
    restorer = Scripted([(0, RestoreEnd.GONE)])
    async with running(scripted(restorer), **{**COSTS, "echo_prefill_ms": 0.5}) as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 3, name="r1")
        await first.accepted()
        await until(lambda: min(found.end for found in worker.worker.engine.pool.inflight()) > resident)
        nodes = chain(worker, end=SHARED, start=resident)
        second = await router.offer((*PROMPT[:1_400], 7), 3, name="r2", tier=Tier.SSD, cached=SHARED, chain=nodes)
        await second.accepted()
        computed, result = await asyncio.gather(first.finish(), second.finish())
        assert computed.usage.computed_tokens == 1_500
        assert (result.usage.cached_tokens, result.usage.computed_tokens) == (SHARED, 121), "it is computed twice"
        await worker.rest()


async def test_whose_restore_brings_a_part_waits_for_who_computes_the_rest() -> None:
    restorer = Scripted([(1, RestoreEnd.GONE), (None, RestoreEnd.DONE)])
    async with running(scripted(restorer), **{**COSTS, "echo_prefill_ms": 0.5}) as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 3, name="r1")
        await first.accepted()
        nodes = chain(worker, end=SHARED)
        second = await router.offer((*PROMPT[:1_400], 7), 3, name="r2", tier=Tier.SSD, cached=SHARED, chain=nodes)
        await second.accepted()
        computed, result = await asyncio.gather(first.finish(), second.finish())
        assert computed.usage.computed_tokens == 1_500
        assert result.usage.restored_tokens == 256
        assert (result.usage.cached_tokens, result.usage.computed_tokens) == (SHARED, 121), "the rest is computed twice"
        await worker.rest()


async def test_what_a_restore_brings_is_begun_with_at_once() -> None:
    restorer = Scripted([(None, RestoreEnd.DONE)], gate=asyncio.Event())
    async with running(scripted(restorer), **{**COSTS, "echo_prefill_ms": 5.0}) as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 3, name="r1", tier=Tier.SSD, cached=1_488, chain=chain(worker))
        await first.accepted()
        second = await router.offer((*PROMPT[:1_285], 7), 3, name="r2")
        await second.accepted()
        assert parked(worker) == 1 and restorer.gate is not None
        restorer.gate.set()
        restored, result = await asyncio.gather(first.finish(), second.finish())
        assert restored.usage.restored_tokens == 1_488
        assert (result.usage.cached_tokens, result.usage.computed_tokens) == (SHARED, 6)
        await worker.rest()


async def test_a_slow_restore_is_waited_for_as_long_as_computing_takes_and_then_one_computes_for_all() -> None:
    restorer = Scripted([(None, RestoreEnd.DONE)], gate=asyncio.Event())
    async with running(scripted(restorer), **COSTS) as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 3, name="r1", tier=Tier.SSD, cached=1_488, chain=chain(worker))
        await first.accepted()
        others = [await router.offer((*PROMPT[:1_400], 7 + i), 3, name=f"r{2 + i}") for i in range(5)]
        for other in others:
            await other.accepted()
        assert parked(worker) == 5
        results = await asyncio.gather(*(other.finish() for other in others))
        assert worker.worker.interpreter.machine.phase(first.offer.assignment) is Phase.RESTORING, "it never came"
        assert [one.usage.computed_tokens for one in results] == [1_401, *[121] * 4]
        assert restorer.gate is not None
        restorer.gate.set()
        assert (await first.finish()).usage.restored_tokens == 1_488
        await worker.rest()


async def test_a_declined_leader_is_waited_for_by_nobody() -> None:
    async with running(**{**COSTS, "echo_pages": 128}) as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 2_000, name="r1")
        assert (await first.accepted()).reason is DeclineReason.INSUFFICIENT_PAGES
        second = await router.offer((*PROMPT, 7), 3, name="r2")
        assert (await second.accepted()).accepted and not parked(worker)
        assert (await second.finish()).usage.computed_tokens == 1_501
        await worker.rest()


async def test_a_deadline_that_passes_while_it_is_parked_leaves_nothing() -> None:
    async with running(**{**COSTS, "echo_prefill_ms": 1.0}) as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 3, name="r1")
        await first.accepted()
        request = common_pb2.GenerationRequest(
            request_id="r2", tokens=[*PROMPT, 7], output_start=1_501, max_new_tokens=3, tenant_salt=SALT
        )
        call = worker.stub.Generate(worker_pb2.WorkerGenerateRequest(request=request), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in call:
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert worker.worker.interpreter.parking.most == 1
        await until(lambda: not parked(worker))
        assert worker.worker.interpreter.machine.phase(first.offer.assignment) is Phase.PREFILLING
        assert (await first.finish()).usage.computed_tokens == 1_500
        await worker.rest()


async def test_when_one_after_the_other_gives_up_the_next_goes_on_from_what_they_left() -> None:
    async with running(**{**COSTS, "echo_prefill_ms": 0.5}) as worker, routing(worker) as router:
        exchanges = [await router.offer((*PROMPT, 7 + i), 3, name=f"r{i}") for i in range(5)]
        for exchange in exchanges:
            await exchange.accepted()
        computed = 0
        for number in range(3):
            await has_lane(worker, exchanges[number])
            assert parked(worker) == 4 - number, "one computes, the others wait for it"
            exchanges[number].cancel()
            assert (await exchanges[number].finish()).status is ResultStatus.CANCELLED
        results = [await exchange.finish() for exchange in exchanges[3:]]
        computed = [result.usage.computed_tokens for result in results]
        assert computed[0] <= 1_501 and computed[1] == 221
        await worker.rest()


async def test_a_lost_tunnel_takes_the_leader_and_those_of_another_go_on() -> None:
    async with running(**{**COSTS, "echo_prefill_ms": 0.5}) as worker, routing(worker) as router:
        async with routing(worker) as other:
            first = await other.offer(PROMPT, 3, name="r1")
            await first.accepted()
            exchanges = [await router.offer((*PROMPT, 7 + i), 3, name=f"s{i}") for i in range(3)]
            for exchange in exchanges:
                await exchange.accepted()
            await has_lane(worker, first)
            assert parked(worker) == 3
        results = [await exchange.finish() for exchange in exchanges]
        assert [result.usage.computed_tokens for result in results[1:]] == [221, 221]
        await worker.rest()


# --- what the queue says, and what waiting costs ---


async def test_the_queue_counts_what_is_parked_and_what_is_restored_once() -> None:
    restorer = Scripted([(None, RestoreEnd.DONE)], gate=asyncio.Event())
    async with running(scripted(restorer), **{**COSTS, "echo_prefill_ms": 4.0}) as worker, routing(worker) as router:
        first = await router.offer(PROMPT, 3, name="r1", tier=Tier.SSD, cached=1_488, chain=chain(worker))
        await first.accepted()
        assert worker.worker.interpreter.load().queue_ms == 12 * 4.0, "behind its chain"
        for i in range(2):
            await (await router.offer((*PROMPT[:1_400], 7 + i), 3, name=f"p{i}")).accepted()
        assert parked(worker) == 2
        assert worker.worker.interpreter.load().queue_ms == (12 + 2 * 121) * 4.0
        assert restorer.gate is not None
        restorer.gate.set()
        await until(lambda: not parked(worker))
        assert worker.worker.interpreter.load().queue_ms <= (12 + 2 * 121) * 4.0, (
            "what they share is not computed again"
        )


async def test_a_hundred_that_wait_are_looked_at_when_there_is_news_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[AssignmentId] = Counter()
    awaits = PagePool.awaits

    def counted(pool: PagePool, of: AssignmentId, without: object = ()) -> Awaited | None:
        asked[of] += 1
        return awaits(pool, of, without)  # type: ignore[arg-type]

    monkeypatch.setattr(PagePool, "awaits", counted)
    costs = {**COSTS, "echo_pages": 20_000, "max_control_tasks": 200, "lanes": 8}
    async with running(**costs) as worker, routing(worker) as router:
        exchanges = [await router.offer((*PROMPT, 7, i), 2, name=f"r{i}") for i in range(101)]
        results = await asyncio.gather(*(exchange.finish() for exchange in exchanges))
        assert worker.worker.interpreter.parking.most == 100
        # Those whose turn comes when another has ended begin behind its last whole tail, farther on.
        assert results[0].usage.computed_tokens == 1_502
        assert {result.usage.computed_tokens for result in results[1:]} <= {222, 14}
        # Once when they came, once when the prefix was there; the leader passed many boundaries before.
        assert worker.worker.engine.runtime.steps > 50  # type: ignore[attr-defined]
        assert max(asked.values()) <= 3
        await worker.rest()


def test_of_several_on_the_way_to_a_boundary_the_nearest_tells_when_it_is_there() -> None:
    pool = PagePool([GroupSpec("full", 0, 400)], PageSizes(16, 256, 2_048))
    of = Continuation("ff", "11" * 32, "")
    for number in (1, 2):
        pool.reserve(key(number), Wanted(of, (*PROMPT[:1_000], number), 1), 1.0)
    pages = pool.job_pages(key(1))
    pages.begin()
    pages.prepare(600)
    pages.computed(600)
    found = {(one.end, one.remaining) for one in pool.inflight()}
    assert found == {(768, 168)}, "one entry a boundary, and none that is there"
    assert pool.awaits(key(2)) is not None and pool.awaits(key(1)) is None
    assert pool.awaits(key(2), without={key(1)}) is None


class Queue:
    """As a runtime says how long its queue is: nobody's patience lasts."""

    def queue(self, coming: Sequence[int] = ()) -> QueueState:
        return QueueState(0.0, 0, 0)


async def test_who_has_waited_too_long_is_still_known_to_begin_behind_what_is_there() -> None:
    """Its leader was only slower than predicted: routers must not be told that all of its prompt is ahead of them."""
    pool = PagePool([GroupSpec("full", 0, 400)], PageSizes(16, 256, 2_048))
    of = Continuation("ff", "11" * 32, "")
    submitted: list[Job] = []
    parking = Parking(pool, cast(Runtime, Queue()), submitted.append, tuple)
    for number in (1, 2):
        tokens = (*PROMPT[:1_100], number)
        pool.reserve(key(number), Wanted(of, tokens, 1), 1.0)
    pages = pool.job_pages(key(1))
    pages.begin()
    assert parking.park(Job(key(2), GenerationRequest("r2", "m", tokens, 1_101, 1), pool.job_pages(key(2))))
    for end in (512, 1_024):
        await asyncio.sleep(0)  # for its timer
        assert not submitted
        pages.prepare(end)
        pages.computed(end)
        parking.look()
    assert [job.likely for job in submitted] == [1_024]


@given(st.lists(st.sampled_from("ab"), max_size=12), st.lists(st.sampled_from("ab"), max_size=12), st.integers(0, 12))
def test_the_common_part_of_two_chains(one: list[str], other: list[str], shared: int) -> None:
    """As hashes of a chain are: equal only where all before is."""

    def hashed(words: list[str]) -> list[str]:
        return ["".join(words[: index + 1]) for index in range(len(words))]

    mine, theirs = hashed(one), hashed(one[:shared] + other)
    expected = sum(1 for here, there in zip(mine, theirs, strict=False) if here == there)
    assert _common(mine, theirs) == _common(theirs, mine) == expected
