"""Decisions on their way to the catalog: whole, in batches, bounded, never waited for, never with a secret in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.controller import candidates
from libs.controller.protocol import Candidate, DeclineReason, RankedCandidate, Tier, Timings, Usage
from libs.controller.router_effects import AttemptRecord, Decision, Outcome
from libs.service.channel import open_channel
from libs.service.transport import Transport
from services.router.clock import now_ms
from services.router.decision_batches import DecisionBatches
from services.router.decision_records import record_of
from tests.controller.world import random_world
from tests.router.fake_catalog import FakeCatalog, fake_catalog
from tests.router.fake_worker import Job
from tests.router.rig import eventually, request, running

SALT = "5a17" * 16


def decision(name: str, ranked: int = 2) -> Decision:
    options = tuple(
        RankedCandidate(Candidate(f"w{i}", 1, "ab" * 32, Tier.NONE, ttft_ms=10.0 + i), (), 3.0) for i in range(ranked)
    )
    attempt = AttemptRecord(
        1, 0, Outcome.COMPLETED, DeclineReason.UNSPECIFIED, "", 10.0, 12.0, Usage(8, 0, 0, 8, 4), Timings(ttft_ms=11.0)
    )
    return Decision(name, 7, "acme", "m", 8, 0, now_ms(), options, (), (attempt,))


@asynccontextmanager
async def batches(catalog: FakeCatalog, queue: int = 100, interval_s: float = 0.0) -> AsyncIterator[DecisionBatches]:
    channel = open_channel(catalog.address, Transport())
    under_test = DecisionBatches(channel, "r1", queue, interval_s)
    task = asyncio.create_task(under_test.run())
    try:
        yield under_test
    finally:
        task.cancel()
        await asyncio.wait({task})
        await channel.close(None)
    assert task.cancelled() or task.exception() is None


async def test_what_was_decided_is_appended_whole() -> None:
    before = time.time() * 1_000
    decline = lambda job: job.decline(DeclineReason.QUEUE_FULL)  # noqa: E731
    async with running(decline, Job.run, decisions_interval_s=0.0) as rig:
        wanted = request(300, 4, tenant="acme", tenant_salt=SALT)
        stream = await rig.ingress.submit(wanted)
        await stream.completed(4)
        await eventually(lambda: rig.metric("decisions_appended_total") >= 1, "appended")
        (record,) = rig.catalog.decisions
        assert (record.request_id, record.model, record.prompt_tokens) == (wanted.request_id, "m", 300)
        assert before - 1 <= record.decided_ms <= time.time() * 1_000 + 1
        assert record.router == rig.worker.routers[0] and record.facts_revision == rig.catalog.revision
        assert {one.worker for one in record.ranked} == {"w0", "w1"} and len(record.terms) == len(record.ranked)
        outcomes = [(a.outcome, a.decline) for a in record.attempts]
        assert outcomes[-1] == (pb.ATTEMPT_OUTCOME_COMPLETED, 0) and record.worker == "w1"
        last = record.attempts[-1]
        assert last.measured_ttft_ms > 0 and last.predicted_ttft_ms == pytest.approx(record.terms[last.choice].ttft_ms)
        assert (last.usage.generated_tokens, last.timings.ttft_ms) == (4, 3.0)
        kept = rig.router.decisions.newest[-1]
        for terms, option in zip(record.terms, kept.ranked, strict=True):
            assert terms.queue_ms == option.candidate.queue_ms and terms.ttft_ms == option.candidate.ttft_ms
        # Neither its tenant nor the tenant's salt, in whatever field or form.
        assert kept.tenant == "acme" and "acme" not in str(record) and SALT[:16] not in str(record)
        assert rig.metric("decisions_appended_total") == 1 and rig.metric("decisions_waiting") == 0


async def test_a_worker_that_failed_a_request_is_recorded_as_avoided() -> None:
    # With one tunnel to each, its end is its worker's; of several the first to break drops its routes and says no more.
    async with running(None, None, decisions_interval_s=0.0, pool_writers_per_endpoint=1) as rig:
        stream = await rig.ingress.submit(request(8, 4))
        first = await _next(rig.workers)
        first.accept()
        first.delta(2)
        await stream.until(2)
        await first.worker.kill()
        second = await _next([worker for worker in rig.workers if worker is not first.worker])
        second.run()
        await stream.completed(4)
        await eventually(lambda: len(rig.catalog.decisions) == 2, "both plans")
        lost, resumed = rig.catalog.decisions
        assert (lost.attempts[-1].outcome, list(lost.avoid)) == (pb.ATTEMPT_OUTCOME_WORKER_LOST, [])
        assert list(resumed.avoid) == [first.worker.name] and resumed.resumed_at == 2


async def _next(workers: list) -> Job:  # type: ignore[type-arg]
    """The first offer that any of them gets."""
    waiting = {asyncio.create_task(worker.next()) for worker in workers}
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    return done.pop().result()


async def test_the_queue_is_bounded_and_drops_the_oldest_counted() -> None:
    async with fake_catalog() as catalog:
        catalog.append_fails = grpc.StatusCode.UNAVAILABLE
        async with batches(catalog, queue=10) as under_test:
            under_test.add(decision("first"))
            await eventually(lambda: under_test.counters.failures >= 2, "the catalog is away")
            for i in range(25):
                under_test.add(decision(f"r{i}"))
            assert (under_test.counters.dropped, under_test.counters.waiting) == (15, 11)
            catalog.append_fails = None
            await eventually(lambda: under_test.counters.waiting == 0, "appended")
            assert [one.request_id for one in catalog.decisions] == ["first", *(f"r{i}" for i in range(15, 25))]
            assert under_test.counters.appended == 11 and under_test.counters.batches == 2


async def test_large_decisions_are_bounded_too() -> None:
    async with fake_catalog() as catalog:
        catalog.append_fails = grpc.StatusCode.UNAVAILABLE
        async with batches(catalog, queue=100_000) as under_test:
            large = decision("large", ranked=6_000)
            for _ in range(12):
                under_test.add(large)
            assert under_test.counters.dropped == 2


async def test_a_batch_waits_for_company_and_is_cut_where_it_is_full() -> None:
    async with fake_catalog() as catalog, batches(catalog, queue=2_000, interval_s=3_600) as under_test:
        for i in range(499):
            under_test.add(decision(f"r{i}"))
        await asyncio.sleep(0)
        assert catalog.appends == 0
        for i in range(499, 1_100):
            under_test.add(decision(f"r{i}"))
        await eventually(lambda: under_test.counters.appended == 1_000, "two full batches")
        assert (catalog.appends, under_test.counters.waiting) == (2, 100)
        await under_test.flush(10)
        assert [one.request_id for one in catalog.decisions] == [f"r{i}" for i in range(1_100)]


async def test_a_refused_batch_is_counted_and_not_repeated() -> None:
    async with fake_catalog() as catalog, batches(catalog) as under_test:
        catalog.append_fails = grpc.StatusCode.INVALID_ARGUMENT
        under_test.add(decision("bad"))
        await eventually(lambda: under_test.counters.refused == 1, "refused")
        catalog.append_fails = None
        under_test.add(decision("good"))
        await eventually(lambda: under_test.counters.appended == 1, "appended")
        assert [one.request_id for one in catalog.decisions] == ["good"] and under_test.counters.waiting == 0


async def test_the_end_is_bounded_with_the_catalog_away_and_says_what_is_lost() -> None:
    async with fake_catalog() as catalog:
        catalog.append_fails = grpc.StatusCode.UNAVAILABLE
        async with batches(catalog) as under_test:
            for i in range(3):
                under_test.add(decision(f"r{i}"))
            await eventually(lambda: under_test.counters.failures >= 1, "tried")
            began = asyncio.get_running_loop().time()
            await under_test.flush(0.3)
            assert asyncio.get_running_loop().time() - began < 5
            assert (under_test.counters.dropped, under_test.counters.waiting) == (3, 0)


async def test_an_orderly_end_appends_what_waits() -> None:
    async with running(Job.run, decisions_interval_s=3_600) as rig:
        await (await rig.ingress.submit()).completed(4)
        await rig.at_rest()
        assert rig.catalog.appends == 0 and rig.metric("decisions_waiting") == 1
        await rig.router.drain(5)
        assert len(rig.catalog.decisions) == 1 and rig.metric("decisions_dropped_total") == 0


async def test_none_is_appended_where_none_is_wanted() -> None:
    async with running(Job.run, decisions_queue=0, decisions_interval_s=0.0) as rig:
        await (await rig.ingress.submit()).completed(4)
        await rig.router.drain(5)
        assert rig.catalog.appends == 0 and len(rig.router.decisions.newest) == 1


@given(seed=st.integers(0, 10_000))
def test_a_plan_of_any_world_is_recorded_whole(seed: int) -> None:
    world = random_world(seed)
    wanted = world.request
    plan = candidates.plan(wanted, (world.variant,), world.fleet, 0.0)
    if not plan.ranked:
        return
    attempt = AttemptRecord(
        1, 0, Outcome.DECLINED, DeclineReason.DRAINING, "x" * 9_999, plan.ranked[0].candidate.ttft_ms, None, Usage(),
        Timings(),
    )  # fmt: skip
    made = Decision(wanted.request_id, 3, "t", "m", 5, 1, 0.0, plan.ranked, plan.pruned, (attempt,), ("w1",), 12)
    record = record_of(made, "r", 1_000)
    assert [one.ttft_ms for one in record.terms] == [option.candidate.ttft_ms for option in plan.ranked]
    assert {one.reason: one.count for one in record.pruned} == {one.reason: one.count for one in plan.pruned}
    assert not record.attempts[0].HasField("measured_ttft_ms") and len(record.attempts[0].detail) == 500
    assert (list(record.avoid), record.facts_revision, record.resumed_at) == (["w1"], 12, 1)
