"""Each piece of the core alone, by property where there is one."""

from collections import Counter
from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.pool.backoff import pause_s
from libs.pool.contours import TABLE, Contour, Move, after
from libs.pool.coverage import cover, sole_endpoints
from libs.pool.desired import Desired, DesiredMap
from libs.pool.draining import demotable, sweep
from libs.pool.floor import Floors, FloorTarget, Reason, stand_in
from libs.pool.inventory import Inventory
from libs.pool.knobs import _LEAST, FloorMode, NoCoverage, PickMode, PolicyError, PoolPolicy
from libs.pool.model import Endpoint, EndpointKey, Group, PoolBugError
from libs.pool.probes import Probes
from libs.pool.readiness import Direct, Gate, Hold, Readiness, Refusal, Refuse, State, without_writer
from libs.pool.refill import Need, Refill
from libs.pool.replacement import Phase, Replacements, Reservation
from libs.pool.rotation import Rotation
from libs.pool.selection import order, tiers
from libs.pool.shutdown import Shutdown, Stage
from tests.pool.world import endpoint, record

POLICY = PoolPolicy()
CELLS = st.lists(st.sampled_from("ABC"), min_size=1, max_size=3).map(tuple)
ENDPOINTS = st.lists(CELLS, min_size=1, max_size=6).map(
    lambda cells: [endpoint(index, *served) for index, served in enumerate(cells)]
)


# --- knobs ---


def test_every_numeric_knob_has_a_bound() -> None:
    numeric = {field.name for field in fields(PoolPolicy) if isinstance(field.default, int | float)}
    booleans = {field.name for field in fields(PoolPolicy) if isinstance(field.default, bool)}
    assert numeric - booleans == set(_LEAST) | {"min_fresh_ratio", "reinit_jitter"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, least - 1) for name, least in _LEAST.items()),
        ("min_fresh_ratio", 1.1),
        ("idle_s", float("nan")),
        ("idle_writers_per_endpoint", 3),
        ("reconnect_max_s", 0.1),
        ("keepalive_jitter_s", 9.0),
        ("stale_mode", "sometimes"),
    ],
)
def test_a_policy_that_cannot_be_names_the_field(field: str, value: object) -> None:
    with pytest.raises(PolicyError) as caught:
        replace(POLICY, **{field: value})
    assert caught.value.field == field


def test_the_drain_deadline_and_the_cap() -> None:
    assert POLICY.force_close_after_s == 300
    assert replace(POLICY, force_close_s=20).force_close_after_s == 90  # the TTL is its lower bound
    assert replace(POLICY, drain_ttl_s=500).force_close_after_s == 500
    assert replace(POLICY, writers_max=10, cores=4, writers_per_core_max=2).cap == 8
    assert replace(POLICY, writers_max=0, writers_per_core_max=0).cap is None


# --- contours and inventory ---


def test_nothing_but_the_table() -> None:
    names = {(a, b) for (a, _), b in TABLE.items() if b is not Contour.GONE}
    assert names == {(Contour.WARM, Contour.ACTIVE), (Contour.ACTIVE, Contour.DRAINING)}
    for contour in Contour:
        for move in Move:
            if (contour, move) not in TABLE:
                with pytest.raises(PoolBugError):
                    after(contour, move)


def test_a_writer_that_closes_counts_for_nothing() -> None:
    inventory = Inventory()
    inventory.add(record(1, contour=Contour.WARM), 0.0)
    found = inventory.get(1)
    assert found is not None
    inventory.move(found, Move.COMMITTED, 1.0)
    assert found.serving
    with pytest.raises(PoolBugError):
        inventory.close(found, Move.EMPTIED)
    inventory.move(found, Move.SHRUNK, 2.0)
    inventory.close(found, Move.EMPTIED)
    assert not found.live
    with pytest.raises(PoolBugError):
        inventory.close(found, Move.EMPTIED)
    assert inventory.remove(1, 3.0) is found
    assert inventory.remove(1, 3.0) is None
    inventory.check()
    assert inventory.churn.removals == {Move.EMPTIED: 1}


def test_indexes_follow_an_endpoint_with_other_cells() -> None:
    inventory = Inventory()
    inventory.add(record(1, endpoint(0, "A"), Contour.WARM), 0.0)
    inventory.relist(endpoint(0, "B", "C"))
    assert not inventory.of_cell("A")
    assert [r.writer for r in inventory.of_cell("C")] == [1]
    inventory.check()


def test_an_endpoint_counts_in_each_of_its_cells() -> None:
    found = cover([record(1, endpoint(0, "A", "B")), record(2, endpoint(1, "B"))])
    assert found.cells == {"A": 1, "B": 2}
    assert not found.spares([record(1, endpoint(0, "A", "B"))], {"A", "B"}, 1)
    assert found.spares([record(2, endpoint(1, "B"))], {"A", "B"}, 1)
    assert sole_endpoints([endpoint(0, "A", "B"), endpoint(1, "B")]) == {endpoint(0).key}


# --- the map ---


def test_a_map_is_taken_when_it_holds_still() -> None:
    desired = Desired()
    one, two = DesiredMap.of([endpoint(0)], 1), DesiredMap.of([endpoint(0), endpoint(1)], 2)
    desired.read(one, 0.0)
    assert desired.settle(POLICY, False, 0.0) is one  # nothing to protect yet
    desired.read(two, 10.0)
    assert desired.settle(POLICY, True, 10.0) is None
    desired.read(two, 10.1)
    assert desired.settle(POLICY, True, 10.1) is None  # equal twice, but not for long enough
    assert desired.settle(POLICY, True, 10.2) is two


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_a_silent_source_is_read_again_and_the_wake_up_is_exact(reads: list[int], gap: float) -> None:
    desired = Desired()
    desired.read(DesiredMap.of([endpoint(9)], 0), 0.0)
    desired.settle(POLICY, True, 0.0)
    now = 100.0
    for revision, kind in enumerate(reads):
        now += gap
        desired.read(DesiredMap.of([endpoint(index) for index in range(kind + 1)], revision), now)
        desired.settle(POLICY, True, now)
    for _ in range(10):
        wake = desired.wake_at(POLICY)
        if wake is None:
            break
        now = max(now, wake)
        desired.settle(POLICY, True, now)
    assert desired.candidate is None
    assert desired.taken is not None
    assert len(desired.taken.endpoints) == reads[-1] + 1


def test_a_map_that_never_settles_is_taken_after_a_while() -> None:
    desired = Desired()
    desired.read(DesiredMap.of([endpoint(9)], 0), 0.0)
    desired.settle(POLICY, True, 0.0)
    taken_at = None
    for step in range(200):
        now = 1.0 + step * 0.1
        desired.read(DesiredMap.of([endpoint(step % 3)], step), now)
        if desired.settle(POLICY, True, now):
            taken_at = now
            break
    assert taken_at is not None
    assert taken_at == pytest.approx(11.0, abs=0.11)


# --- floors ---


@settings(deadline=None)
@given(ENDPOINTS, st.integers(0, 12), st.integers(1, 3), st.integers(1, 4))
def test_targets_survive_and_stay_under_the_cap(endpoints: list[Endpoint], cap: int, minimum: int, each: int) -> None:
    policy = replace(
        POLICY,
        writers_max=cap,
        writers_per_core_max=0,
        survivability_min=minimum,
        writers_per_endpoint=each,
        floor_mode=FloorMode.STATIC,
    )
    targets = Floors().targets(policy, endpoints, (), 0.0)
    total = Counter[str]()
    for entry in endpoints:
        for cell in entry.cells:
            total[cell] += targets[entry.key].count
    assert all(count >= minimum for count in total.values())
    least = sum(total.values()) if not cap else None
    if cap:
        needed = minimum * len(total)
        assert sum(target.count for target in targets.values()) <= max(cap, needed)
    else:
        assert least is not None
        assert all(target.count >= each for target in targets.values())


def test_the_floor_shrinks_late_and_comes_back_at_once() -> None:
    floors, cells = Floors(), {"A"}
    floors.update(POLICY, cells, (), 0.0)

    def count(now: float) -> int:
        return floors.targets(POLICY, [endpoint(0)], (), now)[endpoint(0).key].count

    floors.update(POLICY, cells, (), 179.0)
    assert count(179.0) == 2  # idle for long, but the grace is not over
    floors.update(POLICY, cells, (), 180.0)
    assert count(180.0) == 1
    assert floors.demand(cells, 200.0)
    assert count(200.0) == 2
    floors.update(POLICY, cells, (), 379.0)
    assert count(379.0) == 2
    floors.update(POLICY, cells, {"A"}, 385.0)
    floors.update(POLICY, cells, (), 474.0)
    assert count(474.0) == 2
    floors.update(POLICY, cells, (), 475.0)
    assert count(475.0) == 1


@settings(deadline=None)
@given(ENDPOINTS, st.data())
def test_stand_ins_are_bounded_and_in_the_same_cell(endpoints: list[Endpoint], data: st.DataObject) -> None:
    base = {entry.key: FloorTarget(2, Reason.STATIC) for entry in endpoints}
    short_keys = data.draw(st.sets(st.sampled_from([entry.key for entry in endpoints])))
    result = stand_in(base, endpoints, dict.fromkeys(short_keys, 2))
    by_key = {entry.key: entry for entry in endpoints}
    for key, target in result.items():
        assert 2 <= target.count <= 4
        if target.count > 2:
            assert key not in short_keys
            assert any(set(by_key[key].cells) & set(by_key[other].cells) for other in short_keys)
    assert sum(t.count - 2 for t in result.values()) <= 2 * len(short_keys)


# --- refill ---


class Longest(Random):
    """Chance at its worst."""

    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


@settings(deadline=None)
@given(st.integers(1, 60), st.booleans(), st.integers(0, 1000))
def test_pauses_grow_to_a_ceiling(failures: int, outage: bool, seed: int) -> None:
    pause = pause_s(POLICY, failures, outage, Random(seed))
    ceiling = 0.2 if failures <= 16 else min(2.0 if outage else 30.0, 0.5 * 2 ** (failures - 17))
    assert 0 <= pause <= ceiling
    assert pause_s(POLICY, failures, outage, Longest(seed)) == ceiling


def test_dials_in_a_cell_are_bounded_and_a_failing_endpoint_is_dialled_once_at_a_time() -> None:
    refill = Refill()
    policy = replace(POLICY, dials_per_cell=3)
    needs = [Need(endpoint(index), 1) for index in range(3) for _ in range(2)]
    chosen, _ = refill.allowed(needs, policy, 0.0)
    assert len(chosen) == 3
    other = [Need(endpoint(9, "B"), 1)] * 2
    assert len(refill.allowed([*needs, *other], policy, 0.0)[0]) == 5
    refill.failed(endpoint(9).key, policy, False, Random(1), 0.0)
    chosen, wake_at = refill.allowed(other, policy, 0.0)
    assert not chosen
    assert wake_at is not None
    assert len(refill.allowed(other, policy, wake_at)[0]) == 1


def test_quarantine_for_failure_and_flapping_but_not_for_an_only_endpoint() -> None:
    key, chance = endpoint(0).key, Random(1)
    refill = Refill()
    assert [refill.failed(key, POLICY, False, chance, 0.0) for _ in range(24)] == [False] * 23 + [True]
    assert refill.quarantined(key, 24.9)
    assert not refill.quarantined(key, 25.0)
    refill.renew(key)
    assert not refill.quarantined(key, 1.0)
    only = Refill()
    assert not any(only.failed(key, POLICY, True, chance, 0.0) for _ in range(60))
    assert only.blocked_until(key) <= 2.0
    flapping = Refill()
    assert not flapping.broke(key, 0.0, POLICY, False, chance, 10.0)
    assert not flapping.broke(key, 0.0, POLICY, False, chance, 10.0)  # its sibling broke with it: one flap
    assert flapping.broke(key, 10.0, POLICY, False, chance, 20.0)
    steady = Refill()
    steady.broke(key, 0.0, POLICY, False, chance, 10.0)
    steady.broke(key, 10.0, POLICY, False, chance, 40.0)
    assert not steady.broke(key, 40.0, POLICY, False, chance, 50.0)


def test_probes_come_at_their_interval_one_at_a_time() -> None:
    probes, key = Probes(), endpoint(0).key
    assert not probes.due(POLICY, [key], 0.0)
    assert probes.due(POLICY, [key], 60.0) == [key]
    assert not probes.due(POLICY, [key], 120.0)
    probes.ended(key, False)
    assert probes.due(POLICY, [key], 180.0) == [key]
    assert not Probes().due(replace(POLICY, probes=False), [key], 0.0)


# --- replacement ---


def test_a_reservation_restores_open_unless_committed() -> None:
    replacements = Replacements()
    replacements.reserve(1, 10)
    with pytest.raises(PoolBugError):
        replacements.reserve(1, 11)
    with pytest.raises(ZeroDivisionError), Reservation(replacements, 10):
        raise ZeroDivisionError
    assert replacements.phase(1) is Phase.OPEN
    assert replacements.commit(10) is None
    replacements.reserve(1, 12)
    with Reservation(replacements, 12):
        assert replacements.commit(12) == 1
    assert replacements.phase(1) is Phase.RETIRING
    with pytest.raises(PoolBugError):
        replacements.reserve(1, 13)
    replacements.gone(1)
    replacements.check()
    assert not replacements.phases()


def test_rotation_takes_the_oldest_idle_spare_of_an_only_endpoint() -> None:
    policy = replace(POLICY, shadow_writers=1, shadow_rotation_s=10)
    rotation, key = Rotation(), endpoint(0).key
    writers = [record(1, opened_at=0.0, bound=1), record(2, opened_at=1.0), record(3, opened_at=2.0)]
    assert rotation.victim(policy, key, writers, True, 0.0) is None
    chosen = rotation.victim(policy, key, writers, True, 10.0)
    assert chosen is writers[1]
    assert rotation.victim(policy, key, writers, False, 20.0) is None
    sick = record(4, degraded_since=0.0)
    assert rotation.victim(replace(POLICY, replace_degraded_s=5), key, [sick], False, 4.0) is None
    assert rotation.victim(replace(POLICY, replace_degraded_s=5), key, [sick], False, 5.0) is sick


# --- draining ---


def test_who_goes_and_who_is_warned_about() -> None:
    policy = replace(POLICY, drain_threshold=2)
    empty = record(1, contour=Contour.DRAINING, since=0.0)
    young = record(2, contour=Contour.DRAINING, since=100.0, bound=1)
    warned = record(3, contour=Contour.DRAINING, since=0.0, bound=1)
    late = record(4, contour=Contour.DRAINING, since=-200.0, bound=1)
    found = sweep([empty, young, warned, late], policy, 100.0)
    assert dict(found.close) == {empty: Move.EMPTIED, late: Move.DEADLINE}
    assert found.warn == (warned,)
    crowd = [record(index, contour=Contour.DRAINING, since=float(index), bound=1) for index in range(5)]
    assert [r.writer for r, move in sweep(crowd, policy, 6.0).close if move is Move.THRESHOLD] == [0, 1, 2]


@pytest.mark.parametrize(
    ("others", "listed", "minimum", "now", "expected"),
    [
        (0, True, 1, 50.0, False),  # its time is not over
        (0, True, 1, 500.0, False),  # the last of a cell does not lapse by TTL
        (0, False, 1, 500.0, False),  # nor does it where its endpoint vanished and has its grace
        (1, True, 2, 500.0, False),  # nor the last but one where two are the minimum
        (1, True, 1, 50.0, True),  # covered
        (1, False, 1, 50.0, True),
    ],
)
def test_when_a_stale_writer_is_a_fallback_no_longer(
    others: int, listed: bool, minimum: int, now: float, expected: bool
) -> None:
    stale = record(1, contour=Contour.DRAINING, fallback=True, stale_until=90.0)
    fresh = [record(2 + index) for index in range(others)]
    active, serving = cover(fresh), cover([stale, *fresh])
    keys, policy = {endpoint(0).key} if listed else set(), replace(POLICY, survivability_min=minimum)
    assert demotable(stale, active, serving, keys, {Group("A", "ipv4")}, policy, now) is expected
    assert demotable(stale, active, serving, keys, set(), policy, 500.0)  # nobody wants its cell any more


# --- selection ---


@settings(deadline=None)
@given(st.data(), st.sampled_from(PickMode))
def test_every_candidate_once_well_ones_first(data: st.DataObject, mode: PickMode) -> None:
    records = []
    for writer in range(1, data.draw(st.integers(1, 9)) + 1):
        contour = data.draw(st.sampled_from([Contour.ACTIVE, Contour.WARM, Contour.DRAINING]))
        found = record(writer, contour=contour)
        found.fallback = contour is Contour.DRAINING and data.draw(st.booleans())
        found.degraded = frozenset({"ping_slow"} if data.draw(st.booleans()) else ())
        records.append(found)
    last = data.draw(st.integers(0, 10))
    chosen = order(tiers(records), replace(POLICY, pick_mode=mode), lambda writer: writer % 3, Random(1), last)
    assert sorted(r.writer for r in chosen) == sorted(r.writer for r in records if r.serving)
    ranks = [2 * r.fallback + bool(r.degraded) for r in chosen]
    assert ranks == sorted(ranks)


def test_round_robin_visits_all() -> None:
    records = [record(writer) for writer in (3, 1, 2)]
    policy, last, seen = replace(POLICY, pick_mode=PickMode.ROUND_ROBIN), 0, []
    for _ in range(6):
        last = order(tiers(records), policy, lambda _: 0, Random(1), last)[0].writer
        seen.append(last)
    assert seen == [1, 2, 3, 1, 2, 3]


def test_two_choices_never_take_the_busiest_of_many() -> None:
    records = [record(writer) for writer in range(1, 9)]
    chance = Random(5)
    firsts = Counter(order(tiers(records), POLICY, lambda writer: writer, chance, 0)[0].writer for _ in range(2000))
    assert 8 not in firsts  # of any two another is less busy
    assert firsts[1] > firsts[4] > 0


# --- readiness, the end ---


def test_the_gate() -> None:
    gate = Gate()
    a, b = endpoint(0, "A"), endpoint(1, "B")
    assert gate.now.state is State.NO_MAP
    gate.update(POLICY, (), cover([]), True, 0.0)
    assert gate.now.state is State.EMPTY_MAP
    gate.update(POLICY, {"A", "B"}, cover([record(1, a)]), True, 1.0)
    assert gate.now == Readiness(State.STARTING, ("B",))
    gate.update(POLICY, {"A", "B"}, cover([record(1, a)]), True, 11.0)
    assert gate.now.state is State.DEGRADED  # a cell that never comes up does not keep the others out for ever
    gate.update(POLICY, {"A", "B"}, cover([record(1, a), record(2, b)]), True, 12.0)
    assert gate.now.state is State.READY
    gate.update(replace(POLICY, serve_partial=False), {"A", "B"}, cover([record(1, a)]), True, 13.0)
    assert gate.now.state is State.LOST
    gate.update(replace(POLICY, required_cells=("A",)), {"A", "B"}, cover([record(1, a)]), True, 14.0)
    assert gate.now.state is State.READY
    gate.update(POLICY, {"A", "B"}, cover([]), True, 15.0)
    assert gate.now.state is State.LOST


def test_what_becomes_of_a_bind() -> None:
    ready = Readiness(State.READY)
    assert without_writer(POLICY, ready, 0, 1.0) == Hold(4.0)
    assert without_writer(POLICY, ready, 0, 5.0) == Refuse(Refusal.NO_COVERAGE)
    assert without_writer(POLICY, ready, 1024, 0.0) == Refuse(Refusal.TOO_MANY_HELD)
    assert without_writer(replace(POLICY, no_coverage=NoCoverage.DIRECT), ready, 0, 0.0) == Direct()
    assert without_writer(replace(POLICY, no_coverage=NoCoverage.FAIL), ready, 0, 0.0) == Refuse(Refusal.NO_COVERAGE)
    assert without_writer(POLICY, Readiness(State.CLOSING), 0, 0.0) == Refuse(Refusal.CLOSING)


def test_the_end_only_goes_forward() -> None:
    end = Shutdown()
    assert end.begin(10.0, 0.0)
    assert not end.begin(5.0, 1.0)
    assert end.deadline == 6.0
    assert end.step(bound=1, left=3, now=5.0) is Stage.DRAINING
    assert end.step(bound=1, left=3, now=6.0) is Stage.CLOSING
    assert end.step(bound=0, left=0, now=7.0) is Stage.RELEASED
    assert end.step(bound=0, left=0, now=8.0) is Stage.RELEASED


def test_an_endpoint_knows_its_family() -> None:
    assert endpoint(0, host="[::1]").groups == (Group("A", "ipv6"),)
    assert endpoint(0).key == EndpointKey("w0", "127.0.0.1:7000")
    with pytest.raises(ValueError, match="needs a worker"):
        Endpoint("", "x")
