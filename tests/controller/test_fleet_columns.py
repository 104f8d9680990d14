"""The fleet as columns: a large fleet planned in full and by bounds, drained queues, assumed prefixes, the index."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.controller import candidates, residency, smoothing
from libs.controller.bounds import _mixed
from libs.controller.candidates import Variant, variant
from libs.controller.discovery import Forgotten, Observed
from libs.controller.fleet import Fleet
from libs.controller.knobs import POLICY_KNOBS, PolicyKnobs
from libs.controller.policy import band_ms, mixed
from libs.controller.protocol import (
    AssignmentId,
    GenerationRequest,
    Gone,
    Load,
    OfferReply,
    Pages,
    PrefillCost,
    Resident,
    Tier,
    TierCost,
)
from libs.controller.residency import ResidencyIndex
from libs.controller.router_effects import Accepted, Booked, Unbooked
from libs.controller.router_events import Plan
from libs.controller.table import Table
from libs.controller.ways import Ways
from tests.controller.world import (
    FULL,
    MODEL,
    WINDOW,
    a_request,
    heartbeat,
    nodes_of,
    observe,
    random_world,
    with_fixed,
)

EVERYBODY = replace(POLICY_KNOBS, considered=10_000, considered_others=10_000, ranked=10_000)


def large(seed: int, workers: int) -> tuple[Fleet, GenerationRequest, Variant]:
    """Some hold a part of the chain in their pages or memory, some on disk; pages are short; a few drain."""
    draw = random.Random(seed)
    request = a_request(draw.randint(600, 2_600), name=f"r{seed}")
    names = [f"w{number:03}" for number in range(workers)]
    empty = variant(MODEL, request)
    count = len(empty.chain.chunks)
    disks = [[(name, group.name) for name in draw.sample(names, 3) for group in (FULL, WINDOW)] for _ in range(count)]
    durable = [{FULL.name, WINDOW.name}] * draw.randint(0, count)
    nodes, _ = nodes_of(request, durable, disks[: len(durable)])
    holders = set(draw.sample(names, draw.randint(0, 12)))
    beats = []
    for name in names:
        held = []
        if name in holders:
            depth = draw.randint(1, count)
            tier = draw.choice([Tier.GPU, Tier.RAM])
            held = [Resident(link.hash, link.end, tier, MODEL.fingerprint) for link in empty.chain.chunks[:depth]]
        costs = tuple(
            TierCost(tier, draw.uniform(0, 20), draw.uniform(1e3, 1e6), draw.choice([0, 300]))
            for tier in (Tier.GPU, Tier.RAM, Tier.SSD, Tier.PEER, Tier.OBJECT)
        )
        total = draw.choice([200, 1_000])
        beats.append(
            heartbeat(
                name,
                load=Load(draw.choice([0.0, draw.uniform(0, 900)]), pages=Pages(total, draw.randint(0, total))),
                draining=draw.random() < 0.1,
                prefill=(PrefillCost(1_024, draw.uniform(0.2, 2)), PrefillCost(8_192, draw.uniform(0.2, 3))),
                tiers=costs,
                resident=tuple(held),
            )
        )
    fleet = observe(Fleet(), *beats)
    with_fixed(fleet, draw)
    return fleet, request, variant(MODEL, request, nodes)


def plan(fleet: Fleet, request: GenerationRequest, entry: Variant, knobs: PolicyKnobs | None = None) -> Plan:
    return candidates.plan(request, (entry,), fleet, 0.0, knobs=knobs)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([30, 90]))
def test_the_few_that_are_scored_hold_the_best_of_all(seed: int, workers: int) -> None:
    fleet, request, entry = large(seed, workers)
    few, every = plan(fleet, request, entry), plan(fleet, request, entry, EVERYBODY)
    assert bool(few.ranked) == bool(every.ranked)
    if every.ranked:
        best = min(one.candidate.ttft_ms for one in every.ranked)
        found = min(one.candidate.ttft_ms for one in few.ranked)
        assert found == pytest.approx(best)
        assert few.ranked[0].candidate.ttft_ms <= band_ms(best, POLICY_KNOBS)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([14, 30, 60]))
def test_who_is_not_looked_at_would_not_have_been_ranked(seed: int, workers: int) -> None:
    fleet, request, entry = large(seed, workers)
    found = plan(fleet, request, entry, replace(EVERYBODY, ranked=POLICY_KNOBS.ranked)).ranked
    assert found == plan(fleet, request, entry, EVERYBODY).ranked[: POLICY_KNOBS.ranked]


def test_columns_that_only_moved_are_those_that_would_be_written() -> None:
    draw = random.Random(7)
    fleet, request, entry = large(7, 8)
    booked: list[AssignmentId] = []
    for number in range(200):
        if booked and draw.random() < 0.4:
            fleet.account(Unbooked(booked.pop(draw.randrange(len(booked)))), float(number))
        else:
            best = candidates.plan(request, (entry,), fleet, float(number)).ranked
            if best:
                booked.append(AssignmentId(f"b{number}", 1))
                fleet.account(Booked(booked[-1], draw.choice(best).candidate), float(number))
        moved = fleet.table()
        for worker, view in fleet.views().items():
            slot = fleet.index.slot_of(worker)
            assert slot is not None
            fresh = Table(fleet.knobs)
            fresh.write(0, view, fleet.corrections.of(worker))
            assert moved.columns[slot] == fresh.columns[0] == moved.rows[:, slot].tolist()


def below_every_way(world: tuple[Fleet, GenerationRequest, Variant]) -> None:
    """No worker has a way that is quicker than its bound."""
    fleet, request, entry = world

    def look_at(self: Ways, slots: object) -> None:
        length, every = len(request.tokens), range(self.table.size)
        shared = self.sources.shared()
        bounds = candidates.bounds._bounds(self.prefixes.own, self.table, shared, length, self.now_ms)
        least = (bounds + min(self.fixed)).tolist()
        for slot in every:
            before = len(self.found)
            self._worker(slot)
            assert all(way.ttft_ms >= least[slot] * (1 - 1e-9) for way in self.found[before:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ways, "look_at", look_at)
        plan(fleet, request, entry)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
def test_no_way_is_quicker_than_its_workers_bound(seed: int, windowed: bool) -> None:
    world = random_world(seed)
    below_every_way((world.fleet, world.request, world.variant) if windowed else large(seed, 12))


def test_a_bound_that_looks_at_the_wrong_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = candidates.bounds._bounds
    monkeypatch.setattr(candidates.bounds, "_bounds", lambda *values: -honest(*values))
    with pytest.raises(AssertionError):
        test_the_few_that_are_scored_hold_the_best_of_all()


def test_of_many_idle_workers_the_draw_is_among_all() -> None:
    fleet = observe(Fleet(), *(heartbeat(f"w{number:03}") for number in range(200)))
    first = set()
    for number in range(60):
        request = a_request(200, name=f"r{number}")  # too short for others to wait for it
        entry = variant(MODEL, request)
        chosen = [plan(fleet, request, entry, knobs).ranked[0].candidate.worker for knobs in (None, EVERYBODY)]
        assert chosen[0] == chosen[1]
        first.add(chosen[0])
    assert len(first) > 40


def test_columns_mix_as_numbers_do() -> None:
    import numpy as np

    values = [0, 1, 2**63, 2**64 - 1, 0x1234567890ABCDEF]
    assert _mixed(np.array(values, np.uint64)).tolist() == [mixed(value) for value in values]


def test_a_queue_drains_while_nothing_is_heard() -> None:
    fleet = observe(Fleet(), heartbeat("w", load=Load(100.0)), now_ms=1_000.0)
    view = fleet.view("w")
    assert view is not None
    assert [view.queue_ms(now) for now in (1_000.0, 1_060.0, 1_500.0)] == [100.0, 40.0, 0.0]
    request = a_request(600)
    ranked = candidates.plan(request, (variant(MODEL, request),), fleet, 1_060.0).ranked
    assert ranked[0].candidate.queue_ms == 40.0
    # What is booked when the worker has long been idle takes its own time from then on.
    fleet.account(Booked(AssignmentId("r", 1), ranked[0].candidate), 2_000.0)
    assert view.queue_ms(2_000.0) == pytest.approx(600.0)


def test_what_was_just_assigned_is_on_its_way_there() -> None:
    fleet = observe(Fleet(), *(heartbeat(f"w{number}") for number in range(4)))
    first, second = a_request(1_100, name="a"), a_request(1_100, name="b")
    entry = variant(MODEL, first)
    best = plan(fleet, first, entry).ranked[0].candidate
    fleet.account(Booked(AssignmentId("a", 1), best), 0.0)
    found = {(one.candidate.worker, one.candidate.tier): one.candidate for one in plan(fleet, second, entry).ranked}
    coming = found[best.worker, Tier.INFLIGHT]
    assert coming.cached_tokens == 1_024 and coming.load_ms == pytest.approx(1_024.0)
    fleet.account(Unbooked(AssignmentId("a", 1)), 5.0)
    assert not fleet.index.assumed
    assert {one.candidate.tier for one in plan(fleet, second, entry).ranked} == {Tier.NONE}


def test_only_a_heartbeat_says_what_is_still_on_its_way() -> None:
    """An offer's reply does not: until the next heartbeat comes, others must know what was assigned before it."""
    fleet = observe(Fleet(), *(heartbeat(f"w{number}") for number in range(4)))
    first, second = a_request(1_100, name="a"), a_request(1_100, name="b")
    entry, assignment, other = variant(MODEL, first), AssignmentId("a", 1), AssignmentId("x", 1)
    best = plan(fleet, first, entry).ranked[0].candidate
    fleet.account(Booked(assignment, best), 0.0)
    fleet.replied(best.worker, OfferReply(assignment, best.epoch, True), 1.0)
    fleet.account(Accepted(assignment), 1.0)
    fleet.replied(best.worker, OfferReply(other, best.epoch, False, load=Load(900.0)), 200.0)
    view = fleet.view(best.worker)
    assert view is not None and view.queue_ms(200.0) == 900.0 and not view.booked_pages, "its counts contain it"
    tiers = {one.candidate.tier for one in plan(fleet, second, entry).ranked if one.candidate.worker == best.worker}
    assert tiers == {Tier.NONE, Tier.INFLIGHT}
    fleet.observe(Observed(heartbeat(best.worker, sequence=2), False, True), 201.0)
    assert not fleet.index.assumed
    assert {one.candidate.tier for one in plan(fleet, second, entry).ranked} == {Tier.NONE}


def test_reports_are_smoothed_and_other_buckets_taken_as_they_are() -> None:
    old, new = (PrefillCost(512, 1.0), PrefillCost(4_096, 2.0)), (PrefillCost(512, 2.0), PrefillCost(4_096, 2.0))
    assert smoothing.prefill(old, new, 0.25) == (PrefillCost(512, 1.25), PrefillCost(4_096, 2.0))
    assert smoothing.prefill(old, (PrefillCost(9, 5.0),), 0.25) == (PrefillCost(9, 5.0),)
    costs = smoothing.tiers({Tier.RAM: TierCost(Tier.RAM, 1.0, 100.0)}, [TierCost(Tier.RAM, 3.0, 50.0, 7)], 0.5)
    assert costs[Tier.RAM] == TierCost(Tier.RAM, 2.0, pytest.approx(1 / 0.015), 7)
    assert smoothing.tiers({Tier.RAM: costs[Tier.RAM]}, [], 0.5) == {}


NAMES = [f"{number:064x}" for number in range(12)]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "gone", "forget", "release"]),
        st.integers(0, 4),
        st.integers(0, len(NAMES) - 1),
        st.sampled_from([Tier.GPU, Tier.RAM, Tier.INFLIGHT]),
    ),
    max_size=60,
)


@given(OPERATIONS, st.sampled_from([2, 1 << 16]))
def test_the_index_says_what_a_plain_one_would(operations: list[tuple[str, int, int, Tier]], shared: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "_SHARED", shared)
        as_plain(operations)


def as_plain(operations: list[tuple[str, int, int, Tier]]) -> None:
    index, plain = ResidencyIndex(), dict[tuple[str, str], set[Tier]]()
    for kind, number, at, tier in operations:
        worker, name = f"w{number}", NAMES[at]
        if kind == "add":
            end = 256 * (at + 1) - (16 if at % 3 == 2 else 0)
            index.apply(heartbeat(worker, resident=(Resident(name, end, tier, "f"),)), 0.0, reset=False)
            tiers = plain.setdefault((worker, name), set())
            tiers.add(tier)
            if tier is Tier.GPU:
                tiers.discard(Tier.INFLIGHT)
        elif kind == "gone":
            index.drop(worker, Gone(name, tier))
            plain.get((worker, name), set()).discard(tier)
        else:
            (index.forget if kind == "forget" else index.release)(worker)
            plain = {key: tiers for key, tiers in plain.items() if key[0] != worker}
    plain = {key: tiers for key, tiers in plain.items() if tiers}
    for name in NAMES:
        wanted = {worker: tiers for (worker, held), tiers in plain.items() if held == name}
        assert {worker: set(holding) for worker, holding in index.holders(name).items()} == wanted
    assert len(index) == len({name for _, name in plain})
    for number in range(5):
        worker = f"w{number}"
        assert index.count(worker) == sum(key[0] == worker for key in plain)
        device = {name for (holder, name), tiers in plain.items() if holder == worker and Tier.GPU in tiers}
        depth = next((at for at, name in enumerate(NAMES) if name not in device), len(NAMES))
        assert index.find_matches(NAMES).get(worker, 0) == depth
    tails = {name for _, name in plain if NAMES.index(name) % 3 == 2}
    assert sum(index.tail_ends.values()) == len(tails)


def test_an_index_that_comes_and_goes_keeps_no_history() -> None:
    index = ResidencyIndex()
    for number in range(5_000):
        name = f"{number:064x}"
        index.apply(heartbeat("w", resident=(Resident(name, 256, Tier.GPU, "f"),)), 0.0, reset=False)
        index.drop("w", Gone(f"{number - 10:064x}", Tier.GPU))
    assert index.count("w") == 10 and len(index._logs[0]) < 200


def test_equal_holders_are_one_object_however_they_came_about() -> None:
    """Or whoever reads a chain would look at the same holders again and again."""
    index = ResidencyIndex()
    slots = [index.slot(f"w{number:03}") for number in range(100)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "_SHARED", 2)
        for name in NAMES:
            for slot in slots[-2:]:
                index.add(slot, Resident(name, 256, Tier.GPU, "f"), 0.0)
        for name in NAMES[:6]:
            index.drop("w099", Gone(name, Tier.GPU))
        index.add(slots[-2], Resident("new", 256, Tier.GPU, "f"), 0.0)
    assert len({id(index.gpu[residency.key_of(name)]) for name in (*NAMES[:6], "new")}) == 1
    assert len({id(index.gpu[residency.key_of(name)]) for name in NAMES[6:]}) == 1


BEATS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["beat", "drain", "withhold", "forget", "another"]),
        st.sampled_from([0, 4_096, 8_192]),
        st.sampled_from([0, 100, 1_000]),
    ),
    min_size=1,
    max_size=20,
)


def open_to_all(beats: list[tuple[int, str, int, int]]) -> None:
    """What all workers of a model take, asked after every heartbeat, is what one finds by looking at each of them."""
    fleet = Fleet()
    for number, kind, context, total in beats:
        worker, known = f"w{number}", fleet.view(f"w{number}")
        if kind == "forget" and known is not None:
            fleet.forget(Forgotten(worker, known.heartbeat.epoch))
        elif kind == "withhold":
            fleet.withhold(worker, True)
        else:
            models = ("0" * 64,) if kind == "another" else (MODEL.fingerprint,)
            load = Load(0.0, pages=Pages(total, total))
            observe(fleet, heartbeat(worker, load=load, max_context=context, draining=kind == "drain", models=models))
        table = fleet.table()
        views = [one for one in fleet.views().values() if MODEL.fingerprint in one.heartbeat.models]
        assert (table.serving(MODEL.fingerprint) is not None) == bool(views)
        if views:
            limits = [one.heartbeat.max_context or math.inf for one in views]
            limits += [one.load.pages.total * one.heartbeat.page_tokens or math.inf for one in views]
            open_to = -math.inf if any([one.draining for one in views]) else min(limits)
            assert table.open_to(MODEL.fingerprint) == (open_to, len(views))


@settings(deadline=None)
@given(BEATS)
def test_what_all_workers_take_is_known_as_they_come_and_go(beats: list[tuple[int, str, int, int]]) -> None:
    open_to_all(beats)


def test_a_planted_table_that_never_looks_again_is_caught() -> None:
    class Kept(dict[str, tuple[float, int]]):
        def clear(self) -> None:
            pass

    class Planted(Table):
        def __init__(self, knobs: PolicyKnobs) -> None:
            super().__init__(knobs)
            self._open = Kept()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr("libs.controller.fleet.Table", Planted)
        open_to_all([(0, "beat", 8_192, 0), (1, "beat", 4_096, 0)])
