"""What becomes of a request that no worker with a tunnel could run: the pool's policy, applied to plans.

`hold`: it waits in the machine's queue, and is refused with UNAVAILABLE once it has waited for the policy's time, or at
once if as many wait as may. `fail`: it is refused at once. `direct`: workers of the endpoint map that serve its model
are candidates, unheard (but for those an operator drains): their offers go over calls of their own; without any it is
held. A request that has tokens already is never refused: that would throw away what its requester has. It waits for its
variant until its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from libs.controller.catalog_facts import Endpoint
from libs.controller.protocol import Candidate, GenerationRequest, RankedCandidate, Tier
from libs.controller.router_effects import PlanRequested
from libs.controller.router_events import Obstacle, ObstacleKind, Plan
from libs.pool.knobs import NoCoverage, PoolPolicy


class Uncovered:
    """See the module.

    `endpoints`: those of the endpoint map that may be called; `wake`: lets those who wait be planned again; `live`:
    whether a request is under way.
    """

    def __init__(
        self,
        policy: Callable[[], PoolPolicy],
        endpoints: Callable[[], Sequence[Endpoint]],
        wake: Callable[[], None],
        live: Callable[[str], bool],
    ) -> None:
        self.refused = 0
        self._policy = policy
        self._endpoints = endpoints
        self._wake = wake
        self._live = live
        self._held: dict[str, tuple[float, asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._held)

    def judge(self, effect: PlanRequested, plan: Plan, fingerprints: Sequence[str]) -> Plan:
        """The plan, or what policy puts in its place."""
        request_id = effect.request_id
        blocked = plan.obstacle is not None and plan.obstacle.kind is ObstacleKind.NO_WORKER
        policy = self._policy()
        if blocked and policy.no_coverage is NoCoverage.DIRECT:
            ranked = self._unheard(effect.request, fingerprints, effect.avoid)
            if ranked:
                self._release(request_id)
                return Plan(ranked)
        if not blocked or effect.fingerprint:
            self._release(request_id)
            return plan
        if policy.no_coverage is NoCoverage.FAIL:
            return self._refuse(request_id, 0.0)
        return self._hold(request_id, plan, policy)

    def changed(self) -> None:
        """Policy or endpoints are others: who is held may be answered differently now."""
        if self._held:
            self._wake()

    def _hold(self, request_id: str, plan: Plan, policy: PoolPolicy) -> Plan:
        loop, wait_s = asyncio.get_running_loop(), policy.no_coverage_wait_s
        known = self._held.get(request_id)
        if known is None and len(self._held) >= policy.hold_max:
            return self._refuse(request_id, 0.0)
        since = known[0] if known is not None else loop.time()
        if loop.time() - since >= wait_s:
            return self._refuse(request_id, wait_s)
        if known is not None:
            known[1].cancel()  # the wait may be another by now
        timer = loop.call_later(since + wait_s - loop.time(), self._due, request_id)
        self._held[request_id] = (since, timer)
        return plan

    def _due(self, request_id: str) -> None:
        if self._live(request_id):
            self._wake()
        else:
            self._held.pop(request_id, None)

    def _refuse(self, request_id: str, waited_s: float) -> Plan:
        self._release(request_id)
        self.refused += 1
        detail = f"no worker can be reached that serves its model (waited {waited_s:g} s); try again later"
        return Plan(obstacle=Obstacle(ObstacleKind.NO_COVERAGE, detail))

    def _release(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held[1].cancel()

    def _unheard(
        self, request: GenerationRequest, fingerprints: Sequence[str], avoid: Sequence[str]
    ) -> tuple[RankedCandidate, ...]:
        """Workers in the map, each as if it had nothing of the prompt; those not tried yet first."""
        length = len(request.tokens)
        found = {  # a worker may be in the map more than once
            (fingerprint, one.worker): Candidate(one.worker, one.epoch, fingerprint, Tier.NONE, compute_tokens=length)
            for fingerprint in fingerprints
            for one in self._endpoints()
            if fingerprint in one.models
        }
        ranked = sorted(found.values(), key=lambda one: (one.worker in avoid, one.worker))
        return tuple(RankedCandidate(candidate) for candidate in ranked)
