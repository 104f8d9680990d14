"""Which route goes first when pages are needed, and the record of why it went. Pure.

Score = idle seconds × pages held / ms to have it back. A durable prefix comes back from a lower tier, which costs a
fraction of computing it again; so durable, long idle and large routes go first. The cost model is handed in, because it
is measured (`ReturnCost`). Ties go by age of the route, so that a plan is a function of the pool's state and the time.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.worker.pages.route import Route

ReturnCost = Callable[[int, int], float]
"""(tokens computed, tokens of them durable) → ms to have the prefix back."""


class EvictionReason(enum.StrEnum):
    """Why pages lost their content; the values are metric labels."""

    CAPACITY = "capacity"
    """A reservation needed the pages of an idle, settled route."""
    WINDOW = "window"
    """A windowed group's pages behind the window of a route that goes on or rests."""
    PRESSURE = "pressure"
    """Window pages kept for a pending checkpoint, given up for a reservation: those chunks stay without the group."""
    UNUSED = "unused"
    """The route holds nothing that another does not hold, or nothing that can be continued."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """One decision. `pages`: lost, all groups together; `end`, `durable`: tokens of the route; `idle_s`: since its last
    use.
    """

    route: int
    reason: EvictionReason
    pages: int
    end: int
    durable: int
    idle_s: float


def default_return_cost(tokens: int, durable: int) -> float:
    """Before anything is measured: restoring costs a tenth of computing."""
    return max(1.0, tokens - 0.9 * durable)


def ranked(routes: Iterable[Route], now: float, cost: ReturnCost) -> list[Route]:
    """Best victim first."""

    def score(route: Route) -> tuple[float, int]:
        held = sum(len(table) - low for table, low in zip(route.tables, route.low, strict=True))
        idle = max(0.0, now - route.last_used) + 1e-3
        return (-idle * held / max(1e-9, cost(route.end, route.durable)), route.id)

    return sorted(routes, key=score)


class EvictionLog:
    """Counts of pages lost by reason since start, and the last decisions."""

    def __init__(self, kept: int = 256) -> None:
        self.pages: Counter[EvictionReason] = Counter()
        self.recent: deque[Eviction] = deque(maxlen=kept)

    def record(self, route: Route, reason: EvictionReason, pages: int, now: float) -> None:
        """One decision; nothing where no page was lost."""
        if pages:
            self.pages[reason] += pages
            idle = max(0.0, now - route.last_used)
            self.recent.append(Eviction(route.id, reason, pages, route.end, route.durable, idle))
