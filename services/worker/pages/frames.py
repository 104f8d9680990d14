"""The physical pages of one layer group: state, generation, references, pins.

    free → reserved → loading → resident → evicting → free
              └─────────────────▲            └→ reserved   (given back to the assignment that owned it)

`refs` counts the routes that map the page, `pins` the copies that read it (a checkpoint's lease, a copy-on-write
source). A page nobody maps any more but somebody reads stays *evicting* until the last pin goes. The generation grows
whenever a page loses its content, so that an event of an earlier life of the page can be told from one of this life.
`blockers` counts the mapping routes that may not be evicted now: a resident page without blockers is evictable.

Not thread-safe: the pool's lock protects it.
"""

from __future__ import annotations

import enum

from libs.controller.protocol import Pages
from services.worker.pages.errors import PageStateError


class PageState(enum.IntEnum):
    """Where a page is in its life."""

    FREE = 0
    RESERVED = 1
    LOADING = 2
    RESIDENT = 3
    EVICTING = 4


_ALLOWED = frozenset(
    {
        (PageState.FREE, PageState.RESERVED),
        (PageState.RESERVED, PageState.FREE),
        (PageState.RESERVED, PageState.LOADING),
        (PageState.RESERVED, PageState.RESIDENT),
        (PageState.LOADING, PageState.RESIDENT),
        (PageState.LOADING, PageState.RESERVED),
        (PageState.RESIDENT, PageState.EVICTING),
        (PageState.EVICTING, PageState.FREE),
        (PageState.EVICTING, PageState.RESERVED),
    }
)


class Frames:
    """Pages 0 … total - 1 of one group."""

    def __init__(self, group: str, total: int) -> None:
        self.group = group
        self.total = total
        self.states = [PageState.FREE] * total
        self.generations = [0] * total
        self.refs = [0] * total
        self.pins = [0] * total
        self.blockers = [0] * total
        self.counts = [total, 0, 0, 0, 0]
        self.evictable = 0
        # A stack: pages freed last are used first, while they are warm in the device's cache.
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return self.counts[PageState.FREE]

    def take(self, count: int) -> list[int]:
        """`count` free pages, now reserved. The caller has checked that there are enough."""
        if count > len(self._free):
            raise PageStateError(self.group, -1, f"{count} pages taken, {len(self._free)} are free")
        # As `move` would, but thousands at once: a reservation is made while decode goes on.
        pages, states = [self._free.pop() for _ in range(count)], self.states
        for page in pages:
            if states[page] is not PageState.FREE:
                raise PageStateError(self.group, page, f"is {states[page].name.lower()} and in the free list")
            states[page] = PageState.RESERVED
        self.counts[PageState.FREE] -= count
        self.counts[PageState.RESERVED] += count
        return pages

    def give_back(self, page: int) -> None:
        """A reserved or evicting page becomes free."""
        if self.refs[page] or self.pins[page]:
            raise PageStateError(self.group, page, f"freed with {self.refs[page]} references, {self.pins[page]} pins")
        self.move(page, PageState.FREE)
        self._free.append(page)

    def move(self, page: int, state: PageState) -> None:
        """Changes the state; raises PageStateError for a change that the life of a page does not have."""
        old = self.states[page]
        if (old, state) not in _ALLOWED:
            raise PageStateError(self.group, page, f"cannot go from {old.name.lower()} to {state.name.lower()}")
        was = self._is_evictable(page)
        self.states[page] = state
        self.counts[old] -= 1
        self.counts[state] += 1
        if state is PageState.EVICTING or (state is PageState.RESERVED and old is PageState.LOADING):
            self.generations[page] += 1
        self.evictable += self._is_evictable(page) - was

    def map(self, page: int, *, blocks: bool) -> None:
        """One more route maps the page; `blocks`: that route may not be evicted now."""
        if self.states[page] is not PageState.RESIDENT:
            self.refs[page] += 1
            self.blockers[page] += blocks
            return
        was = self._is_evictable(page)
        self.refs[page] += 1
        self.blockers[page] += blocks
        self.evictable += self._is_evictable(page) - was

    def unmap(self, page: int, *, blocks: bool) -> None:
        """One route fewer; `blocks` as it was when it mapped or last `block`ed the page."""
        if self.refs[page] <= 0:
            raise PageStateError(self.group, page, "unmapped more often than mapped")
        was = self._is_evictable(page)
        self.refs[page] -= 1
        self.blockers[page] -= blocks
        self.evictable += self._is_evictable(page) - was

    def block(self, page: int, change: int) -> None:
        """A route that maps the page became unevictable (+1) or evictable (-1)."""
        was = self._is_evictable(page)
        self.blockers[page] += change
        self.evictable += self._is_evictable(page) - was

    def pages(self) -> Pages:
        """Counts by state."""
        free, reserved, loading, resident, evicting = self.counts
        return Pages(self.total, free, reserved, loading, resident, evicting, self.evictable)

    def _is_evictable(self, page: int) -> bool:
        return self.states[page] is PageState.RESIDENT and self.refs[page] > 0 and self.blockers[page] == 0

    def check(self) -> list[str]:
        """What is inconsistent within this group alone."""
        return [f"{self.group}: {name}" for name, broken in self._faults() if broken]

    def _faults(self) -> list[tuple[str, bool]]:
        by_state = [self.states.count(state) for state in PageState]
        evictable = sum(self._is_evictable(page) for page in range(self.total))
        free = {page for page in range(self.total) if self.states[page] is PageState.FREE}
        return [
            (f"counts {self.counts} but states {by_state}", by_state != self.counts),
            (f"counts {self.counts} do not add up to {self.total}", sum(self.counts) != self.total),
            (f"evictable {self.evictable} but {evictable} found", evictable != self.evictable),
            ("free list and free pages differ", len(self._free) != len(free) or set(self._free) != free),
            ("a count below zero", min([*self.refs, *self.pins, *self.blockers, 0]) < 0),
            ("a free page is referenced or pinned", any(self.refs[page] or self.pins[page] for page in free)),
        ]
