"""Decisions: measured, logged one line each, kept in memory (the newest), and appended to the recorded facts.

What a plan was made under (workers to avoid, the facts' revision) is remembered from the plan until its decision is
recorded or its request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from libs.controller.router_effects import Decision, PlanRequested, RecordDecision
from libs.service.logs import get_logger
from services.router.decision_batches import DecisionBatches
from services.router.decision_records import Circumstances
from services.router.metrics import RouterMetrics

log = get_logger(__name__)


class Decisions:
    """`newest`: decisions, oldest first. `kept`: how many of them. `live`: whether a request is under way."""

    def __init__(
        self, kept: int, metrics: RouterMetrics, batches: DecisionBatches, live: Callable[[str], bool]
    ) -> None:
        self.newest: deque[Decision] = deque(maxlen=kept)
        self._metrics = metrics
        self._batches = batches
        self._live = live
        self._under: dict[str, Circumstances] = {}  # of the newest plan, by request

    def planned(self, effect: PlanRequested, revision: int) -> None:
        """A plan was made, from the catalog's facts of that revision; 0 = from memory."""
        known = self._under.get(effect.request_id)
        if self._live(effect.request_id) and (known is None or known.plan_id < effect.plan_id):
            self._under[effect.request_id] = Circumstances(effect.plan_id, effect.avoid, revision)

    def delivered(self, request_id: str) -> None:
        """A terminal delivery: nothing more is decided, unless it refused a repetition of what is under way."""
        if not self._live(request_id):
            self._under.pop(request_id, None)

    def __len__(self) -> int:
        """Requests whose newest plan is remembered."""
        return len(self._under)

    def record(self, effect: RecordDecision) -> None:
        """One plan and what came of it."""
        decision = effect.decision
        self.newest.append(decision)
        self._metrics.decided(decision)
        under = self._under.get(decision.request_id)
        self._batches.add(decision, under if under and under.plan_id == decision.plan_id else None)
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
