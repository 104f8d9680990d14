"""Readiness and admission: may traffic come at all, and what becomes of a bind that no writer can take.

At the first start all required cells must have their minimum; after ``partial_after_s``, if policy allows, those that
have it are served while the others are refilled. Not readiness: all floors reached. Once up, the pool stays ready as
long as policy lets it serve with what is left; a pool without any serving writer is never ready.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from .coverage import Cover
from .knobs import NoCoverage, PoolPolicy
from .model import Cell


class State(StrEnum):
    """Of the pool as a whole."""

    NO_MAP = "no-map"  # none was read yet
    EMPTY_MAP = "empty-map"  # nothing to connect to
    STARTING = "starting"  # never was ready
    READY = "ready"
    DEGRADED = "degraded"  # ready, but not every required cell is covered
    LOST = "lost"  # was ready; not enough is left
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class Readiness:
    """``missing``: required cells below their minimum."""

    state: State
    missing: tuple[Cell, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether traffic should come."""
        return self.state in (State.READY, State.DEGRADED)

    def __str__(self) -> str:
        return f"{self.state.value} (without a tunnel: {', '.join(self.missing)})" if self.missing else self.state.value


class Gate:
    """The owner of whether the pool ever was ready, and since when it has had a map."""

    def __init__(self) -> None:
        self.ever_ready = False
        self.map_since: float | None = None
        self.now: Readiness = Readiness(State.NO_MAP)

    def update(self, policy: PoolPolicy, cells: Collection[Cell], found: Cover, mapped: bool, now: float) -> bool:
        """Judge anew; whether readiness changed. ``cells``: of the map; ``mapped``: whether one was taken."""
        before = self.now
        self.now = self._judge(policy, cells, found, mapped, now)
        self.ever_ready = self.ever_ready or self.now.ready
        return self.now != before

    def close(self) -> None:
        """No more admission."""
        self.now = Readiness(State.CLOSING)

    def _judge(self, policy: PoolPolicy, cells: Collection[Cell], found: Cover, mapped: bool, now: float) -> Readiness:
        if self.now.state is State.CLOSING:
            return self.now
        required = sorted(policy.required_cells or cells)
        missing = tuple(cell for cell in required if found.cells[cell] < policy.survivability_min)
        if not mapped:
            return Readiness(State.NO_MAP, missing)
        if not cells and not sum(found.endpoints.values()):
            return Readiness(State.LOST if self.ever_ready else State.EMPTY_MAP, missing)
        if self.map_since is None:
            self.map_since = now
        if not missing:
            return Readiness(State.READY)
        served = any(found.cells.values())
        patient = not self.ever_ready and now - self.map_since < policy.partial_after_s
        if policy.serve_partial and served and not patient:
            return Readiness(State.DEGRADED, missing)
        return Readiness(State.LOST if self.ever_ready else State.STARTING, missing)


class Refusal(StrEnum):
    """Why a bind is refused."""

    NO_COVERAGE = "no-coverage"
    TOO_MANY_HELD = "too-many-held"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait for a writer, this long at most."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Direct:
    """Go round the pool: a call of its own for this one request."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """No."""

    why: Refusal


Admission = Hold | Direct | Refuse


def without_writer(policy: PoolPolicy, readiness: Readiness, held: int, waited_s: float) -> Admission:
    """What becomes of a bind that no writer can take. ``held``: others that wait; ``waited_s``: by this one so far."""
    if readiness.state is State.CLOSING:
        return Refuse(Refusal.CLOSING)
    if policy.no_coverage is NoCoverage.DIRECT:
        return Direct()
    if policy.no_coverage is NoCoverage.FAIL:
        return Refuse(Refusal.NO_COVERAGE)
    if waited_s >= policy.no_coverage_wait_s:
        return Refuse(Refusal.NO_COVERAGE)
    if held >= policy.hold_max:
        return Refuse(Refusal.TOO_MANY_HELD)
    return Hold(policy.no_coverage_wait_s - waited_s)
