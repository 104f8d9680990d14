"""What takes hours in life, under a logical clock: the whole core, nothing patched."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from libs.pool.contours import Contour
from libs.pool.effects import Notice
from libs.pool.events import CommitGeneration, End, SetPolicy, SwapGeneration
from libs.pool.generation import Obstacle, Trigger
from libs.pool.knobs import FloorMode, PoolPolicy, StaleMode
from libs.pool.model import CellTarget, WorkerTarget
from libs.pool.readiness import State
from libs.tunnel import CloseReason
from tests.pool.world import World, endpoint

STATIC = PoolPolicy(floor_mode=FloorMode.STATIC, reinit_interval_s=0)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(STATIC)
    yield world
    world.close()


@pytest.fixture
def slow() -> Iterator[World]:
    """For hours: the core looks at the whole every twenty seconds."""
    world = World(STATIC, tick_s=20)
    yield world
    world.close()


def started(world: World, count: int = 3, *cells: str) -> list:  # type: ignore[type-arg]
    listed = [endpoint(index, *cells) for index in range(count)]
    world.read(*listed)
    world.run(1)
    assert len(world.active()) == count * world.core.policy.writers_per_endpoint
    return listed


def test_comes_up_ready_before_it_is_saturated(world: World) -> None:
    world.read(endpoint(0), endpoint(1))
    assert world.core.readiness.state is State.STARTING
    world.finish_dial(min(world.dials))
    assert len(world.active()) == 1
    assert world.core.readiness.ready
    world.run(1)
    assert len(world.active()) == 4


def test_ten_idle_minutes_end_no_open_route(world: World) -> None:
    started(world)
    session = world.bind(WorkerTarget("w1"))
    assert session is not None
    world.run(600)
    assert session.route.closed is None
    assert not session.closes
    world.deliver([(session, b"x")])
    world.consume(session)
    assert session.received == b"x"
    world.finish(session)
    assert [closed.reason for closed in session.closes] == [CloseReason.DONE]
    world.assert_rest()


def test_six_hours_of_incomplete_coverage_are_visible_and_never_half_activate(slow: World) -> None:
    world = slow
    listed = started(world, 4)
    for entry in listed[2:]:
        world.up[entry.key] = False  # their tunnels stand, new ones are refused
    world.feed(SwapGeneration())
    before = {record.writer for record in world.active()}
    for hour in range(6):
        world.run(3600)
        pending = world.core.snapshot(world.now).pending
        assert pending is not None
        assert pending.obstacle is Obstacle.RATIO
        assert pending.wanted_s >= 3600 * (hour + 1)
        assert pending.ratio == 0.5
        assert {key.worker for key in pending.missing_endpoints} == {"w2", "w3"}
        assert world.core.books.generations.active == 1
        assert {record.writer for record in world.active()} == before
        assert all(record.contour is not Contour.DRAINING for record in world.records)
    assert world.warnings[Notice.PENDING_EXPIRED] == 11
    for entry in listed:
        world.up[entry.key] = True
    world.run(120)
    assert world.core.books.generations.pending is None
    assert world.core.books.generations.active > 1
    assert not before & {record.writer for record in world.active()}
    assert len(world.active()) == 8


def test_outage_of_the_map_and_its_recovery_close_nothing(slow: World) -> None:
    world = slow
    listed = started(world, 4)
    before = {record.writer for record in world.active()}
    for seen, seconds in ((listed, 1), ([], 3600), (listed[:1], 29), (listed, 600)):
        world.read(*seen)
        world.run(seconds)
        assert world.core.readiness.ready
        assert {record.writer for record in world.active()} == before
    assert not world.closed_writers
    assert world.warnings[Notice.EMPTY_MAP_REFUSED] == 1
    assert world.warnings[Notice.ENDPOINT_RETURNED] == 3


def test_an_endpoint_that_stays_away_lapses_but_not_the_last_of_a_cell(world: World) -> None:
    world.read(endpoint(0, "A"), endpoint(1, "A"), endpoint(2, "B"), endpoint(3, "B"))
    world.run(1)
    world.fail(endpoint(3).key)
    world.read(endpoint(0, "A"), endpoint(3, "B"))  # w1 and w2 are gone; of B only the dead one is listed
    world.run(300)
    assert not world.active(endpoint(1).key)
    assert len(world.active(endpoint(2).key)) == 4  # it stands in for the dead one
    assert world.core.readiness.ready
    world.fail(endpoint(3).key, up=True)
    world.run(120)
    assert len(world.active(endpoint(3).key)) == 2
    assert not world.active(endpoint(2).key)


def test_who_vanished_last_keeps_the_cell_for_its_grace(world: World) -> None:
    a, one, two = endpoint(0, "A"), endpoint(1, "B"), endpoint(2, "B")
    world.read(a, one, two)
    world.run(1)
    world.read(a, two)
    world.run(20)
    world.fail(two.key)  # and cannot be reached: of B there is only what vanished first
    world.read(a)
    world.run(20)
    assert world.bind(CellTarget("B")) is not None
    for session in world.sessions:
        world.finish(session)
    world.run(20)
    assert not world.active(one.key)


def test_who_vanished_goes_one_by_one_where_a_cell_needs_one_of_them(world: World) -> None:
    world.feed(SetPolicy(replace(STATIC, survivability_min=2, writers_per_endpoint=1)))
    one, two, three = endpoint(1, "B"), endpoint(2, "A", "B"), endpoint(3, "A")
    world.read(one, two, three)
    world.run(1)
    world.read(three)  # of A it has one tunnel: two stays for the other, and with it B wants two
    world.run(300)
    assert len(world.active(one.key)) == len(world.active(two.key)) == 1
    world.read(three, endpoint(4, "A"))
    world.run(60)
    assert not world.active(one.key)
    assert not world.active(two.key)


def test_a_hundred_swaps_in_a_row_stay_bounded(world: World) -> None:
    started(world, 4)
    sessions = [world.bind(CellTarget("A")) for _ in range(64)]
    most = 0
    for swap in range(100):
        world.feed(SwapGeneration())
        world.run(2)
        assert world.core.books.generations.active == swap + 2
        draining = world.contours()[Contour.DRAINING]
        most = max(most, draining)
    assert most <= world.core.policy.drain_threshold
    assert len(world.records) <= 8 + world.core.policy.drain_threshold + 4
    assert len(world.core.books.refill.attempts) == 0
    for session in sessions:
        assert session is not None
        world.finish(session)
    world.run(1)
    assert world.contours() == {Contour.ACTIVE: 8}
    world.assert_rest()


def test_a_covered_writer_drains_until_its_deadline_and_warns_before(world: World) -> None:
    started(world, 2)
    session = world.bind(WorkerTarget("w0"))
    assert session is not None
    world.feed(SwapGeneration())
    world.run(89)
    assert world.contours()[Contour.DRAINING] == 1
    assert not world.warnings[Notice.DRAIN_TTL]
    world.run(5)
    assert world.warnings[Notice.DRAIN_TTL] == 1
    world.run(200)
    assert session.route.closed is None
    world.run(10)
    assert [closed.reason for closed in session.closes] == [CloseReason.RETIRED]
    world.assert_rest()


def test_a_commit_that_closes_at_once(world: World) -> None:
    started(world, 2)
    world.feed(SetPolicy(replace(STATIC, close_covered=True)))
    session = world.bind(WorkerTarget("w0"))
    assert session is not None
    world.feed(SwapGeneration())
    world.run(1)
    assert [closed.reason for closed in session.closes] == [CloseReason.RETIRED]


@pytest.mark.parametrize("mode", StaleMode)
def test_what_a_commit_cannot_cover(mode: StaleMode) -> None:
    world = World(replace(STATIC, stale_mode=mode, min_fresh_ratio=0.5))
    listed = [endpoint(index, "A" if index < 4 else "B") for index in range(5)]
    world.read(*listed)
    world.run(1)
    world.up[listed[4].key] = False
    world.feed(SwapGeneration())
    world.run(30)
    if mode is StaleMode.NEVER:
        assert world.core.books.generations.active == 1
        assert world.core.snapshot(world.now).pending.obstacle is Obstacle.MISSING  # type: ignore[union-attr]
    else:
        snapshot = world.core.snapshot(world.now)
        assert snapshot.generation == 2
        assert [group.cell for group in snapshot.left_missing] == ["B"]
        # Served by the kept stale ones, past their TTL too: they are the last of a cell that is still in the map.
        world.run(600)
        assert world.bind(CellTarget("B")) is not None
        assert world.core.readiness.ready
        world.up[listed[4].key] = True
        world.run(60)
        assert not world.core.snapshot(world.now).left_missing
        assert len(world.active(listed[4].key)) == 2
        assert all(not record.fallback for record in world.records)
    world.close()


def test_what_a_commit_left_to_a_stale_writer_outlives_a_map_that_lacks_it(world: World) -> None:
    world.feed(SetPolicy(replace(STATIC, stale_mode=StaleMode.ALWAYS, min_fresh_ratio=0.5)))
    listed = [endpoint(index, "A" if index < 4 else "B") for index in range(5)]
    world.read(*listed)
    world.run(1)
    world.up[listed[4].key] = False
    world.feed(SwapGeneration())
    world.run(30)
    stale = [record.writer for record in world.records if record.fallback]
    assert stale
    world.read(*listed[:4])
    world.run(20)
    assert [record.writer for record in world.records if record.fallback] == stale  # a grace, as for any writer
    assert world.bind(CellTarget("B")) is not None
    world.read(*listed)
    world.run(60)
    assert [record.writer for record in world.records if record.fallback] == stale
    world.read(*listed[:4])
    world.run(60)
    assert not [record for record in world.records if record.fallback]


def test_two_families_of_one_cell(world: World) -> None:
    four, six = endpoint(0), endpoint(0, host="[::1]")
    world.read(four, six)
    world.run(1)
    assert world.core.snapshot(world.now).by_family == {"ipv4": 2, "ipv6": 2}
    world.fail(six.key)
    snapshot = world.core.snapshot(world.now)
    assert [(group.cell, group.family) for group in snapshot.missing_groups] == [("A", "ipv6")]
    assert world.core.readiness.ready
    world.run(30)
    assert len(world.active(four.key)) == 4  # the other family stands in
    world.fail(six.key, up=True)
    world.run(60)
    assert not world.core.snapshot(world.now).missing_groups
    world.run(180)
    snapshot = world.core.snapshot(world.now)
    assert snapshot.by_family == {"ipv4": 2, "ipv6": 2}


def test_the_floor_follows_the_load_and_does_not_oscillate() -> None:
    world = World(PoolPolicy(reinit_interval_s=0), tick_s=5)
    started(world, 3)
    world.run(1000)
    assert len(world.active()) == 3  # a quiet time
    switches = world.core.books.floors.switches
    for _ in range(60):  # a bind a minute: never quiet for 90 s
        session = world.bind(CellTarget("A"))
        assert session is not None
        world.run(1)
        assert len(world.active()) == 6
        world.finish(session)
        world.run(59)
    assert world.core.books.floors.switches == switches + 1
    long = world.bind(WorkerTarget("w0"))
    assert long is not None
    world.run(1000)
    assert len(world.active()) == 6  # an open route is activity
    assert long.route.closed is None
    world.finish(long)
    world.run(300)
    assert len(world.active()) == 3
    world.close()


def test_periodic_generations_replace_every_tunnel_and_lose_no_coverage() -> None:
    world = World(replace(STATIC, reinit_interval_s=900), tick_s=10)
    started(world, 3)
    seen = {record.writer for record in world.active()}
    commits = []
    for _ in range(4 * 60):
        world.run(60)
        assert len(world.active()) >= 3
        commits.append(world.core.books.generations.active)
    assert 14 <= commits[-1] <= 19
    assert all(after - before in (0, 1) for before, after in pairwise(commits))
    assert not seen & {record.writer for record in world.active()}
    world.close()


def test_an_idle_close_by_the_peer_is_expected(world: World) -> None:
    started(world, 1)
    for record in world.active():
        world.end(record.writer, End.IDLE, CloseReason.IDLE)
    world.run(1)
    assert len(world.active()) == 2
    assert world.core.books.refill.counts.flaps == 0


def test_a_shrinking_floor_touches_no_bound_writer(world: World) -> None:
    started(world, 2)
    world.run(200)
    sessions = [world.bind(WorkerTarget("w0")) for _ in range(8)]
    assert all(record.bound for record in world.active(endpoint(0).key))
    world.feed(SetPolicy(replace(STATIC, writers_per_endpoint=1)))
    world.run(1000)
    assert len(world.active(endpoint(0).key)) == 2
    assert len(world.active(endpoint(1).key)) == 1
    for session in sessions:
        assert session is not None
        assert session.route.closed is None
        world.finish(session)
    world.run(2)
    assert len(world.active(endpoint(0).key)) == 1


def test_a_new_endpoint_serves_before_its_generation_is_committed(world: World) -> None:
    one, two, dead = endpoint(0, "A"), endpoint(1, "A"), endpoint(2, "B")
    world.read(one)
    world.run(1)
    world.up[dead.key] = False
    world.read(one, two, dead)
    world.run(5)
    assert world.core.books.generations.pending is not None  # the cell that nobody reaches holds it up
    session = world.bind(WorkerTarget("w1"))
    assert session is not None
    assert world.core.readiness.ready


def test_a_stale_commit_changes_nothing(world: World) -> None:
    started(world, 2)
    world.auto_commit = False
    world.feed(SwapGeneration())
    world.run(1)
    stale = next(ready.commit for ready in reversed(world.ready) if ready.commit is not None)
    world.read(endpoint(0), endpoint(1), endpoint(5))
    world.run(1)
    before = [(r.writer, r.contour, r.generation) for r in world.records]
    world.feed(CommitGeneration(stale))
    assert [(r.writer, r.contour, r.generation) for r in world.records] == before
    assert world.core.books.generations.active == 1
    current = world.core.books.generations.pending
    assert current is not None
    world.feed(CommitGeneration(replace(current.key, generation=current.key.generation - 1)))
    world.feed(CommitGeneration(replace(current.key, revision=current.key.revision + 1)))
    assert world.core.books.generations.active == 1
    # One that is what it was, but no longer covered.
    for record in world.records:
        if record.contour is Contour.WARM:
            world.end(record.writer)
    world.feed(CommitGeneration(current.key))
    assert world.core.books.generations.active == 1


def test_a_dial_of_an_older_map_publishes_nothing(world: World) -> None:
    world.latency_s = 5.0
    world.cancel_s = 60.0
    world.read(endpoint(0, incarnation=1))
    world.run(1)
    world.read(endpoint(0, incarnation=2))
    world.run(4.5)
    assert world.core.books.refill.counts.stale == 2
    assert not [record for record in world.records if record.incarnation == 1]
    world.run(20)
    assert len(world.active()) == 2


def test_all_triggers_share_one_pending_generation(world: World) -> None:
    started(world, 2)
    world.up[endpoint(0).key] = False
    world.feed(SwapGeneration())
    pending = world.core.books.generations.pending
    assert pending is not None
    world.feed(SwapGeneration())
    world.feed(SetPolicy(replace(STATIC, reinit_interval_s=5, reinit_jitter=0)))
    world.run(8)
    again = world.core.books.generations.pending
    assert again is not None
    assert again.key == pending.key
    assert again.triggers == {Trigger.OPERATOR, Trigger.PERIODIC}
    assert world.core.books.generations.superseded == 0


def test_shadows_of_an_only_endpoint_are_rotated() -> None:
    world = World(replace(STATIC, shadow_writers=1, shadow_rotation_s=900))
    world.read(endpoint(0))
    world.run(1)
    before = {record.writer for record in world.active()}
    assert len(before) == 3
    world.run(905)
    after = {record.writer for record in world.active()}
    assert len(after) == 3
    assert len(after - before) == 1
    assert world.core.books.replacements.counts.committed == 1
    world.close()


def test_a_probe_ends_a_quarantine() -> None:
    world = World(replace(STATIC, quarantine_failures=3, fast_retries=1, quarantine_s=4000))
    started(world, 2)
    world.fail(endpoint(0).key)
    world.run(300)
    assert world.core.snapshot(world.now).quarantined == 1
    assert world.core.snapshot(world.now).probes >= 3
    world.fail(endpoint(0).key, up=True)
    world.run(65)
    assert world.core.snapshot(world.now).quarantined == 0
    assert len(world.active(endpoint(0).key)) == 2
    world.close()


def test_a_cell_with_nothing_left_is_never_left_to_rest(world: World) -> None:
    listed = started(world, 3)
    for entry in listed:
        world.fail(entry.key)
    world.run(900)  # each has failed often enough for quarantine and for the longest pause
    for entry in listed:
        world.up[entry.key] = True
    world.run(2.5)
    assert all(world.active(entry.key) for entry in listed)


def test_an_endpoint_that_rests_is_dialled_when_its_cell_loses_the_others() -> None:
    world = World(replace(STATIC, quarantine_failures=3, fast_retries=1, quarantine_s=4000, probes=False))
    one, two = started(world, 2)
    world.fail(one.key)
    world.run(300)
    assert world.core.snapshot(world.now).quarantined == 1
    world.up[one.key] = True
    world.run(300)
    assert not world.active(one.key)
    world.fail(two.key)
    world.run(3)
    assert world.active(one.key)
    world.close()
