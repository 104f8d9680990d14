"""A route: one continuation's tokens, how far they are computed, and the pages that hold their state.

Routes share full pages; each maps them in its own table per layer group. At most one assignment extends a route at a
time (`holder`). The positions [0, end) are immutable from the moment they are computed: whoever shares them may rely on
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.controller.protocol import AssignmentId
from services.worker.handlers import CheckpointRange, GroupPages, PageCopy

UNMAPPED = -1


@dataclass(frozen=True, slots=True)
class Continuation:
    """Whose prefix: names as in the chain. `root` = hash of the chain's root, `owner` = directory part of the keys."""

    fingerprint: str
    root: str
    owner: str


@dataclass(slots=True, eq=False)
class Reservation:
    """What one assignment was promised. `spare[g]`: reserved pages not mapped yet; `first_new[g]`: its first new
    logical page.
    """

    key: AssignmentId
    route: Route
    budget_end: int
    base: int
    """Computed tokens it began with."""
    claimed: bool
    """Whether it extends a route that was there, rather than a new one."""
    first_new: list[int]
    spare: list[list[int]]
    copies: list[PageCopy] = field(default_factory=list)
    """Copy-on-write still to be done; their sources are pinned."""
    source: Route | None = None
    """The route they copy from."""
    loading: dict[tuple[int, int], int] = field(default_factory=dict)
    """(group, page) under restore → the page's generation when the load began."""
    restoring: bool = False
    """Whether pages are being restored."""
    brought: int = 0
    """Where a restore ended that brought something; 0 = none did."""

    @property
    def could_adopt(self) -> bool:
        """Whether it could still begin behind more than it has: nothing is computed, claimed or being restored."""
        return not self.claimed and not self.restoring and self.route.end == max(self.base, self.brought)


@dataclass(slots=True, eq=False)
class Route:
    """See the module. `tables[g][i]`: page of positions [i * page, (i + 1) * page), UNMAPPED where there is none.

    `low[g]`: first logical page of the run of mapped pages that reaches `end`. `hashes[i]`: hash of full chunk i of
    `tokens`, as far as it is known. `marks`: ends of earlier generations, at which a continuation may begin. `offered`:
    end of the last chunk offered to the checkpointer (or durable from the start).
    """

    id: int
    of: Continuation
    tokens: list[int]
    end: int
    tables: list[list[int]]
    low: list[int]
    hashes: list[str]
    offered: int
    last_used: float
    marks: set[int] = field(default_factory=set)
    unsettled: dict[int, CheckpointRange] = field(default_factory=dict)
    """By start: ranges offered and neither durable nor given up."""
    durable: int = 0
    """End of the last range settled as durable."""
    tail: int = 0
    """End of the last tail offered."""
    holder: Reservation | None = None
    lease: RangeLease | None = None
    sources: int = 0
    """Branches that have not copied their partial page from here yet."""
    blocked: bool = True
    """Whether it may not be evicted; kept equal to `must_stay` by the pool."""
    listed: dict[str, int] = field(default_factory=dict)
    """Boundaries in the index: hash → end."""

    @property
    def must_stay(self) -> bool:
        """Extended, leased, a copy's source, or not durable yet."""
        return self.holder is not None or self.lease is not None or self.sources > 0 or bool(self.unsettled)

    @property
    def sealed(self) -> int:
        """Computed tokens whose ids are known (the device may be one iteration ahead of the news)."""
        return min(self.end, len(self.tokens))

    def mapped(self, group: int) -> list[int]:
        """Page ids mapped in a group."""
        return [page for page in self.tables[group] if page != UNMAPPED]


@dataclass(slots=True, eq=False)
class RangeLease:
    """The pages of one range, pinned. `held`: (group index, page)."""

    route: Route
    range: CheckpointRange
    pages: tuple[GroupPages, ...]
    held: tuple[tuple[int, int], ...]
