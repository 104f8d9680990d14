"""What counts for a pending generation, and what a commit would find."""

from dataclasses import replace

import pytest

from libs.pool.contours import Contour, Move
from libs.pool.desired import DesiredMap
from libs.pool.generation import GenerationKey, Obstacle, Pending, Trigger, assess, covers, is_fresh
from libs.pool.knobs import PoolPolicy, StaleMode
from libs.pool.model import Group
from tests.pool.world import endpoint, record

POLICY = PoolPolicy()


def test_a_commit_must_not_leave_a_cell_below_its_minimum() -> None:
    desired = DesiredMap.of([endpoint(0)], 1)
    pending = Pending(GenerationKey(2, desired.hash, 1), desired, True, frozenset({Trigger.OPERATOR}), 0.0, 0.0)
    old = [record(1), record(2)]
    fresh = record(3, contour=Contour.WARM, generation=2)
    two = replace(POLICY, survivability_min=2)
    assert assess(pending, [*old, fresh], {endpoint(0).key}, desired.endpoints, POLICY).obstacle is Obstacle.NONE
    assert assess(pending, [*old, fresh], {endpoint(0).key}, desired.endpoints, two).obstacle is Obstacle.RATIO
    second = record(4, contour=Contour.WARM, generation=2)
    assert assess(pending, [*old, fresh, second], {endpoint(0).key}, desired.endpoints, two).obstacle is Obstacle.NONE
    # What is below its minimum already does not have to come out better.
    assert assess(pending, [old[0], fresh], {endpoint(0).key}, desired.endpoints, two).obstacle is Obstacle.NONE


def test_a_commit_keeps_what_is_wanted_beyond_the_map() -> None:
    """Of B the map has an endpoint that is capped out; one that vanished, and has its grace, wants the cell too."""
    a, b, gone = endpoint(0, "A"), endpoint(1, "B", incarnation=2), endpoint(2, "B")
    desired = DesiredMap.of([a, b], 2)
    pending = Pending(GenerationKey(2, desired.hash, 2), desired, False, frozenset({Trigger.MAP}), 0.0, 0.0)
    records = [record(1, a), record(2, b)]  # the process of 2 has been replaced
    found = assess(pending, records, {a.key}, [a, b, gone], POLICY)
    assert found.obstacle is Obstacle.RATIO and found.missing_groups == {Group("B", "ipv4")}
    loose = replace(POLICY, min_fresh_ratio=0.5, stale_mode=StaleMode.TTL)
    found = assess(pending, records, {a.key}, [a, b, gone], loose)
    assert found.obstacle is Obstacle.NONE and not covers(found, records[1]) and covers(found, records[0])
    # What vanished has a tunnel of its own, which the commit leaves alone.
    found = assess(pending, [*records, record(3, gone)], {a.key}, [a, b, gone], POLICY)
    assert found.obstacle is Obstacle.NONE and not found.missing_groups
    assert assess(pending, records, {a.key}, [a], POLICY).obstacle is Obstacle.NONE  # nobody wants B


@pytest.mark.parametrize(
    ("change", "fresh"),
    [
        ({}, True),
        ({"generation": 1}, False),
        ({"incarnation": 1}, False),
        ({"closing": Move.ABANDONED}, False),
        ({"contour": Contour.DRAINING}, False),
    ],
)
def test_only_what_was_accepted_for_a_generation_counts_for_it(change: dict[str, object], fresh: bool) -> None:
    desired = DesiredMap.of([endpoint(0, incarnation=2)], 1)
    pending = Pending(GenerationKey(2, desired.hash, 1), desired, True, frozenset({Trigger.OPERATOR}), 0.0, 0.0)
    found = record(1, **{"contour": Contour.WARM, "generation": 2, "incarnation": 2} | change)  # type: ignore[arg-type]
    assert is_fresh(found, pending) is fresh


def test_a_maps_generation_carries_over_what_stays() -> None:
    desired = DesiredMap.of([endpoint(0), endpoint(1)], 2)
    carried = record(1)
    for anew, counts in ((False, True), (True, False)):
        pending = Pending(GenerationKey(2, desired.hash, 2), desired, anew, frozenset(), 0.0, 0.0)
        assert is_fresh(carried, pending) is counts
        assert not is_fresh(record(2, endpoint(7)), pending)
