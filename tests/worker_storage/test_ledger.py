"""Every offer is settled exactly once, parents before children, whatever happens in between."""

from __future__ import annotations

import hashlib
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.controller.protocol import AssignmentId
from services.worker.checkpoint.ledger import End, Entry, Ledger, Settlement, Stage
from services.worker.handlers import CheckpointRange

GROUPS = frozenset({"full", "w"})


def offer(path: str, route: int, tail: bool = False) -> CheckpointRange:
    """The range whose place in the tree of prefixes is `path`, such as "abb"."""
    name = lambda text: hashlib.sha256(text.encode()).hexdigest()  # noqa: E731
    start = 256 * (len(path) - 1)
    return CheckpointRange(
        route, AssignmentId("r", route), "f" * 64, "0" * 32, name(path[:-1]), name(path), start, start + 256, tail, ()
    )


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(limit=12)
        self.now = 0.0
        self.offered: list[CheckpointRange] = []
        self.settled: list[Settlement] = []
        self.held: dict[Stage, list[Entry]] = {stage: [] for stage in Stage}
        self.published: list[str] = []
        self.standing: set[str] = set()

    def took(self, settlements: list[Settlement]) -> None:
        self.settled += settlements
        for settlement in settlements:
            if settlement.end.durable:
                self.standing.add(settlement.what.hash)

    @rule(path=st.text("ab", min_size=1, max_size=5), route=st.integers(1, 3))
    def offers(self, path: str, route: int) -> None:
        for end in range(1, len(path) + 1):
            what = offer(path[:end], route)
            self.offered.append(what)
            self.took(self.ledger.offer(what, self.now))

    @rule(seconds=st.floats(0, 1))
    def time(self, seconds: float) -> None:
        self.now += seconds
        for entry in self.ledger.late(self.now - 10):
            assert entry.stage is not Stage.CAPTURING
            self.took(self.ledger.settle(entry, End.TOO_LATE))

    @rule(most=st.integers(1, 5), known=st.sets(st.integers(0, 4)), away=st.booleans())
    def asks(self, most: int, known: set[int], away: bool) -> None:
        run = self.ledger.to_ask(most)
        assert all(b.what.parent == a.what.hash for a, b in pairwise(run))
        if away:
            self.ledger.back(run)
            return
        stands = True
        for index, entry in enumerate(run):
            # Chains are prefix-closed: what stands is a prefix.
            stands = stands and index in known and (not entry.what.start or entry.what.parent in self.standing)
            self.took(self.ledger.asked(entry, GROUPS if stands else (), GROUPS))

    @rule(outcome=st.sampled_from(["captured", "busy", "gone"]))
    def captures(self, outcome: str) -> None:
        entry = self.ledger.next_wanted()
        if entry is None:
            return
        entry.stage = Stage.CAPTURING
        if outcome == "busy":
            self.ledger.back([entry])
        elif outcome == "gone":
            self.took(self.ledger.settle(entry, End.NOT_RESIDENT))
        else:
            entry.stage = Stage.MOVING
            self.held[Stage.MOVING].append(entry)

    @rule(which=st.integers(-2, 1))
    def moves(self, which: int) -> None:
        moving = self.held[Stage.MOVING]
        if moving:
            entry = moving.pop(which % len(moving))
            if not entry.settled:
                entry.stage = Stage.MOVED

    @rule(most=st.integers(1, 4), outcome=st.sampled_from(["done", "away", "refused"]))
    def publishes(self, most: int, outcome: str) -> None:
        batch = self.ledger.to_publish(most)
        before: set[str] = set()
        for entry in batch:
            parent = entry.what.parent
            assert entry.what.start == 0 or parent in before or parent not in self.ledger._entries
            before.add(entry.what.hash)
        if outcome == "away":
            self.ledger.back(batch)
            return
        for entry in batch:
            self.took(self.ledger.settle(entry, End.PUBLISHED if outcome == "done" else End.REFUSED))

    @invariant()
    def exactly_once(self) -> None:
        pending = [found for entry in self.ledger.remaining() for found in entry.offers]
        ended = [settlement.what for settlement in self.settled]
        assert sorted(map(id, [*pending, *ended])) == sorted(map(id, self.offered))
        assert self.ledger.offers == len(pending)

    @invariant()
    def nothing_waits_for_what_was_given_up(self) -> None:
        for entry in self.ledger.remaining():
            assert entry.what.parent not in self.ledger._broken or entry.what.parent in self.ledger._entries

    def teardown(self) -> None:
        for entry in self.ledger.remaining():
            self.took(self.ledger.settle(entry, End.CLOSED))
        assert len(self.settled) == len(self.offered) and len(self.ledger) == 0


TestLedger = LedgerMachine.TestCase


def test_the_checker_sees_a_double_settlement() -> None:
    machine = LedgerMachine()
    machine.offers("ab", 1)
    entry = machine.ledger.remaining()[0]
    settlements = machine.ledger.settle(entry, End.REFUSED)
    assert [settlement.end for settlement in settlements] == [End.REFUSED, End.ORPHAN]
    machine.took([*settlements, settlements[0]])
    try:
        machine.exactly_once()
    except AssertionError:
        return
    raise RuntimeError("not seen")


def test_a_child_of_a_lost_range_is_lost_at_once_until_the_parent_comes_again() -> None:
    ledger = Ledger(10)
    ledger.offer(offer("a", 1), 0.0)
    ledger.settle(ledger.remaining()[0], End.NOT_RESIDENT)
    assert [s.end for s in ledger.offer(offer("ab", 1), 0.0)] == [End.ORPHAN]
    assert [s.end for s in ledger.offer(offer("abb", 1), 0.0)] == [End.ORPHAN]
    assert ledger.offer(offer("a", 2), 1.0) == [] and ledger.offer(offer("ab", 2), 1.0) == []


def test_a_full_queue_gives_up() -> None:
    ledger = Ledger(1)
    assert ledger.offer(offer("a", 1), 0.0) == []
    assert [s.end for s in ledger.offer(offer("ab", 1), 0.0)] == [End.QUEUE_FULL]


def test_a_child_whose_objects_are_there_first_waits_for_its_parent() -> None:
    ledger = Ledger(10)
    for path in ("a", "ab", "abb"):
        ledger.offer(offer(path, 1), 0.0)
    for entry in ledger.to_ask(10):
        ledger.asked(entry, (), GROUPS)
    parent, child, grandchild = ledger.remaining()
    child.stage = grandchild.stage = Stage.MOVED
    assert ledger.to_publish(10) == []
    parent.stage = Stage.MOVED
    assert ledger.to_publish(2) == [parent, child]
    assert ledger.to_publish(2) == []  # the parent is only on its way
    ledger.back([parent, child])
    assert ledger.to_publish(10) == [parent, child, grandchild]


def test_what_stands_is_not_broken_by_a_later_offer_that_fails() -> None:
    ledger = Ledger(1)
    ledger.offer(offer("a", 1), 0.0)
    ledger.settle(ledger.remaining()[0], End.PUBLISHED)
    ledger.offer(offer("b", 1), 0.0)
    assert [s.end for s in ledger.offer(offer("a", 2), 0.0)] == [End.QUEUE_FULL]
    ledger.settle(ledger.remaining()[0], End.PUBLISHED)
    assert ledger.offer(offer("ab", 2), 0.0) == []
