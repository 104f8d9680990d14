"""A worker's device pages: who has which, what is resident, what may go. One owner: the worker node.

Theory of operation
===================

A page is free, reserved (promised to one assignment), loading (a restore writes it), resident or evicting. An
assignment's `Lease` has a table of the pages its positions lie in, and spare reserved pages for those to come: reserved
all at once, so that nothing accepted ever lacks one. Computed positions are named at the boundaries of the prefix chain
(`declared.names`); a name is an entry of the index, valid while none of its pages is evicted. A later assignment shares
the full pages of the longest entry it finds; of a page in which the entry ends it gets a copy (`copy_source`), because
it will write behind the boundary.

Pages are pinned by the tables they are in and by operations. Resident and unpinned is evictable, least recently used
first, the rear of a sequence before its front.

Every change of state is written to `journal` as (page, from, to): the invariants keep their own accounts of it.
`changed` is called before the first entry of an empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from libs.controller.demand import pages_needed
from libs.controller.protocol import AssignmentId, Pages


class State(Enum):
    """Of a page."""

    FREE = "free"
    RESERVED = "reserved"
    LOADING = "loading"
    RESIDENT = "resident"
    EVICTING = "evicting"

    __hash__ = object.__hash__  # a member is one object: by default its name is hashed anew each time


class PagesShortError(Exception):
    """An accepted assignment asks for more than was reserved for it."""


@dataclass(slots=True)
class Lease:
    """One assignment's pages. `filled`: computed positions; `budget`: those it may come to hold."""

    assignment: AssignmentId
    tokens: tuple[int, ...]
    budget: int
    filled: int
    table: list[int]
    spare: list[int]
    copy_source: int | None = None
    pinned: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    """A named boundary: its end and the pages of [0, end)."""

    end: int
    pages: tuple[int, ...]


class PagePool:
    """See the module."""

    def __init__(self, count: int, page_tokens: int, changed: Callable[[], None]) -> None:
        self.count, self.page_tokens, self._changed = count, page_tokens, changed
        self.state = [State.FREE] * count
        self.index: dict[str, Entry] = {}
        self.leases: dict[AssignmentId, Lease] = {}
        self.journal: list[tuple[int, State, State]] = []
        self._free = list(range(count - 1, -1, -1))
        self._pins = [0] * count
        self._used: list[tuple[int, int]] = [(0, 0)] * count  # (time of last use, -position), for eviction's order
        self._names: list[dict[str, None]] = [{} for _ in range(count)]
        self._counts = dict.fromkeys(State, 0)
        self._counts[State.FREE] = count
        self._clock = 0

    def pages(self) -> Pages:
        """As heartbeats and replies tell them."""
        counts = self._counts
        return Pages(
            self.count,
            counts[State.FREE],
            counts[State.RESERVED],
            counts[State.LOADING],
            counts[State.RESIDENT],
            counts[State.EVICTING],
            len(self._loose()),
        )

    def longest(self, names: tuple[tuple[int, str], ...], limit: int) -> tuple[int, str]:
        """The longest resident boundary up to `limit`; (0, "") if there is none."""
        best = (0, "")
        for end, name in names:
            if best[0] < end <= limit and name in self.index:
                best = (end, name)
        return best

    def needed(self, tokens: int, budget: int, resident: int) -> int:
        """Pages to reserve."""
        return pages_needed(tokens, budget, self.page_tokens, resident)

    def reserve(
        self, assignment: AssignmentId, tokens: tuple[int, ...], budget: int, resident: tuple[int, str]
    ) -> list[int] | None:
        """Reserves the whole demand or nothing (None). Pages it had to evict are returned, EVICTING: `evicted` ends it.

        `resident`: what `longest` said.
        """
        end, name = resident
        held = self.index[name].pages if end else ()
        need = self.needed(len(tokens), budget, end)
        for page in held:  # protected while room is made
            self._pins[page] += 1
        victims = self._evictable()[: max(0, need - len(self._free))]
        if len(self._free) + len(victims) < need:
            for page in held:
                self._pins[page] -= 1
            return None
        full = end // self.page_tokens
        spare: list[int] = []
        for page in victims:
            self._forget(page)
            self._move(page, State.EVICTING)
        while len(spare) + len(victims) < need:
            page = self._free.pop()
            self._move(page, State.RESERVED)
            spare.append(page)
        lease = Lease(assignment, tokens, len(tokens) + budget, end, list(held[:full]), spare + victims)
        lease.pinned = list(held)
        lease.copy_source = held[full] if end % self.page_tokens else None
        self._touch(held)
        self.leases[assignment] = lease
        return victims

    def evicted(self, pages: list[int]) -> None:
        """Pages evicted for a lease are reserved now."""
        for page in pages:
            self._move(page, State.RESERVED)

    def load(self, lease: Lease, end: int) -> list[int]:
        """Takes the pages of the positions up to `end` for a restore to write."""
        taken: list[int] = []
        while len(lease.table) * self.page_tokens < end:
            page = self._take(lease)
            self._move(page, State.LOADING)
            lease.table.append(page)
            taken.append(page)
        return taken

    def fill(self, lease: Lease, end: int, names: tuple[tuple[int, str], ...] = ()) -> None:
        """Positions up to `end` are computed or loaded; `names` of the sequence so far. Raises PagesShortError."""
        size = self.page_tokens
        while len(lease.table) * size < end:
            page = self._take(lease)
            self._move(page, State.RESIDENT)
            lease.table.append(page)
        for page in lease.table[lease.filled // size : -(-end // size)]:
            if self.state[page] is State.LOADING:
                self._move(page, State.RESIDENT)
        lease.filled = max(lease.filled, end)
        if lease.copy_source is not None:
            self._unpin(lease, lease.copy_source)
            lease.copy_source = None
        for boundary, name in names:
            if boundary <= lease.filled and name not in self.index:
                pages = tuple(lease.table[: -(-boundary // size)])
                self.index[name] = Entry(boundary, pages)
                for page in pages:
                    self._names[page][name] = None

    def adopt(self, lease: Lease, resident: tuple[int, str]) -> bool:
        """Swaps what a lease that computed nothing yet shares for a longer prefix; gives back what it saves."""
        end, name = resident
        if end <= lease.filled or any(self.state[page] is not State.RESIDENT for page in lease.table):
            return False
        need = self.needed(len(lease.tokens), lease.budget - len(lease.tokens), end)
        if len(lease.spare) < need:  # it has used some for a prefix of its own that ends in the same page
            return False
        held = self.index[name].pages
        for page in held:
            self._pins[page] += 1
        for page in tuple(lease.pinned):
            self._unpin(lease, page)
        full = end // self.page_tokens
        lease.table, lease.pinned, lease.filled = list(held[:full]), list(held), end
        lease.copy_source = held[full] if end % self.page_tokens else None
        while len(lease.spare) > need:
            self._release(lease.spare.pop())
        self._touch(held)
        return True

    def release(self, assignment: AssignmentId) -> None:
        """Unused pages are free again; filled ones stay resident. Raises KeyError for what was never reserved."""
        lease = self.leases.pop(assignment)
        for page in lease.spare:
            self._release(page)
        for page in lease.table:
            if self.state[page] is State.LOADING:
                self._release(page)
        self._touch(lease.table)
        for page in tuple(lease.pinned):
            self._unpin(lease, page)

    def pin(self, pages: tuple[int, ...]) -> None:
        """An operation that is no lease's reads these."""
        for page in pages:
            self._pins[page] += 1

    def unpin(self, pages: tuple[int, ...]) -> None:
        """It is over."""
        for page in pages:
            self._pins[page] -= 1

    def evict_all(self) -> int:
        """Every evictable page goes; how many did."""
        victims = self._evictable()
        for page in victims:
            self._forget(page)
            self._move(page, State.EVICTING)
            self._release(page)
        return len(victims)

    # --- parts ---

    def _take(self, lease: Lease) -> int:
        if not lease.spare:
            raise PagesShortError(f"{lease.assignment} holds {len(lease.table)} pages and has none left")
        page = lease.spare.pop(0)
        self._pins[page] += 1
        lease.pinned.append(page)
        return page

    def _unpin(self, lease: Lease, page: int) -> None:
        lease.pinned.remove(page)
        self._pins[page] -= 1

    def _release(self, page: int) -> None:
        self._move(page, State.FREE)
        self._free.append(page)

    def _move(self, page: int, state: State) -> None:
        before = self.state[page]
        if not self.journal:
            self._changed()
        self.journal.append((page, before, state))
        self._counts[before] -= 1
        self._counts[state] += 1
        self.state[page] = state

    def _forget(self, page: int) -> None:
        for name in tuple(self._names[page]):
            for other in self.index.pop(name).pages:
                del self._names[other][name]

    def _touch(self, pages: list[int] | tuple[int, ...]) -> None:
        self._clock += 1
        for position, page in enumerate(pages):
            self._used[page] = (self._clock, -position)

    def _loose(self) -> list[int]:
        state, resident = self.state, State.RESIDENT
        return [page for page, pins in enumerate(self._pins) if not pins and state[page] is resident]

    def _evictable(self) -> list[int]:
        return sorted(self._loose(), key=lambda page: (self._used[page], page))
