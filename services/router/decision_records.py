"""A decision as its recorded fact: the whole snapshot the policy ranked, and what came of it.

What is written down is enough to run the policy again: every ranked candidate, its terms in full precision, the
workers that were to be avoided, what near ties were drawn by. Never a token, a salt or a tenant.
"""

from __future__ import annotations

from libs.contracts.segue.v1 import catalog_pb2, common_pb2
from libs.controller.router_effects import AttemptRecord, Decision, Outcome
from libs.controller.wire_fields import to_proto

_DETAIL = 500
"""Characters kept of a worker's words."""

_OUTCOMES: dict[Outcome, catalog_pb2.AttemptOutcome] = {
    Outcome.COMPLETED: catalog_pb2.ATTEMPT_OUTCOME_COMPLETED,
    Outcome.DECLINED: catalog_pb2.ATTEMPT_OUTCOME_DECLINED,
    Outcome.TIMED_OUT: catalog_pb2.ATTEMPT_OUTCOME_TIMED_OUT,
    Outcome.WORKER_LOST: catalog_pb2.ATTEMPT_OUTCOME_WORKER_LOST,
    Outcome.WORKER_RETIRED: catalog_pb2.ATTEMPT_OUTCOME_WORKER_RETIRED,
    Outcome.ROUTE_DROPPED: catalog_pb2.ATTEMPT_OUTCOME_ROUTE_DROPPED,
    Outcome.FAILED: catalog_pb2.ATTEMPT_OUTCOME_FAILED,
    Outcome.CANCELLED: catalog_pb2.ATTEMPT_OUTCOME_CANCELLED,
    Outcome.DEADLINE: catalog_pb2.ATTEMPT_OUTCOME_DEADLINE,
}


def record_of(decision: Decision, router: str, decided_ms: int) -> catalog_pb2.DecisionRecord:
    """decided_ms: unix ms."""
    chosen = decision.ranked[decision.attempts[-1].choice].candidate
    record = catalog_pb2.DecisionRecord(
        request_id=decision.request_id,
        plan_id=decision.plan_id,
        decided_ms=decided_ms,
        router=router,
        model=decision.model,
        fingerprint=chosen.fingerprint,
        worker=chosen.worker,
        prompt_tokens=decision.prompt_tokens,
        resumed_at=decision.resumed_at,
        facts_revision=decision.revision,
        avoid=decision.avoid,
        drawn_by=decision.draw.name,
        seat=decision.draw.seat,
        band_ms=decision.draw.band_ms,
        draw_tokens=decision.draw.tokens,
        held_ms=decision.held_ms,
    )
    for option in decision.ranked:
        candidate = option.candidate
        shown = to_proto(candidate)
        assert isinstance(shown, common_pb2.Candidate)
        record.ranked.append(shown)
        record.terms.add(
            queue_ms=candidate.queue_ms,
            load_ms=candidate.load_ms,
            restore_ms=candidate.restore_ms,
            prefill_ms_per_token=candidate.prefill_ms_per_token,
            first_token_ms=candidate.first_token_ms,
            ttft_ms=candidate.ttft_ms,
            uncorrected_queue_ms=option.uncorrected_queue_ms,
        )
    for pruned in decision.pruned:
        record.pruned.add(reason=pruned.reason, count=pruned.count)
    for attempt in decision.attempts:
        _add(record, attempt)
    return record


def _add(record: catalog_pb2.DecisionRecord, attempt: AttemptRecord) -> None:
    usage, timings = to_proto(attempt.usage), to_proto(attempt.timings)
    assert isinstance(usage, common_pb2.Usage) and isinstance(timings, common_pb2.Timings)
    record.attempts.add(
        attempt=attempt.attempt,
        choice=attempt.choice,
        outcome=_OUTCOMES[attempt.outcome],
        decline=attempt.decline.value,  # the contract has the same numbers
        detail=attempt.detail[:_DETAIL],
        predicted_ttft_ms=attempt.predicted_ttft_ms,
        measured_ttft_ms=attempt.measured_ttft_ms,
        usage=usage,
        timings=timings,
    )
