"""Decisions: what is appended is found again, by whatever one remembers of it, and nothing else is."""

from __future__ import annotations

import random

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import common_pb2
from services.catalog.facts.decisions import Query
from tests.catalog.rig import Rig, code, hex_id

WORKERS = ("w0", "w1", "w2")


def decision(request_id: str, decided_ms: int, *attempts: tuple[str, int, int], plan: int = 1) -> pb.DecisionRecord:
    """attempts: worker, outcome, decline reason."""
    record = pb.DecisionRecord(
        request_id=request_id, plan_id=plan, decided_ms=decided_ms, router="r1", model="gemma", prompt_tokens=700
    )
    for i, (worker, outcome, decline) in enumerate(attempts):
        record.ranked.add(worker=worker, ttft_ms=12.5 + i, queue_ms=0.1, tier=common_pb2.TIER_SSD, cached_tokens=512)
        attempt = record.attempts.add(attempt=i + 1, choice=i, outcome=outcome, decline=decline)
        attempt.predicted_ttft_ms = 12.5 + i
        if outcome == pb.ATTEMPT_OUTCOME_COMPLETED:
            attempt.measured_ttft_ms = 14.25
            record.worker = worker
    return record


def completed(request_id: str, decided_ms: int, worker: str = "w0") -> pb.DecisionRecord:
    return decision(request_id, decided_ms, (worker, pb.ATTEMPT_OUTCOME_COMPLETED, 0))


def declined_then_completed(request_id: str, decided_ms: int) -> pb.DecisionRecord:
    full = common_pb2.DECLINE_REASON_QUEUE_FULL
    return decision(
        request_id,
        decided_ms,
        ("w1", pb.ATTEMPT_OUTCOME_DECLINED, full),
        ("w2", pb.ATTEMPT_OUTCOME_COMPLETED, 0),
    )


async def test_a_record_comes_back_whole(catalog: Rig) -> None:
    record = declined_then_completed("req-1", 1_000)
    appended = await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=[record]))
    found = await catalog.stub.GetDecision(pb.GetDecisionRequest(request_id="req-1"))
    assert list(found.records) == [record]
    assert found.revision and appended.revision
    body = await catalog.store.read(appended.key)
    assert body is not None and len(body) == appended.size and body.count(b"\n") == 1


async def test_appending_again_changes_nothing(catalog: Rig) -> None:
    records = [completed(f"req-{i}", 5_000 + i) for i in range(20)]
    first = await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=records))
    random.Random(1).shuffle(records)
    again = await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=records))
    assert again.key == first.key
    assert len((await catalog.stub.ListDecisions(pb.ListDecisionsRequest(page_size=100))).records) == 20


async def test_the_list_pages_newest_first_over_batches(catalog: Rig) -> None:
    expected = []
    for batch in range(4):
        records = [completed(f"req-{batch}-{i}", 10_000 * batch + i + 1, WORKERS[i % 3]) for i in range(10)]
        expected = [*(r.request_id for r in reversed(records)), *expected]
        await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=records))
    got, token = [], ""
    while True:
        page = await catalog.stub.ListDecisions(pb.ListDecisionsRequest(page_size=7, page_token=token))
        got += [r.request_id for r in page.records]
        token = page.next_page_token
        if not token:
            break
    assert got == expected


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({"request_id": "req-3"}, {"req-3"}),
        ({"worker": "w1"}, {"req-3"}),
        ({"decline": common_pb2.DECLINE_REASON_QUEUE_FULL}, {"req-3"}),
        ({"outcome": pb.ATTEMPT_OUTCOME_DECLINED}, {"req-3"}),
        ({"from_ms": 1_001, "until_ms": 1_003}, {"req-1", "req-2"}),
        ({"model": "other"}, set()),
        ({"worker": "w1", "from_ms": 1_004}, set()),
    ],
)
async def test_the_list_filters(catalog: Rig, filters: dict, wanted: set[str]) -> None:
    records = [completed(f"req-{i}", 1_000 + i) for i in range(3)] + [declined_then_completed("req-3", 1_003)]
    for batch in (records[:2], records[2:]):
        await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=batch))
    found = await catalog.stub.ListDecisions(pb.ListDecisionsRequest(**filters))
    assert {r.request_id for r in found.records} == wanted


async def test_an_unknown_request_is_not_found_and_a_bad_batch_refused(catalog: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await catalog.stub.GetDecision(pb.GetDecisionRequest(request_id="nobody"))
    assert code(failure) is grpc.StatusCode.NOT_FOUND
    wrong = completed("req", 1_000)
    wrong.attempts[0].choice = 4
    termless = completed("req", 1_000)
    termless.terms.add()
    termless.terms.add()
    for records in ([], [termless], [wrong], [completed("", 1)], [completed("req", 0)]):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=records))
        assert code(failure) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_damaged_batch_is_reported_and_passed_over(catalog: Rig) -> None:
    await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=[completed("kept", 1_000)]))
    lost = await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=[completed("lost", 2_000)]))
    await catalog.store.remove(lost.key)
    await catalog.store.put_if_absent(lost.key, b'{"request_id":"forged"}\n')
    found = await catalog.stub.ListDecisions(pb.ListDecisionsRequest())
    assert [r.request_id for r in found.records] == ["kept"]
    assert catalog.metric("segue_catalog_unreadable_decisions_total") == 1
    # Sealed once more, it takes the place of whatever a writer that died has left there.
    again = await catalog.stub.AppendDecisions(pb.AppendDecisionsRequest(records=[completed("lost", 2_000)]))
    found = await catalog.stub.ListDecisions(pb.ListDecisionsRequest())
    assert again.key == lost.key and {r.request_id for r in found.records} == {"kept", "lost"}


@given(data=st.data())
def test_the_index_never_rules_out_a_batch_with_a_match(data: st.DataObject) -> None:
    """The index is built by `append` from these very fields; here by hand, over every combination of filters."""
    times = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    records = [
        decision(hex_id(2), at, (data.draw(st.sampled_from(WORKERS)), data.draw(st.integers(1, 9)), 0)) for at in times
    ]
    index: dict[str, object] = {
        "declines": [],
        "first_ms": min(times),
        "last_ms": max(times),
        "models": ["gemma"],
        "outcomes": [a.outcome for r in records for a in r.attempts],
        "requests": "",
        "workers": [c.worker for r in records for c in r.ranked],
    }
    query = Query(
        from_ms=data.draw(st.integers(0, 50)),
        until_ms=data.draw(st.integers(0, 50)),
        worker=data.draw(st.sampled_from(("", *WORKERS))),
        outcome=data.draw(st.integers(0, 9)),
    )
    if any(query.holds(record) for record in records):
        assert query.may_hold(index)
