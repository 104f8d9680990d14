"""The floor: how many writers each endpoint should have right now, and why.

Static: the configured count. Adaptive: a cell with routes or binds asks for the configured count at once; one that has
been idle for ``idle_s`` asks for ``idle_writers_per_endpoint``. A cell that came back to life does not shrink again for
``recovery_grace_s``, so a load that comes and goes does not make tunnels come and go with it. An endpoint of several
cells gets what the busiest of them asks for.

Then, in this order: every cell gets its survivability minimum, whatever the cap; the sum of all targets is held under
the cap, every endpoint's first writer before anybody's second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .knobs import FloorMode, PoolPolicy
from .model import Cell, Endpoint, EndpointKey


class Reason(StrEnum):
    """Why a target is what it is."""

    STATIC = "static"
    ACTIVE = "active"
    GRACE = "grace"  # idle, but not for long enough
    IDLE = "idle"
    CAPPED = "capped"
    SURVIVABILITY = "survivability"
    SHADOW = "shadow"  # spares for the only endpoint of a cell
    STAND_IN = "stand-in"  # for an endpoint of the same cell that cannot be reached


@dataclass(frozen=True, slots=True)
class FloorTarget:
    """Of one endpoint."""

    count: int
    reason: Reason


@dataclass(slots=True)
class CellActivity:
    """One cell's. ``restored_at``: when it last went from idle to active, or was first seen."""

    last_active: float
    restored_at: float
    idle: bool = False


class Floors:
    """The owner of what is remembered of each cell's activity."""

    def __init__(self) -> None:
        self.cells: dict[Cell, CellActivity] = {}
        self._short: frozenset[EndpointKey] = frozenset()
        self.switches = 0
        """How often a cell went idle or came back."""

    def demand(self, cells: Collection[Cell], now: float) -> bool:
        """A bind in these cells, or an attempt at one; whether that brought one of them back to life."""
        restored = False
        for cell in cells:
            activity = self.cells.get(cell)
            if activity is None:
                continue
            activity.last_active = now
            if activity.idle:
                activity.idle, activity.restored_at = False, now
                self.switches += 1
                restored = True
        return restored

    def update(self, policy: PoolPolicy, cells: Collection[Cell], busy: Collection[Cell], now: float) -> None:
        """Time passes. ``busy``: cells with a bound route."""
        for cell in [cell for cell in self.cells if cell not in cells]:
            del self.cells[cell]
        for cell in sorted(cells):
            self.cells.setdefault(cell, CellActivity(now, now))
        self.demand([cell for cell in busy if cell in self.cells], now)
        for activity in self.cells.values():
            long_idle = now - activity.last_active >= policy.idle_s
            settled = now - activity.restored_at >= policy.recovery_grace_s
            if not activity.idle and long_idle and settled:
                activity.idle = True
                self.switches += 1

    def note_short(self, short: Collection[EndpointKey], endpoints: Sequence[Endpoint], now: float) -> None:
        """These cannot be reached. Where one is reached again, those that stood in for it stay for the grace."""
        for endpoint in endpoints:
            if endpoint.key in self._short and endpoint.key not in short:
                for cell in endpoint.cells:
                    if cell in self.cells:
                        self.cells[cell].restored_at = now
        self._short = frozenset(short)

    def settled(self, policy: PoolPolicy, cells: Collection[Cell], now: float) -> bool:
        """Whether these cells are past their recovery grace: what is too many may go."""
        found = [self.cells[cell] for cell in cells if cell in self.cells]
        return all(now - activity.restored_at >= policy.recovery_grace_s for activity in found)

    def targets(
        self, policy: PoolPolicy, endpoints: Sequence[Endpoint], sole: Collection[EndpointKey], now: float
    ) -> dict[EndpointKey, FloorTarget]:
        """Of every endpoint, in the order given; ``sole``: those that are the only one of a cell."""
        wanted = {endpoint.key: self._wanted(policy, endpoint, endpoint.key in sole, now) for endpoint in endpoints}
        return _cap(policy, endpoints, _survive(policy, endpoints, wanted))

    def _wanted(self, policy: PoolPolicy, endpoint: Endpoint, sole: bool, now: float) -> FloorTarget:
        target = self._by_activity(policy, endpoint, now)
        if sole and policy.shadow_writers:
            return FloorTarget(target.count + policy.shadow_writers, Reason.SHADOW)
        return target

    def _by_activity(self, policy: PoolPolicy, endpoint: Endpoint, now: float) -> FloorTarget:
        if policy.floor_mode is FloorMode.STATIC:
            return FloorTarget(policy.writers_per_endpoint, Reason.STATIC)
        activities = [self.cells[cell] for cell in endpoint.cells if cell in self.cells]
        if activities and all(activity.idle for activity in activities):
            return FloorTarget(policy.idle_writers_per_endpoint, Reason.IDLE)
        busy = any(now - activity.last_active < policy.idle_s for activity in activities)
        return FloorTarget(policy.writers_per_endpoint, Reason.ACTIVE if busy else Reason.GRACE)


def stand_in(
    targets: Mapping[EndpointKey, FloorTarget],
    endpoints: Sequence[Endpoint],
    short: Mapping[EndpointKey, int],
) -> dict[EndpointKey, FloorTarget]:
    """What endpoints of the same cell take over for those that cannot be reached; each at most its own target again.

    ``short``: unreachable endpoints and how many writers each lacks.
    """
    result = dict(targets)
    extra: Counter[EndpointKey] = Counter()
    for failing in (endpoint for endpoint in endpoints if endpoint.key in short):
        others = [
            other
            for other in endpoints
            if other.key not in short and targets[other.key].count and set(other.cells) & set(failing.cells)
        ]
        # Of its own family first: that is the group it leaves short.
        others.sort(key=lambda other: (other.family != failing.family, other.key))
        for _ in range(short[failing.key]):
            able = [other for other in others if extra[other.key] < targets[other.key].count]
            if not able:
                break
            chosen = min(able, key=lambda other: (extra[other.key], other.family != failing.family, other.key))
            extra[chosen.key] += 1
            result[chosen.key] = FloorTarget(targets[chosen.key].count + extra[chosen.key], Reason.STAND_IN)
    return result


def _survive(
    policy: PoolPolicy, endpoints: Sequence[Endpoint], wanted: dict[EndpointKey, FloorTarget]
) -> dict[EndpointKey, FloorTarget]:
    """Raise targets, evenly, until every cell has its minimum."""
    result = dict(wanted)
    for members in _members(endpoints).values():
        while sum(result[key].count for key in members) < policy.survivability_min:
            key = min(members, key=lambda member: (result[member].count, member))
            result[key] = FloorTarget(result[key].count + 1, Reason.SURVIVABILITY)
    return result


def _cap(
    policy: PoolPolicy, endpoints: Sequence[Endpoint], wanted: dict[EndpointKey, FloorTarget]
) -> dict[EndpointKey, FloorTarget]:
    """Hold the sum under the cap: what survival needs first, then everybody's first writer, then the second..."""
    cap = policy.cap
    if cap is None or sum(target.count for target in wanted.values()) <= cap:
        return wanted
    given: Counter[EndpointKey] = Counter()
    for members in _members(endpoints).values():
        while sum(given[key] for key in members) < policy.survivability_min:
            open_ones = [key for key in members if given[key] < wanted[key].count]
            given[min(open_ones, key=lambda member: (given[member], member))] += 1
    level = 1
    while sum(given.values()) < cap and any(given[key] < target.count for key, target in wanted.items()):
        for key, target in wanted.items():
            if given[key] < min(level, target.count) and sum(given.values()) < cap:
                given[key] += 1
        level += 1
    return {
        key: target if given[key] == target.count else FloorTarget(given[key], Reason.CAPPED)
        for key, target in wanted.items()
    }


def _members(endpoints: Sequence[Endpoint]) -> dict[Cell, list[EndpointKey]]:
    members: dict[Cell, list[EndpointKey]] = {}
    for endpoint in endpoints:
        for cell in endpoint.cells:
            members.setdefault(cell, []).append(endpoint.key)
    return dict(sorted(members.items()))
