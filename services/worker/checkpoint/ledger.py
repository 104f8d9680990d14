"""Every range on its way from offer to settlement. Pure: no I/O, no clock; time is a number of seconds.

    offered → asking → wanted → capturing → moving → moved → publishing → settled
                 └──────────── settled (known) ──────┘

A range is published after its parent: a child waits for a parent that is still in the ledger. When a range is given up,
so is everything that hangs on it, and its hash is remembered as broken, so that what is offered behind it later is
given up at once. The same range offered by two routes travels once and settles both.

Each offer comes out of this ledger in exactly one `Settlement`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from services.worker.handlers import CheckpointRange

_REMEMBERED = 8_192


class Stage(enum.Enum):
    """Where a range is."""

    OFFERED = "offered"
    ASKING = "asking"
    WANTED = "wanted"
    CAPTURING = "capturing"
    MOVING = "moving"
    MOVED = "moved"
    PUBLISHING = "publishing"
    SETTLED = "settled"


class End(enum.Enum):
    """How an offer ended."""

    PUBLISHED = "published"
    KNOWN = "known"
    NOT_RESIDENT = "not resident"
    TOO_LATE = "too late"
    REFUSED = "refused"
    ORPHAN = "orphan"
    QUEUE_FULL = "queue full"
    CLOSED = "closed"

    @property
    def durable(self) -> bool:
        return self in (End.PUBLISHED, End.KNOWN)


@dataclass(frozen=True, slots=True)
class Settlement:
    """The end of one offer."""

    what: CheckpointRange
    end: End


@dataclass(eq=False, slots=True)
class Entry:
    """One range. `what` is the first offer of it, `offers` all; `standing`: groups that already have a receipt."""

    what: CheckpointRange
    since: float
    offers: list[CheckpointRange]
    stage: Stage = Stage.OFFERED
    standing: frozenset[str] = frozenset()
    skipped: bool = False
    children: list[Entry] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        return self.stage is Stage.SETTLED


class Ledger:
    """`limit`: most entries. Order everywhere is the order of the offers, which is chain order per route."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[str, Entry] = {}
        self._broken: OrderedDict[str, None] = OrderedDict()
        self._durable: OrderedDict[str, None] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def offers(self) -> int:
        """Offers not settled."""
        return sum(len(entry.offers) for entry in self._entries.values())

    def offer(self, what: CheckpointRange, now: float) -> list[Settlement]:
        """Takes an offer in, or settles it at once."""
        entry = self._entries.get(what.hash)
        if entry is not None:
            entry.offers.append(what)
            return []
        if what.parent in self._broken and what.parent not in self._entries:
            self._mark_broken(what.hash)
            return [Settlement(what, End.ORPHAN)]
        if len(self._entries) >= self._limit:
            self._mark_broken(what.hash)
            return [Settlement(what, End.QUEUE_FULL)]
        self._broken.pop(what.hash, None)
        entry = self._entries[what.hash] = Entry(what, now, [what])
        parent = self._entries.get(what.parent)
        if parent is not None:
            parent.children.append(entry)
        return []

    # -------------------------------------------------------------------------------------------------------------- ask

    def to_ask(self, most: int) -> list[Entry]:
        """The next ranges to ask the catalog about: one chain, each the parent of the next. They are then *asking*."""
        run: list[Entry] = []
        for entry in self._at(Stage.OFFERED):
            if not run or (entry.what.parent == run[-1].what.hash and not run[-1].what.tail):
                run.append(entry)
                if len(run) == most:
                    break
        for entry in run:
            entry.stage = Stage.ASKING
        return run

    def asked(self, entry: Entry, standing: Collection[str], groups: Collection[str]) -> list[Settlement]:
        """The catalog has receipts for `standing` of the model's `groups`."""
        if entry.settled:
            return []
        entry.standing = frozenset(standing)
        if entry.standing >= set(groups):
            return self._settle(entry, End.KNOWN)
        entry.stage = Stage.WANTED
        return []

    def back(self, entries: Iterable[Entry]) -> None:
        """What was tried with these failed for now: the step is taken again."""
        steps = {
            Stage.ASKING: Stage.OFFERED,
            Stage.CAPTURING: Stage.WANTED,
            Stage.PUBLISHING: Stage.MOVED,
        }
        for entry in entries:
            if not entry.settled:
                entry.stage = steps[entry.stage]

    # ---------------------------------------------------------------------------------------------------------- capture

    def next_wanted(self) -> Entry | None:
        """The oldest range to capture."""
        return next(self._at(Stage.WANTED), None)

    def skip(self, entry: Entry) -> bool:
        """Staging has no room for it. True: the first time for this range."""
        first, entry.skipped = not entry.skipped, True
        return first

    # ---------------------------------------------------------------------------------------------------------- publish

    def to_publish(self, most: int) -> list[Entry]:
        """Ranges whose objects are durable and whose parents stand or come before them. Then *publishing*."""
        batch: list[Entry] = []
        chosen: set[str] = set()
        fingerprint = ""
        for entry in self._at(Stage.MOVED):
            what = entry.what
            if (what.parent in self._entries and what.parent not in chosen) or (
                batch and what.fingerprint != fingerprint
            ):
                continue
            fingerprint = what.fingerprint
            batch.append(entry)
            chosen.add(what.hash)
            if len(batch) == most:
                break
        for entry in batch:
            entry.stage = Stage.PUBLISHING
        return batch

    # -------------------------------------------------------------------------------------------------------------- end

    def settle(self, entry: Entry, end: End) -> list[Settlement]:
        """Ends a range; one that was given up takes everything that hangs on it along."""
        return [] if entry.settled else self._settle(entry, end)

    def late(self, before: float) -> list[Entry]:
        """Ranges offered before that moment and still here, but for one being captured: its pages are leased."""
        return [e for e in self._entries.values() if e.since < before and e.stage is not Stage.CAPTURING]

    def remaining(self) -> list[Entry]:
        """All."""
        return list(self._entries.values())

    def _settle(self, entry: Entry, end: End) -> list[Settlement]:
        settlements: list[Settlement] = []
        pending = [(entry, end)]
        while pending:
            entry, end = pending.pop()
            if entry.settled:
                continue
            entry.stage = Stage.SETTLED
            del self._entries[entry.what.hash]
            settlements += (Settlement(offer, end) for offer in entry.offers)
            if end.durable:
                _remember(self._durable, entry.what.hash)
            else:
                self._mark_broken(entry.what.hash)
                pending += ((child, End.ORPHAN) for child in entry.children)
            entry.children = []
        return settlements

    def _mark_broken(self, hash: str) -> None:
        # A second offer of what stands may fail; what hangs on it is as good as before.
        if hash not in self._durable:
            _remember(self._broken, hash)

    def _at(self, stage: Stage) -> Iterator[Entry]:
        return (entry for entry in self._entries.values() if entry.stage is stage)


def _remember(hashes: OrderedDict[str, None], hash: str) -> None:
    hashes[hash] = None
    hashes.move_to_end(hash)
    if len(hashes) > _REMEMBERED:
        hashes.popitem(last=False)
