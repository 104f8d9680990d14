"""Which chunks go: a pure function over one model's facts.

A chunk may go when it has expired by lack of use, by age, or as a tail whose full chunk exists; it goes when besides
nothing keeps it: no pin, and no chunk after it in its chain that stays. So what stays is prefix-closed, and what goes,
deepest first, consists of leaves at every moment. Age is inherited: a chunk past its maximal age takes with it all that
follows, however young, because it cannot go before. So are lost bytes: nobody restores past a chunk that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.facts.retentions import Keeping


@dataclass(slots=True)
class Fact:
    """A chunk as marking needs it. Hashes raw; days since 1970-01-01; revisions of the chunk's and its use's keys."""

    hash: bytes
    parent: bytes
    start: int
    end: int
    owner: str
    created_day: int
    revision: int
    tail: bool = False
    use_day: int = 0
    use_revision: int = 0
    pinned: bool = False

    @property
    def used_day(self) -> int:
        return max(self.created_day, self.use_day)


@dataclass(frozen=True, slots=True)
class Marked:
    """A chunk to remove, and why."""

    fact: Fact
    reason: pb.CollectReason


_INHERITED = frozenset({pb.COLLECT_REASON_AGE, pb.COLLECT_REASON_BYTES_GONE})

Rule = Callable[[Fact], "pb.CollectReason | None"]
"""Why a chunk may go by itself, if it may."""


def by_retention(today: int, standard: Keeping, owners: Mapping[str, Keeping], superseded: frozenset[bytes]) -> Rule:
    """Superseded tails, and what its owner's retention lets go."""

    def rule(fact: Fact) -> pb.CollectReason | None:
        keeping = owners.get(fact.owner, standard)
        if keeping.max_age_days and today - fact.created_day >= keeping.max_age_days:
            return pb.COLLECT_REASON_AGE
        if fact.hash in superseded:
            return pb.COLLECT_REASON_SUPERSEDED
        if keeping.idle_days and today - fact.used_day >= keeping.idle_days:
            return pb.COLLECT_REASON_IDLE
        return None

    return rule


def by_owner(owner: str) -> Rule:
    """Everything of one owner."""
    return lambda fact: pb.COLLECT_REASON_PURGED if fact.owner == owner else None


def by_loss(lost: Mapping[bytes, int]) -> Rule:
    """Chunks with an object that is not there: raw hash → revision of the fact that names it."""
    return lambda fact: pb.COLLECT_REASON_BYTES_GONE if lost.get(fact.hash) == fact.revision else None


def mark(facts: Iterable[Fact], rule: Rule, *, keep_pinned: bool = True) -> list[Marked]:
    """What goes, children before their parents."""
    by_start = sorted(facts, key=lambda fact: (fact.start, fact.hash))
    expired: dict[bytes, pb.CollectReason] = {}
    for fact in by_start:  # parents first
        reason = rule(fact)
        above = expired.get(fact.parent) if fact.start else None
        if above in _INHERITED:
            reason = above
        if reason is not None:
            expired[fact.hash] = reason
    kept: set[bytes] = set()
    marked: list[Marked] = []
    for fact in reversed(by_start):  # children first
        found = expired.get(fact.hash)
        if found is None or (fact.pinned and keep_pinned) or fact.hash in kept:
            # Of a root, which is no chunk, nothing is looked up.
            kept.add(fact.parent)
        else:
            marked.append(Marked(fact, found))
    return marked


def tails_in_question(facts: Sequence[Fact]) -> dict[bytes, list[Fact]]:
    """Parents that have tails and full chunks under them: parent → its full children. Hashes raw."""
    with_tail = {fact.parent for fact in facts if fact.tail}
    found: dict[bytes, list[Fact]] = {}
    for fact in facts:
        if not fact.tail and fact.parent in with_tail:
            found.setdefault(fact.parent, []).append(fact)
    return found
