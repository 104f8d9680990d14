"""What a worker measures wrong persistently, learned from measured against predicted times. Pure.

Theory of operation
===================

Per worker and term (queue, restore, prefill, first token) there are fading sums of measured and of uncorrected
predicted ms; their ratio is the correction, bounded, and frozen while the predicted queue is an overload's: then it is
the queue that is mispredicted, and learning would blame the worker.

A ratio of a hundred measurements is itself off by a few percent. Among workers that are equally fast, the one whose
ratio happens to be low would get every long prompt that nobody has begun; among a thousand the lowest is far off. So
a worker is believed to differ from its like (the workers that serve the same model) only as far as its measurements
show it. What is compared is its *level*: measured time per *nominal* ms, which is what the worker predicts over its
unit, the mean of its own table, so that two workers that say different things of equal hardware can be found equal.
The noise of a level comes from its own residuals. A deviation d from the median of the like, with noise s, is believed
to be d · max(0, 1 - (z·s/d)²): nothing below z·s, all of what is far beyond (the non-negative garrote of Breiman,
1995). One slow worker among equals stays slow; where hardware is mixed, the median is between and each keeps its own.

What a worker says now differs from what it said while it was measured: by the noise of its reports, or because it has
become slower. The same rule tells one from the other, by how far its reports scatter.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from libs.controller.knobs import POLICY_KNOBS, PolicyKnobs
from libs.controller.protocol import Candidate, Tier, Timings


@dataclass(slots=True)
class Correction:
    """Measured/predicted ratios of one worker."""

    queue: float = 1.0
    restore: float = 1.0
    prefill: float = 1.0
    first: float = 1.0


_NEUTRAL = Correction()
_TERMS = ("queue", "restore", "prefill", "first")
_WITH_UNIT = (1, 2, 3)  # those that have one


@dataclass(frozen=True, slots=True)
class Said:
    """What a worker says of a prompt token and of a decode step, ms, as means of its tables, and of a byte from its
    tiers; and the noise of the first two as shares, after smoothing.
    """

    prefill_ms: float
    first_ms: float
    byte_ms: float = 0.0
    prefill_noise: float = 0.0
    first_noise: float = 0.0


@dataclass(slots=True)
class _Sums:
    """Fading sums of one worker and term; `residual` of squares. The ratio of sums, since of short times the ratio says
    little: a prompt of ten tokens that shares its iteration takes twenty times as long as by itself.

    `believed_ms`: what is believed of a nominal ms, with what is said now.
    """

    measured_ms: float
    said_ms: float  # as the worker's costs had it
    nominal: float  # the same over the worker's unit
    residual: float
    level: float
    believed_ms: float

    def add(self, nominal: float, measured_ms: float, unit_ms: float, kept: float) -> None:
        """One more pair."""
        off = measured_ms - self.level * nominal
        self.measured_ms = kept * self.measured_ms + measured_ms
        self.said_ms = kept * self.said_ms + nominal * unit_ms
        self.nominal = kept * self.nominal + nominal
        self.residual = kept * kept * self.residual + off * off
        self.level = self.measured_ms / self.nominal

    @property
    def noise(self) -> float:
        """Of the level: one standard deviation."""
        return math.sqrt(self.residual) / self.nominal


@dataclass(slots=True)
class _Known:
    """Of one worker: the like that it counts among, its sums by term, and what it says now: units and their noise."""

    like: str
    sums: tuple[_Sums, ...]
    units: tuple[float, ...]
    noises: tuple[float, ...]
    levels: tuple[list[float], ...] = ()  # of its like, by term
    correction: Correction = field(default_factory=Correction)


class Corrections:
    """By worker; an unknown one is taken at its word."""

    def __init__(self, knobs: PolicyKnobs = POLICY_KNOBS) -> None:
        self.knobs = knobs
        self.changed: set[str] = set()  # workers whose ratios are not what they were when this was last emptied
        self._known: dict[str, _Known] = {}
        self._levels: dict[str, tuple[list[float], ...]] = {}  # by like: of each term, ascending

    def of(self, worker: str) -> Correction:
        """The worker's ratios, to read."""
        known = self._known.get(worker)
        return _NEUTRAL if known is None else known.correction

    def forget(self, worker: str) -> None:
        """A new process measures anew."""
        known = self._known.pop(worker, None)
        if known is not None:
            self._leave(known)
        self.changed.add(worker)

    def reported(self, worker: str, said: Said) -> None:
        """The worker has reported its costs anew."""
        known = self._known.get(worker)
        if known is None:
            return
        known.units, known.noises = _units(said), _noises(said)
        for number in _WITH_UNIT:
            self._believe(known, number)

    def learn(self, candidate: Candidate, timings: Timings, said: Said, beyond_ms: float = 0.0) -> None:
        """One completed attempt. Predictions in `candidate` carry the corrections they were made with, and in the first
        token `beyond_ms` that no worker has measured; `timings` is the worker's own.
        """
        if candidate.queue_ms > self.knobs.overload_queue_ms:
            return
        known = self._known_of(candidate, said)
        self.changed.add(candidate.worker)
        # A wait that a load hides is not waited.
        waited = max(0.0, candidate.queue_ms - candidate.load_ms)
        restored = candidate.load_ms + candidate.restore_ms
        computed = candidate.compute_tokens * candidate.prefill_ms_per_token
        # What waits for a prefix that is being computed loads nothing: all of it is measured as a wait.
        if candidate.tier is not Tier.INFLIGHT:
            self._next(known, 0, waited, timings.queue_ms)
            self._next(known, 1, restored, timings.restore_ms)
        self._next(known, 2, computed, timings.prefill_ms)
        self._next(known, 3, candidate.first_token_ms - beyond_ms, timings.first_token_ms)

    def _known_of(self, candidate: Candidate, said: Said) -> _Known:
        known, like = self._known.get(candidate.worker), candidate.fingerprint
        units, noises = _units(said), _noises(said)
        if known is None:
            prior, doubt = self.knobs.correction_prior_ms, self.knobs.correction_prior_noise
            sums = tuple([_Sums(prior, prior, prior / unit, (doubt * prior) ** 2, unit, unit) for unit in units])
            known = self._known[candidate.worker] = _Known(like, sums, units, noises)
        elif known.like == like:
            known.units, known.noises = units, noises
            return known
        else:
            self._leave(known)
            known.like, known.units, known.noises = like, units, noises
        known.levels = self._levels.setdefault(like, tuple([[] for _ in _TERMS]))
        for levels, one in zip(known.levels, known.sums, strict=True):
            insort(levels, one.level)
        return known

    def _leave(self, known: _Known) -> None:
        for levels, one in zip(known.levels, known.sums, strict=True):
            del levels[bisect_left(levels, one.level)]
        if not known.levels[0]:
            del self._levels[known.like]

    def _next(self, known: _Known, number: int, predicted_ms: float, measured_ms: float) -> None:
        knobs, sums = self.knobs, known.sums[number]
        if predicted_ms < knobs.correction_floor_ms or measured_ms <= 0:
            return
        levels = known.levels[number]
        del levels[bisect_left(levels, sums.level)]
        # Of something that took many times as long, not all is the worker's usual time.
        measured_ms = min(measured_ms, knobs.correction_most * predicted_ms)
        # The prediction contains what was believed.
        sums.add(predicted_ms / sums.believed_ms, measured_ms, known.units[number], 1 - knobs.correction_alpha)
        insort(levels, sums.level)
        self._believe(known, number)

    def _believe(self, known: _Known, number: int) -> None:
        knobs, sums, unit, levels = self.knobs, known.sums[number], known.units[number], known.levels[number]
        middle = len(levels) // 2
        usual = levels[middle] if len(levels) % 2 else (levels[middle - 1] + levels[middle]) / 2
        level = believed(sums.level, usual, knobs.correction_doubt * sums.noise)
        # What it says now over what it said while it was measured.
        change = believed(unit * sums.nominal / sums.said_ms, 1.0, knobs.correction_doubt * known.noises[number])
        ratio = min(knobs.correction_high, max(knobs.correction_low, level * change / unit))
        sums.believed_ms = ratio * unit
        setattr(known.correction, _TERMS[number], ratio)


def _units(said: Said) -> tuple[float, ...]:
    # A worker that says its work takes no time has no unit.
    return (1.0, said.byte_ms or 1.0, said.prefill_ms or 1.0, said.first_ms or 1.0)


def _noises(said: Said) -> tuple[float, ...]:
    return (0.0, 0.0, said.prefill_noise, said.first_noise)


def believed(level: float, usual: float, doubt: float) -> float:
    """A level that is off by chance by `doubt`, where `usual` is the rule."""
    off = level - usual
    return usual if abs(off) <= doubt else usual + off * (1 - (doubt / off) ** 2)
