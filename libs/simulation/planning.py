"""Plans of a simulated router: the live policy over what this router has heard, and the catalog's facts.

As the live planner: the model's name is known once the catalog has said it; facts are remembered; a request whose
prefix a ready worker holds in its pages is planned at once, any other after a look-up, which is not waited for beyond a
budget.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

from libs.controller import candidates
from libs.controller.coverage import covered, from_residency
from libs.controller.facts import FactCache
from libs.controller.fleet import Fleet
from libs.controller.knobs import FactKnobs
from libs.controller.protocol import GenerationRequest, RankedCandidate, Tier
from libs.controller.router_effects import PlanRequested
from libs.controller.router_events import Obstacle, ObstacleKind, Plan
from libs.simulation import declared

if TYPE_CHECKING:
    from libs.simulation.world import World

_BUDGET_MS = 50.0
_FACTS = FactKnobs(replica_ttl_ms=500.0)


class Misplan(IntEnum):
    """How a plan can be a bad one."""

    REVERSED = 0  # the worst candidate first
    OTHER_MODEL = 1  # a model the workers do not have
    OLD_EPOCH = 2  # processes that are gone
    BELIEVES_RESIDENT = 3  # pages the workers do not hold
    NO_ROOM = 4  # nothing feasible, though there is
    NO_QUEUE = 5  # predicts a queue of 0 and takes the busiest first


class Planner:
    """Of one router process."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self.world, self.fleet = world, fleet
        self.facts = FactCache(_FACTS)
        self.misplans: list[Misplan] = []
        self._model = declared.model(
            max(spec.claims_context or spec.context for spec in world.schedule.settings.workers)
        )
        self._named = False

    def duration(self, effect: PlanRequested) -> float:
        """How long until `plan` can be asked for this one: with facts, if there are any to wait for."""
        if not effect.fresh or (self._named and self._covered(effect)):
            return 0.1
        catalog_ms = 2 * self.world.schedule.settings.catalog_ms
        away = self.world.catalog.away_until > self.world.agenda.now + catalog_ms
        return _BUDGET_MS if away else catalog_ms

    def plan(self, effect: PlanRequested) -> Plan:
        """The plan, now."""
        request = effect.request
        answers = self.world.catalog.away_until <= self.world.agenda.now
        self._named = self._named or answers
        if not self._named:
            return Plan(obstacle=Obstacle(ObstacleKind.CATALOG_AWAY, "no catalog has answered yet"))
        if request.model != declared.MODEL_NAME:
            return candidates.plan(request, (), self.fleet, self.world.agenda.now, effect.avoid)
        partial = effect.fresh and self._covered(effect)
        entry = self._variant(request)
        if effect.fresh and not partial and answers:
            nodes, tail = self.world.catalog.look_up(entry.chain)
            found = (*nodes, tail) if tail is not None else nodes
            self.facts.put(declared.FINGERPRINT, found, self.world.agenda.now)
        else:
            nodes = self.facts.known(
                declared.FINGERPRINT, [link.hash for link in entry.chain.chunks], self.world.agenda.now
            ).nodes
            tail = None
            if len(nodes) == len(entry.chain.chunks):
                tails = (self.facts.node(declared.FINGERPRINT, link.hash) for link in reversed(entry.chain.tails()))
                tail = next((node for node in tails if node is not None), None)
        entry = replace(entry, nodes=nodes, tail=tail)
        plan = candidates.plan(request, (entry,), self.fleet, self.world.agenda.now, effect.avoid, herd=effect.herd)
        if partial:
            plan = from_residency(request, plan, effect.avoid, self.fleet.knobs) or plan
        return self._spoilt(plan)

    def _covered(self, effect: PlanRequested) -> bool:
        if effect.whole or effect.herd is not None or effect.request.model != declared.MODEL_NAME:
            return False
        return covered(effect.request, self._variant(effect.request), self.fleet, self.world.agenda.now, effect.avoid)

    def _variant(self, request: GenerationRequest) -> candidates.Variant:
        return candidates.Variant(self._model, declared.chain(request.tokens[: request.processed]))

    def _spoilt(self, plan: Plan) -> Plan:
        if not self.misplans:
            return plan
        how = self.misplans.pop(0)
        if how is Misplan.NO_ROOM:
            return Plan(obstacle=Obstacle(ObstacleKind.NO_CAPACITY, "said to have no room"))
        ranked = plan.ranked
        if not ranked:
            return plan
        if how is Misplan.REVERSED:
            return replace(plan, ranked=ranked[::-1])
        if how is Misplan.NO_QUEUE:
            by_queue = sorted(ranked, key=lambda option: -option.candidate.queue_ms)
            return replace(plan, ranked=tuple(replace(option, uncorrected_queue_ms=0.0) for option in by_queue))
        return replace(plan, ranked=tuple(_altered(option, how) for option in ranked))


def _altered(option: RankedCandidate, how: Misplan) -> RankedCandidate:
    candidate = option.candidate
    if how is Misplan.OTHER_MODEL:
        return replace(option, candidate=replace(candidate, fingerprint="0" * 64))
    if how is Misplan.OLD_EPOCH:
        return replace(option, candidate=replace(candidate, epoch=max(0, candidate.epoch - 1)))
    length = candidate.cached_tokens + candidate.compute_tokens
    return replace(option, chain=(), candidate=replace(candidate, tier=Tier.GPU, cached_tokens=max(1, length - 1)))
