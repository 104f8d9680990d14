"""Decisions: measured, logged one line each, kept in memory (the newest), and appended to the recorded facts."""

from __future__ import annotations

from collections import deque

from libs.controller.router_effects import Decision, RecordDecision
from libs.service.logs import get_logger
from services.router.decision_batches import DecisionBatches
from services.router.metrics import RouterMetrics

log = get_logger(__name__)


class Decisions:
    """`newest`: decisions, oldest first. `kept`: how many of them."""

    def __init__(self, kept: int, metrics: RouterMetrics, batches: DecisionBatches) -> None:
        self.newest: deque[Decision] = deque(maxlen=kept)
        self._metrics = metrics
        self._batches = batches

    def record(self, effect: RecordDecision) -> None:
        """One plan and what came of it."""
        decision = effect.decision
        self.newest.append(decision)
        self._metrics.decided(decision)
        self._batches.add(decision)
        last = decision.attempts[-1]
        chosen = decision.ranked[last.choice].candidate
        log.info(
            "decision",
            request_id=decision.request_id,
            plan=decision.plan_id,
            model=decision.model,
            prompt_tokens=decision.prompt_tokens,
            resumed_at=decision.resumed_at,
            ranked=len(decision.ranked),
            attempts=",".join(f"{record.attempt}:{record.outcome.value}" for record in decision.attempts),
            worker=chosen.worker,
            tier=chosen.tier.name.lower(),
            cached_tokens=chosen.cached_tokens,
            predicted_ttft_ms=round(last.predicted_ttft_ms, 1),
            measured_ttft_ms=None if last.measured_ttft_ms is None else round(last.measured_ttft_ms, 1),
            **({"detail": last.detail} if last.detail else {}),
        )
