"""The page pool against a device that remembers what was written where, under random interleavings.

Every job that runs reads its whole visible prefix before each step; whatever the pool did wrong for others shows there.
`check_integrity` runs after every rule. Planted bugs show that the checker would notice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from libs.continuation.chain import chunks_after, tails_after
from libs.controller.catalog_facts import Chunk, Node
from services.worker.handlers import CheckpointRange, JobPages, Lease, NodeFill
from services.worker.pages.admission import Admission, Wanted
from services.worker.pages.books import Books
from services.worker.pages.errors import InsufficientPagesError
from services.worker.pages.frames import Frames, PageState
from services.worker.pages.pool import PagePool
from services.worker.pages.residency import Match
from services.worker.pages.restores import Restores
from services.worker.pages.route import Continuation, Reservation, Route
from services.worker.pages.sizing import GroupSpec, PageSizes
from tests.worker.pool_device import Device, Slot, key, prefix_marks

PICK = st.integers(0, 1 << 16)
T = TypeVar("T")
ROOTS = ("11" * 32, "22" * 32)
SIZES = PageSizes(page=16, chunk=256, step=96)


def choose(values: Sequence[T], pick: int) -> T:
    return values[pick % len(values)]


def document(which: int, length: int) -> tuple[int, ...]:
    """Documents share their first 300 or 520 tokens, so that prompts meet and part at interesting places."""
    shared = [7] * 300 if which < 2 else [7] * 300 + [8] * 220
    return tuple((shared + [100 + which * 3 + position % 3 for position in range(4000)])[:length])


@dataclass
class Running:
    number: int
    root: str
    tokens: list[int]
    budget_end: int
    pages: JobPages | None = None
    end: int = 0
    nodes: tuple[Node, ...] = ()
    fills: tuple[NodeFill, ...] = ()

    def marks(self) -> list[Slot]:
        return prefix_marks(self.root, self.tokens)


class PoolMachine(RuleBasedStateMachine):
    pool_class: type[PagePool] = PagePool

    @initialize(
        windows=st.sampled_from([(0,), (0, 32), (0, 300), (40, 0, 600)]),
        pages=st.sampled_from([(70, 70), (260, 120), (500, 150)]),
    )
    def open(self, windows: tuple[int, ...], pages: tuple[int, int]) -> None:
        self.groups = [GroupSpec(f"g{i}-w{window}", window, pages[window > 0]) for i, window in enumerate(windows)]
        self.pool = self.pool_class(self.groups, SIZES)
        self.device = Device(self.groups, SIZES)
        self.jobs: list[Running] = []
        self.ranges: list[CheckpointRange] = []
        self.leases: list[tuple[Lease, list[list[Slot]]]] = []
        self.stale: list[tuple[int, NodeFill]] = []
        self.number, self.now = 0, 0.0

    def of(self, root: str) -> Continuation:
        return Continuation("ff" * 32, root, "00" * 16)

    @rule(
        which=st.integers(0, 3),
        length=st.one_of(
            st.integers(1, 700), st.integers(900, 1500), st.sampled_from([255, 256, 257, 272, 300, 301, 512, 513, 528])
        ),
        budget=st.integers(1, 300),
        root=st.sampled_from(ROOTS),
        chain=st.integers(0, 3),
        tail=st.integers(0, 15),
        follow=st.booleans(),
    )
    def reserve(self, which: int, length: int, budget: int, root: str, chain: int, tail: int, follow: bool) -> None:
        tokens = document(which, length)
        if follow and self.jobs:
            other = self.jobs[-1]
            tokens, root = (*other.tokens, 5, 6), other.root
        self.submit(root, tokens, budget, self.chain(root, tokens, chain, tail))

    def submit(self, root: str, tokens: tuple[int, ...], budget: int, nodes: tuple[Node, ...]) -> None:
        self.number += 1
        self.now += 1
        wanted = Wanted(self.of(root), tokens, budget, 0, nodes)
        try:
            made = self.pool.reserve(key(self.number), wanted, self.now)
        except InsufficientPagesError:
            return
        assert made.resident < len(tokens)
        job = Running(self.number, root, list(tokens), len(tokens) + budget - 1, end=made.resident)
        job.nodes = made.restore
        self.jobs.append(job)

    def chain(self, root: str, tokens: tuple[int, ...], chunks: int, tail: int) -> tuple[Node, ...]:
        known = list(chunks_after(root, tokens))[:chunks]
        nodes = [*known]
        if tail and len(known) == chunks:
            head, end = (known[-1].hash, known[-1].end) if known else (root, 0)
            nodes += [node for node in tails_after(head, tokens[end:], end) if node.end - node.start == tail * 16]
        return tuple(Node(Chunk(node.hash, node.parent, node.start, node.end, tail=node.is_tail)) for node in nodes)

    @precondition(lambda self: any(job.nodes for job in self.jobs))
    @rule(pick=PICK, land=st.integers(0, 4))
    def restore(self, pick: int, land: int) -> None:
        job = choose([job for job in self.jobs if job.nodes], pick)
        nodes, job.nodes = job.nodes, ()
        landed = 0
        for _ in range(2):
            fills = self.pool.plan_restore(key(job.number), nodes)
            for fill in fills[: land or len(fills)]:
                self.device.load(fill, job.marks())
                assert self.pool.landed(key(job.number), fill)
            self.stale += [(job.number, fill) for fill in fills if fill.fills]
            if not land or land >= len(nodes):
                landed = nodes[-1].chunk.end
                break
            nodes, land = nodes[:land], 0
        before = job.end
        job.end = self.pool.restored(key(job.number), landed)
        assert job.end in (before, landed)
        assert not landed or job.end == landed, "a restore that landed whole must count"

    @precondition(lambda self: any(job.nodes for job in self.jobs))
    @rule(pick=PICK, tokens=st.integers(200, 800), branch=st.booleans(), rows=st.sampled_from([1, SIZES.step]))
    def overtake(self, pick: int, tokens: int, branch: bool, rows: int) -> None:
        """A restore brings a part; before the run begins another one computes more of the same."""
        job, before = choose([job for job in self.jobs if job.nodes], pick), len(self.jobs)
        self.restore(pick, 1)
        others = [other for other in self.jobs if other.pages is not None and other.root == job.root]
        if branch or not others:
            self.submit(job.root, (*job.tokens, 9), 40, ())
            others = self.jobs[before:]
        for other in others[-1:]:
            goal = min(job.end + tokens, len(other.tokens))
            while other.end < goal:
                self.one_step(other, SIZES.step)
        self.pool.check_integrity()
        self.one_step(job, rows)

    @precondition(lambda self: self.stale)
    @rule(pick=PICK)
    def late_landing(self, pick: int) -> None:
        """An upload event that comes after its restore is over changes nothing."""
        number, fill = choose(self.stale, pick)
        before = self.pool.pages()
        assert not self.pool.landed(key(number), fill)
        assert self.pool.pages() == before

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK, rows=st.sampled_from([1, 17, SIZES.step]), times=st.sampled_from([1, 3, 20]))
    def step(self, pick: int, rows: int, times: int) -> None:
        job = choose(self.jobs, pick)
        job.nodes = ()
        for _ in range(times):
            self.one_step(job, rows)

    def one_step(self, job: Running, rows: int) -> None:
        if job.pages is None:
            job.pages = self.pool.job_pages(key(job.number))
            start = job.pages.begin()
            assert start.start >= job.end
            job.end = start.start
            for copy in start.copies:
                self.device.copy(copy.group, copy.source, copy.target, copy.slots)
        if job.end >= job.budget_end:
            return
        end = min(job.end + rows, len(job.tokens))
        job.pages.prepare(end)
        marks = job.marks()
        self.device.read(job.pages, marks, job.end, end)
        self.device.write(job.pages, marks, job.end, end)
        job.pages.computed(end)
        job.end = end
        drawn = [1000 + job.number] if end == len(job.tokens) and end < job.budget_end else []
        job.tokens += drawn
        self.ranges += self.pool.progress(key(job.number), drawn)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        job = choose(self.jobs, pick)
        self.jobs.remove(job)
        self.now += 1
        self.ranges += self.pool.release(key(job.number), self.now)

    @precondition(lambda self: self.ranges)
    @rule(pick=PICK)
    def lease(self, pick: int) -> None:
        wanted = choose(self.ranges, pick)
        if any(lease.range_route == wanted.route for lease, _ in self.leases):  # type: ignore[attr-defined]
            return
        lease = self.pool.lease(wanted)
        if lease is None:
            return
        lease.range_route = wanted.route  # type: ignore[attr-defined]
        held = [self.device.snapshot(part) for part in lease.groups]
        full = [group.name for group in self.groups if not group.window]
        assert set(full) <= {part.group for part in lease.groups}
        assert [[slot[1] for slot in values if slot] for values in held] == [
            list(range(wanted.start, wanted.end)) for _ in held
        ]
        self.leases.append((lease, held))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def end_lease(self, pick: int) -> None:
        lease, held = self.leases.pop(pick % len(self.leases))
        assert [self.device.snapshot(part) for part in lease.groups] == held, "leased pages were written to"
        lease.release()
        lease.release()

    @precondition(lambda self: self.ranges)
    @rule(pick=PICK, durable=st.booleans())
    def settle(self, pick: int, durable: bool) -> None:
        wanted = self.ranges.pop(pick % len(self.ranges))
        if any(lease.range_route == wanted.route for lease, _ in self.leases):  # type: ignore[attr-defined]
            self.ranges.append(wanted)
            return
        self.pool.settled(wanted, durable=durable)

    @rule()
    def settle_all(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.leases = []
        for wanted in self.ranges:
            self.pool.settled(wanted, durable=True)
        self.ranges = []

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()

    def teardown(self) -> None:
        """At rest nothing is reserved, loading or evicting, and everything can be had by one assignment."""
        if not hasattr(self, "pool"):
            return
        for job in self.jobs:
            self.ranges += self.pool.release(key(job.number), self.now)
        self.settle_all()
        self.pool.check_integrity()
        for pages in self.pool.pages().values():
            assert pages.free + pages.evictable == pages.total, pages


EXAMPLES = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def test_random_interleavings_keep_every_prefix_readable() -> None:
    run_state_machine_as_test(PoolMachine, settings=EXAMPLES)


def walk(machine: PoolMachine, seed: int, steps: int) -> None:
    """A longer life than hypothesis gives: mostly running work, some of it cut short."""
    rng = random.Random(seed)
    deep = bool(seed % 2)
    windows = rng.choice([(0, 32), (0, 300), (40, 0, 600)]) if deep else rng.choice([(0,), (0, 32), (0, 300)])
    machine.open(windows, rng.choice([(400, 160), (600, 250)]) if deep else rng.choice([(130, 130), (330, 200)]))
    for _ in range(steps):
        pick = rng.getrandbits(16)
        match rng.choices(
            ["reserve", "restore", "overtake", "step", "finish", "lease", "unlease", "settle", "late", "all"],
            [4 if deep else 8, 4, 3, 16, 1.5, 8, 4, 6, 1, 0.5],
        )[0]:
            case "reserve":
                length = (
                    rng.randint(700, 1700) if deep else rng.choice([rng.randint(1, 600), 256, 257, 300, 512, 528, 1100])
                )
                machine.reserve(
                    rng.randrange(4),
                    length,
                    rng.choice([1, 40, 300]),
                    rng.choice(ROOTS),
                    rng.randrange(4),
                    rng.randrange(16),
                    rng.random() < 0.4,
                )
            case "restore" if any(job.nodes for job in machine.jobs):
                machine.restore(pick, rng.randrange(5))
            case "overtake" if any(job.nodes for job in machine.jobs):
                machine.overtake(pick, rng.randint(200, 800), bool(pick & 1), rng.choice([1, SIZES.step]))
            case "step" if machine.jobs:
                machine.step(pick, rng.choice([1, 17, SIZES.step]), rng.choice([1, 4, 16]))
            case "finish" if machine.jobs:
                machine.finish(pick)
            case "lease" if machine.ranges:
                machine.lease(pick)
            case "unlease" if machine.leases:
                machine.end_lease(pick)
            case "settle" if machine.ranges:
                machine.settle(pick, bool(pick & 1))
            case "late" if machine.stale:
                machine.late_landing(pick)
            case "all":
                machine.settle_all()
        machine.integrity()
    machine.teardown()


@pytest.mark.parametrize("seed", range(12))
def test_long_walks(seed: int) -> None:
    walk(PoolMachine(), seed, 250)


# --- planted bugs ---


def caught(steps: int = 250, seeds: int = 24) -> bool:
    """Whether any of the walks notices."""
    for seed in range(seeds):
        try:
            walk(PoolMachine(), seed, steps)
        except (AssertionError, IndexError, KeyError):
            return True
    return False


def test_a_copy_on_write_page_left_out_of_the_demand_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Admission._first_new

    def too_few(self: Admission, match: Match | None, claims: bool) -> int:
        page = self._sizes.page
        return -(-match.boundary // page) if match is not None else honest(self, match, claims)

    monkeypatch.setattr(Admission, "_first_new", too_few)
    assert caught()


def test_a_partial_page_shared_instead_of_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "copy", lambda *_: None)
    assert caught()


def test_a_page_freed_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Frames.give_back

    def twice(self: Frames, page: int) -> None:
        honest(self, page)
        self._free.append(page)

    monkeypatch.setattr(Frames, "give_back", twice)
    assert caught()


def test_late_uploads_without_the_generation_check_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: Restores, held: Reservation | None, fill: NodeFill) -> int:
        for part in fill.fills:
            frames = self._books.frames[self._books.group(part.group)]
            for page in part.pages:
                if frames.states[page] in (PageState.RESERVED, PageState.LOADING):
                    frames.move(page, PageState.RESIDENT)
        if held is not None:
            held.loading = {}
        return 0

    monkeypatch.setattr(Restores, "landed", trusting)
    assert caught()


def test_shared_window_pages_without_compensation_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Books, "owed", lambda self, match: [0] * len(self.groups))
    assert caught(seeds=60)


def test_restored_pages_that_an_adopter_keeps_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt, unmap, adopting = Admission.adopt, Books.unmap, list[Reservation]()

    def watched(self: Admission, held: Reservation) -> None:
        adopting.append(held)
        adopt(self, held)
        adopting.pop()

    def keeping(self: Books, route: Route, g: int, page: int, heir: Reservation | None) -> int:
        kept = heir is not None and heir in adopting and heir.brought and self.groups[g].window
        return 0 if kept else unmap(self, route, g, page, heir)

    monkeypatch.setattr(Admission, "adopt", watched)
    monkeypatch.setattr(Books, "unmap", keeping)
    assert caught()


def test_a_lease_that_pins_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Books, "pin", lambda *_: None)
    monkeypatch.setattr(Books, "unpin", lambda *_: None)
    assert caught()


def test_a_window_cut_one_chunk_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PageSizes.keep_from
    monkeypatch.setattr(PageSizes, "keep_from", lambda self, window, end: honest(self, window, end) + 256 * (end > 512))
    assert caught()


def test_the_span_without_room_for_a_lease_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def tight(self: PageSizes, window: int, first_new: int, budget_end: int) -> int:
        new = max(0, self.pages(budget_end) - first_new)
        return new if window == 0 else min(new, self.span(window) - 1)

    monkeypatch.setattr(PageSizes, "demand", tight)
    assert caught(seeds=60)
