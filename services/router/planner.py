"""Plans: a request's name, its chain, the catalog's facts, then `libs.controller.candidates`.

The machine asks for a plan and always gets one; a catalog that is away or slow makes it a poorer plan (what is
remembered, or recompute), never a failed request. Only a name that was never heard of cannot be planned without it: the
request waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from libs.continuation.errors import IdentityError
from libs.controller import candidates
from libs.controller.candidates import Variant
from libs.controller.catalog_facts import Model
from libs.controller.coverage import covered, from_residency
from libs.controller.fleet import Fleet
from libs.controller.knobs import POLICY_KNOBS
from libs.controller.protocol import GenerationRequest
from libs.controller.router_effects import PlanRequested
from libs.controller.router_events import Obstacle, ObstacleKind, Plan, Planned, RouterEvent
from libs.service.logs import get_logger
from services.router.clock import Spawn, now_ms
from services.router.lookups import Lookups
from services.router.metrics import RouterMetrics
from services.router.names import CatalogAwayError, Names
from services.router.spans import RequestSpans
from services.router.uncovered import Uncovered

_BY_HAND_S = 2.0
"""An explanation waits for the catalog longer than a request does."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Explanation:
    """A plan and what it was made from. `revision` 0 = the catalog did not answer."""

    plan: Plan
    variants: tuple[Variant, ...]
    revision: int


class Planner:
    """See the module."""

    def __init__(
        self,
        names: Names,
        lookups: Lookups,
        fleet: Fleet,
        feed: Callable[[RouterEvent], None],
        spawn: Spawn,
        spans: RequestSpans,
        metrics: RouterMetrics,
        budget_s: float,
        uncovered: Uncovered,
    ) -> None:
        self._names = names
        self._lookups = lookups
        self._fleet = fleet
        self._feed = feed
        self._spawn = spawn
        self._spans = spans
        self._metrics = metrics
        self._budget_s = budget_s
        self._uncovered = uncovered

    def plan(self, effect: PlanRequested) -> None:
        """Starts a plan; its answer is fed as `Planned`."""
        self._spawn(self._answer(effect), "plan")

    async def explain(self, request: GenerationRequest) -> Explanation:
        """The plan a request would get now. Raises CatalogAwayError, IdentityError."""
        models = await self._names.resolve(request.model)
        entries = [candidates.variant(model, request) for model in models]
        found = await asyncio.gather(
            *(self._lookups.complete(entry, request, _BY_HAND_S, always=True) for entry in entries)
        )
        variants = tuple(one.entry for one in found)
        plan = candidates.plan(request, variants, self._fleet, now_ms())
        return Explanation(plan, variants, min((one.revision for one in found), default=0))

    async def _answer(self, effect: PlanRequested) -> None:
        with self._spans.planning(effect.request_id, effect.plan_id) as span:
            plan = await self._make(effect)
            span.set_attribute("segue.ranked", len(plan.ranked))
            if plan.obstacle is not None:
                span.set_attribute("segue.obstacle", plan.obstacle.kind.value)
        self._feed(Planned(effect.request_id, effect.plan_id, plan))

    async def _make(self, effect: PlanRequested) -> Plan:
        began = time.perf_counter()
        request = effect.request
        try:
            models = await self._names.resolve(request.model)
        except CatalogAwayError as error:
            return Plan(obstacle=Obstacle(ObstacleKind.CATALOG_AWAY, str(error)))
        if effect.fingerprint:
            models = self._pinned(models, effect.fingerprint)
            if not models:
                detail = f"the variant of model {request.model!r} that began this stream is not known any more"
                return Plan(obstacle=Obstacle(ObstacleKind.NO_WORKER, detail))
        hashed = time.perf_counter()
        entries = _variants(models, request)
        computed = time.perf_counter() - hashed
        ranking = time.perf_counter()
        revision = 0
        plan = self._partial(entries, effect)
        if plan is None:
            if effect.fresh:
                asked = (self._lookups.complete(entry, request, self._budget_s) for entry in entries)
                found = await asyncio.gather(*asked)
                entries = [one.entry for one in found]
                revision = max((one.revision for one in found), default=0)
            else:
                entries = [self._lookups.remembered(entry, request) for entry in entries]
            ranking = time.perf_counter()
            plan = candidates.plan(request, entries, self._fleet, now_ms(), effect.avoid, POLICY_KNOBS, effect.herd)
        ended = time.perf_counter()
        self._metrics.planned(ended - began, computed + ended - ranking)
        plan = replace(plan, revision=revision)
        return self._uncovered.judge(effect, plan, [entry.model.fingerprint for entry in entries])

    def _partial(self, entries: Sequence[Variant], effect: PlanRequested) -> Plan | None:
        """A plan from residency alone; None where the catalog's facts could matter."""
        request = effect.request
        # Who was held for a prefix is dealt among all who can fetch it, and not sent to the one who has it.
        if effect.whole or effect.herd is not None:
            return None
        if not any(covered(request, entry, self._fleet, now_ms(), effect.avoid) for entry in entries):
            return None
        entries = [self._lookups.remembered(entry, request) for entry in entries]
        plan = candidates.plan(request, entries, self._fleet, now_ms(), effect.avoid, POLICY_KNOBS)
        partial = from_residency(request, plan, effect.avoid, POLICY_KNOBS)
        if partial is not None:
            self._metrics.lookup("covered")
        return partial

    def _pinned(self, models: Sequence[Model], fingerprint: str) -> tuple[Model, ...]:
        """The variant a stream has begun with, also if its name does not list it any more."""
        named = tuple(model for model in models if model.fingerprint == fingerprint)
        remembered = self._names.model(fingerprint)
        return named or ((remembered,) if remembered is not None else ())


def _variants(models: Sequence[Model], request: GenerationRequest) -> list[Variant]:
    entries = []
    for model in models:
        try:
            entries.append(candidates.variant(model, request))
        except IdentityError as error:
            log.error("a variant of the model cannot be hashed", fingerprint=model.fingerprint, reason=str(error))
    return entries
