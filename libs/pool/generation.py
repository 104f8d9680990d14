"""Generations: epochs of the pool. Bootstrap -> warmup -> activation -> drain -> retire.

At most one generation is pending. It is keyed by (number, desired map's hash, its revision): another map is another
generation, the same map wanted again for whatever reason (the map itself, an operator, the clock) is the same one,
until it expires. Writers dialled for a generation publish into that one only.

What counts as *fresh* is the pending generation's own writers and, where only the map changed, the Active writers
to endpoints it still lists with the same process behind them: they are carried over, so a map that grows, shrinks or
comes back closes nothing. An operator's or the clock's generation carries nothing over.

A commit is one synchronous step. It needs a covered share of cell-families and of endpoints in use; what is missing
needs a stale mode other than *never*, and is left to writers of the generation before, for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from .coverage import Cover, cover, groups_of
from .desired import DesiredMap
from .inventory import WriterRecord
from .knobs import PoolPolicy, StaleMode
from .model import Endpoint, EndpointKey, Group, PoolBugError


class Trigger(StrEnum):
    """Why a generation is wanted."""

    MAP = "map"
    OPERATOR = "operator"
    PERIODIC = "periodic"


@dataclass(frozen=True, slots=True)
class GenerationKey:
    """What a commit must still find when it holds the publication guard."""

    generation: int
    map_hash: str
    revision: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A generation in warmup. ``wanted_since``: since when one has been, over all that came to nothing."""

    key: GenerationKey
    map: DesiredMap
    fresh: bool
    triggers: frozenset[Trigger]
    created_at: float
    wanted_since: float


class Obstacle(StrEnum):
    """Why a generation cannot be committed now."""

    NONE = ""
    NOT_PENDING = "not-pending"  # no such generation, or another by now
    MAP_MOVED = "map-moved"
    EXPIRED = "expired"
    EMPTY_MAP = "empty-map"  # and live writers
    RATIO = "ratio"
    MISSING = "missing"  # something is, and the stale mode is never


@dataclass(frozen=True, slots=True)
class Assessment:
    """What a commit would find now."""

    fresh: Cover
    missing_groups: frozenset[Group]
    missing_endpoints: frozenset[EndpointKey]
    ratio: float
    obstacle: Obstacle


class Generations:
    """The reinit coordinator's state: the owner of which generation is active and which is pending."""

    def __init__(self) -> None:
        self.active = 0
        self.committed: DesiredMap | None = None
        self.committed_at = 0.0
        self.pending: Pending | None = None
        self.left_missing: frozenset[Group] = frozenset()
        """Cell-families that the last commit knowingly left to stale writers, and that are still uncovered."""
        self.commits: Counter[Trigger] = Counter()
        self.refused: Counter[Obstacle] = Counter()
        self.expired = 0
        self.superseded = 0
        self.reinit_at: float | None = None
        self._last = 0

    @property
    def current(self) -> frozenset[int]:
        """Numbers of the active generation and of the pending one."""
        return frozenset((self.active, *([self.pending.key.generation] if self.pending is not None else ())))

    def bootstrap(self, taken: DesiredMap, now: float) -> None:
        """The first map: nothing is there that could be swapped."""
        if self.active:
            raise PoolBugError("the pool has a generation already")
        self._last = self.active = 1
        self.committed, self.committed_at = taken, now

    def want(self, trigger: Trigger, taken: DesiredMap, now: float) -> Pending | None:
        """A generation for this map; the pending one that it supersedes, if there was another."""
        before = self.pending
        anew = trigger is not Trigger.MAP
        if before is not None and (before.key.map_hash, before.key.revision) == (taken.hash, taken.revision):
            self.pending = replace(before, fresh=before.fresh or anew, triggers=before.triggers | {trigger})
            return None
        self._last += 1
        self.pending = Pending(
            GenerationKey(self._last, taken.hash, taken.revision),
            taken,
            anew or (before is not None and before.fresh),
            frozenset({trigger}) | (before.triggers if before is not None else frozenset()),
            now,
            before.wanted_since if before is not None else now,
        )
        self.superseded += before is not None
        return before

    def renew(self, now: float) -> Pending:
        """The pending one has expired: another of the same kind in its place."""
        before = self.pending
        if before is None:
            raise PoolBugError("nothing is pending that could be renewed")
        self.expired += 1
        self._last += 1
        key = replace(before.key, generation=self._last)
        self.pending = replace(before, key=key, created_at=now)
        return before

    def drop(self) -> Pending | None:
        """The pending one is wanted no more."""
        before, self.pending = self.pending, None
        return before

    def lapsed(self, policy: PoolPolicy, now: float) -> bool:
        """Whether the pending one has expired."""
        return self.pending is not None and now - self.pending.created_at >= policy.pending_ttl_s

    def validate(self, key: GenerationKey, taken: DesiredMap | None, policy: PoolPolicy, now: float) -> Obstacle:
        """Whether the key is still that of the pending generation, and that of the map."""
        if self.pending is None or self.pending.key != key:
            return Obstacle.NOT_PENDING
        if taken is None or (taken.hash, taken.revision) != (key.map_hash, key.revision):
            return Obstacle.MAP_MOVED
        return Obstacle.EXPIRED if self.lapsed(policy, now) else Obstacle.NONE

    def commit(self, missing: frozenset[Group], now: float) -> None:
        """The pending generation is the active one from here on."""
        pending = self.pending
        if pending is None:
            raise PoolBugError("nothing is pending that could be committed")
        self.active, self.committed, self.committed_at = pending.key.generation, pending.map, now
        self.pending, self.left_missing = None, missing
        self.commits.update(pending.triggers)

    def check(self, taken: DesiredMap | None) -> None:
        """Raises PoolBugError."""
        pending = self.pending
        if pending is None:
            return
        if pending.key.generation <= self.active or pending.key.generation > self._last:
            raise PoolBugError(f"generation {pending.key.generation} is pending, {self.active} active")
        if taken is None or pending.map.hash != taken.hash:
            raise PoolBugError("the pending generation is for another map than the one that was taken")


def is_fresh(record: WriterRecord, pending: Pending) -> bool:
    """Whether the writer covers for the pending generation."""
    endpoint = pending.map.by_key.get(record.key)
    if endpoint is None or not record.standing:
        return False
    if record.incarnation and record.incarnation < endpoint.incarnation:
        return False
    return record.generation == pending.key.generation or (not pending.fresh and record.active)


def assess(
    pending: Pending,
    records: Collection[WriterRecord],
    used: Collection[EndpointKey],
    in_effect: Collection[Endpoint],
    policy: PoolPolicy,
) -> Assessment:
    """What a commit would find now. ``used``: endpoints that should have writers at all (not drained, not capped).

    ``in_effect``: those whose cells are wanted, vanished ones in their grace among them.
    """
    fresh = cover(records, lambda record: is_fresh(record, pending))
    endpoints = [endpoint for endpoint in pending.map.endpoints if endpoint.key in used]
    groups = groups_of(endpoints)
    serving = cover(records)
    # A cell that has its minimum, or less than that, must not come out of the commit with fewer.
    least = {cell: min(policy.survivability_min, count) for cell, count in serving.cells.items()}
    short = {group.cell for group in groups if fresh.cells[group.cell] < least.get(group.cell, 0)}
    # Nor must one that no endpoint of the map is to serve, but that is wanted all the same.
    graced = {endpoint.key for endpoint in in_effect} - pending.map.by_key.keys()
    kept = cover(records, lambda record: is_fresh(record, pending) or (record.active and record.key in graced))
    wanted = groups_of(in_effect)
    bare = {group.cell for group in wanted if kept.cells[group.cell] < least.get(group.cell, 0)}
    missing_groups = frozenset(
        [group for group in groups if not fresh.groups[group] or group.cell in short]
        + [group for group in wanted if group.cell in bare]
    )
    in_use = [endpoint.key for endpoint in endpoints if serving.endpoints[endpoint.key]]
    missing_endpoints = frozenset(key for key in in_use if not fresh.endpoints[key])
    of = len(groups | missing_groups)
    ratio = min(_share(len(missing_groups), of), _share(len(missing_endpoints), len(in_use)))
    obstacle = Obstacle.NONE
    if not pending.map.endpoints and +serving.endpoints:
        obstacle = Obstacle.EMPTY_MAP
    elif ratio < policy.min_fresh_ratio:
        obstacle = Obstacle.RATIO
    elif (missing_groups or missing_endpoints) and policy.stale_mode is StaleMode.NEVER:
        obstacle = Obstacle.MISSING
    return Assessment(fresh, missing_groups, missing_endpoints, ratio, obstacle)


def covers(assessment: Assessment, record: WriterRecord) -> bool:
    """Whether the fresh writers do all that this old one does: for its cell-families and for its endpoint."""
    lost = assessment.missing_groups & set(record.endpoint.groups)
    return not lost and record.key not in assessment.missing_endpoints


def uncovered(groups: Iterable[Group], found: Cover) -> frozenset[Group]:
    """Those without a serving writer."""
    return frozenset(group for group in groups if not found.groups[group])


def _share(missing: int, of: int) -> float:
    return 1.0 - missing / of if of else 1.0
