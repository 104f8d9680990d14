"""What first tokens take beyond the measured terms, learned from whole attempts: by tier, and each worker's way. Pure.

Theory of operation
===================

An attempt costs something that no rate shows. Its offer goes to the worker and the first delta comes back (the *way*);
it is handed to the device loop (the *handoff*); its pages are reserved, a restore looks its objects up, a first
iteration of few rows takes longer than rows times their price (what is fixed of its *tier*). On a large model that is
little beside a prompt. On a small one, or where nearly all of a prompt is resident, it is most of what there is, and
the same for all requests that begin in the same way.

Each is learned as a median over the last attempts: of what measured times had more than predictions, each weighing as
much as a millisecond matters to it (1 / predicted), so that half of all predictions are too high and half too low. A
median does not see the one attempt in ten that met a full disk or a scheduler.

A tier that was seldom measured is taken for the usual one of its model, and nothing for cheaper than what is resident:
else the tier of which nothing is known would look best, and what happened to be computed in a calm minute better than
what is there. What was to be restored and proved resident is one more measurement of what is resident.

A wait is no part of it where one was predicted: a queue that is mispredicted says nothing of the tier. Handoff and
tiers are learned for all workers of a model together: they tell tiers apart and never workers, so that nobody gets the
work for having been lucky. A way is the worker's own, but believed only as far as it clearly differs from all ways of
the model's workers (`corrections.believed`): else the first few attempts on a process that was still cold would keep
it from getting any more, and so from being measured again. For the same reason an attempt that had to wait for others
never makes a way longer: where many are offered at once their messages wait for each other, and who got most of them
would be thought far away for good.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

from libs.controller.corrections import believed
from libs.controller.knobs import POLICY_KNOBS, PolicyKnobs
from libs.controller.protocol import Candidate, Tier, Timings

NOTHING = (0.0,) * len(Tier)
_LEAST_MS = 0.1
_LEAST_SHARE = 0.1  # of a first token's own time that a negative fixed time leaves
_NORMAL = 1.4826  # a standard deviation over the median distance from the median, where errors are normal
_MEDIAN = 1.2533  # the standard error of a median over that of a mean
_READS = frozenset({Tier.RAM, Tier.SSD, Tier.PEER, Tier.OBJECT})

Samples = deque[tuple[float, float]]
"""Ms and weights, the oldest first."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """What one prediction had of it: of a model's tier, with the handoff; the handoff; of the worker, its way. Ms."""

    fixed_ms: float = 0.0
    handoff_ms: float = 0.0
    way_ms: float = 0.0


@dataclass(slots=True)
class _Model:
    tiers: dict[Tier, Samples] = field(default_factory=dict)
    every: Samples = field(default_factory=deque)  # of all tiers
    handoffs: Samples = field(default_factory=deque)
    ways: dict[str, deque[float]] = field(default_factory=dict)  # by worker
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)  # by worker: of its ways, with their noise
    all_ways: deque[float] = field(default_factory=deque)
    usual_way_ms: float = 0.0
    handoff_ms: float = 0.0
    of: tuple[float, ...] = NOTHING
    medians: dict[Tier, tuple[float, float]] = field(default_factory=dict)  # by tier: what was usual, and its own then


class FixedCosts:
    """By model. One that was never measured takes nothing."""

    def __init__(self, knobs: PolicyKnobs = POLICY_KNOBS) -> None:
        self.knobs = knobs
        self._models: dict[str, _Model] = {}

    def of(self, fingerprint: str) -> tuple[float, ...]:
        """Ms of a first token, by tier: the handoff too."""
        model = self._models.get(fingerprint)
        return NOTHING if model is None else model.of

    def way_ms(self, fingerprint: str, worker: str) -> float:
        """To the worker and back, as far as believed."""
        model = self._models.get(fingerprint)
        own = None if model is None else model.ways.get(worker)
        if model is None or not own:
            return 0.0 if model is None else model.usual_way_ms
        level, noise = self._level(model, worker, own)
        return believed(level, model.usual_way_ms, self.knobs.correction_doubt * noise)

    def predicted(self, candidate: Candidate, way_ms: float) -> Beyond:
        """What a candidate that is offered now has of it, whose worker's way was believed to be `way_ms`."""
        model = self._models.get(candidate.fingerprint)
        if model is None:
            return Beyond(way_ms=way_ms)
        fixed_ms = part_of(candidate.first_token_ms, model.of[candidate.tier])
        return Beyond(fixed_ms, model.handoff_ms, way_ms)

    def learn(self, candidate: Candidate, timings: Timings, way_ms: float, beyond: Beyond) -> None:
        """One completed attempt, predicted with `beyond`. Its first token was measured with the way."""
        knobs = self.knobs
        if candidate.queue_ms > knobs.overload_queue_ms or timings.first_token_ms <= 0:
            return
        model = self._models.setdefault(candidate.fingerprint, _Model())
        ways = model.ways.get(candidate.worker)
        if candidate.queue_ms <= 0 or not ways or way_ms <= self._level(model, candidate.worker, ways)[0]:
            self._went(model, candidate.worker, way_ms)
        tier = candidate.tier
        measured = timings.prefill_ms + timings.first_token_ms
        own = candidate.compute_tokens * candidate.prefill_ms_per_token + candidate.first_token_ms - beyond.fixed_ms
        if tier in _READS and timings.restore_ms <= 0:
            tier = Tier.GPU
        elif tier in _READS:
            measured += timings.restore_ms
            own += candidate.load_ms + candidate.restore_ms
        # Whoever is loaded while lanes decode waits again for what is left of their step, and that was not predicted.
        hidden = tier in _READS and candidate.load_ms >= candidate.queue_ms
        idle = candidate.queue_ms <= 0 and tier is not Tier.INFLIGHT
        if idle or hidden:
            measured += timings.queue_ms
            own += beyond.handoff_ms
        weight = 1 / max(_LEAST_MS, own)
        if idle:
            self._more(model.handoffs, timings.queue_ms, weight)
            model.handoff_ms = self._median(model.handoffs, 0.0)
        model.medians.pop(tier, None)
        for samples, times in ((model.tiers.setdefault(tier, deque()), 1), (model.every, 4)):
            self._more(samples, measured - own, weight, times)
        # On a slow device all of it is longer.
        bound = max(knobs.fixed_bound_ms, candidate.first_token_ms - beyond.fixed_ms)
        model.of = self._of(model, bound)

    def forget(self, worker: str) -> None:
        """Another process may be elsewhere."""
        for model in self._models.values():
            model.ways.pop(worker, None)
            model.levels.pop(worker, None)

    def _level(self, model: _Model, worker: str, ways: deque[float]) -> tuple[float, float]:
        """Of a worker's ways, and its noise."""
        known = model.levels.get(worker)
        if known is None:
            level = median(ways)
            scatter = _NORMAL * median([abs(one - level) for one in ways])
            # Of a few that happen to be equal nothing is known.
            known = model.levels[worker] = (level, _MEDIAN * (scatter + level / len(ways)) / math.sqrt(len(ways)))
        return known

    def _went(self, model: _Model, worker: str, way_ms: float) -> None:
        model.levels.pop(worker, None)
        for ways, most in (
            (model.ways.setdefault(worker, deque()), self.knobs.way_window),
            (model.all_ways, 4 * self.knobs.way_window),
        ):
            ways.append(way_ms)
            if len(ways) > most:
                ways.popleft()
        model.usual_way_ms = median(model.all_ways)

    def _of(self, model: _Model, bound: float) -> tuple[float, ...]:
        usual = self._median(model.every, 0.0)
        found = [usual] * len(Tier)
        for tier, samples in model.tiers.items():
            known = model.medians.get(tier)
            if known is None or known[0] != usual:
                known = model.medians[tier] = (usual, self._median(samples, usual))
            found[tier] = known[1]
        least = found[Tier.GPU]
        found = [max(one, least) for one in found]
        return tuple([min(bound, max(-bound, one + model.handoff_ms)) for one in found])

    def _more(self, samples: Samples, ms: float, weight: float, times: int = 1) -> None:
        samples.append((ms, weight))
        if len(samples) > times * self.knobs.fixed_window:
            samples.popleft()

    def _median(self, samples: Collection[tuple[float, float]], prior_ms: float) -> float:
        """By weight: not less than half of it lies at or below. The prior stands for a few of the samples' weight."""
        if not samples:
            return prior_ms
        whole = sum([weight for _, weight in samples])
        few = max(0, self.knobs.fixed_window - len(samples)) * self.knobs.fixed_prior / self.knobs.fixed_window
        ordered = sorted([*samples, (prior_ms, few * whole / len(samples))])
        half, passed = sum([weight for _, weight in ordered]) / 2, 0.0
        for value, weight in ordered:
            passed += weight
            if passed >= half * (1 - 1e-9):
                return value
        return ordered[-1][0]


def first_ms(own_ms: float, fixed_ms: float) -> float:
    """A first token with what is fixed."""
    return max(own_ms + fixed_ms, _LEAST_SHARE * own_ms)


def part_of(first_token_ms: float, fixed_ms: float) -> float:
    """How much of such a first token is the fixed time: less where all of a negative one would have left nothing."""
    return max(fixed_ms, first_token_ms * (1 - 1 / _LEAST_SHARE))
