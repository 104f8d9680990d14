"""The page pool against a naive twin: one full-attention group, every page an object, everything counted anew each
time.

The twin knows no reference counts, index, journal or free list. It predicts for each reservation whether it is
accepted, from how many resident tokens, and what is free afterwards; eviction it follows by the same ranking written
the slow way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from services.worker.pages.admission import Wanted
from services.worker.pages.errors import InsufficientPagesError
from services.worker.pages.pool import PagePool
from services.worker.pages.route import Continuation
from services.worker.pages.sizing import GroupSpec, PageSizes
from tests.worker.pool_device import key

ROOTS = ("11" * 32, "22" * 32)
PAGE = 16


class Cell:
    """One page."""


@dataclass
class TwinRoute:
    number: int
    root: str
    tokens: tuple[int, ...]
    end: int
    cells: list[Cell]
    used: float
    marks: set[int] = field(default_factory=set)
    holder: int | None = None
    copying: set[int] = field(default_factory=set)
    """Branches that have yet to copy their partial page from here: it must stay until then."""

    def boundaries(self) -> set[int]:
        return {b for b in range(256, self.end + 1, 256)} | {m for m in self.marks if m <= self.end}


class Twin:
    """`settled` ranges only: every rested route may be evicted."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.routes: list[TwinRoute] = []
        self.made = 0

    def free(self) -> int:
        return self.total - len({cell for route in self.routes for cell in route.cells})

    def match(self, root: str, tokens: tuple[int, ...]) -> tuple[TwinRoute, int] | None:
        found = [
            (-b, route.holder is not None or route.end != b, route.number, route)
            for route in self.routes
            for b in route.boundaries()
            if route.root == root and b < len(tokens) and route.tokens[:b] == tokens[:b]
        ]
        return (min(found)[3], -min(found)[0]) if found else None

    def reserve(self, who: int, root: str, tokens: tuple[int, ...], budget: int, now: float) -> int | None:
        found = self.match(root, tokens)
        route, boundary = found if found else (None, 0)
        pages = -(-(len(tokens) + budget - 1) // PAGE)
        claims = route is not None and route.holder is None and route.end == boundary
        need = pages - (-(-boundary // PAGE) if claims else boundary // PAGE)

        def worth(old: TwinRoute) -> tuple[float, int]:
            return -(max(0.0, now - old.used) + 1e-3) * len(old.cells) / max(1.0, float(old.end)), old.number

        idle = sorted((old for old in self.routes if not (old.holder or old.copying or old is route)), key=worth)
        before = list(self.routes)
        while self.free() < need and idle:
            self.routes.remove(idle.pop(0))
        if self.free() < need:
            self.routes = before
            return None
        if route is not None and claims:
            route.tokens, route.holder, route.used = tokens, who, now
            route.cells += [Cell() for _ in range(need)]
            return boundary
        if route is not None:
            route.used = now
            if boundary % PAGE:
                route.copying.add(who)
        self.made += 1
        shared = route.cells[: boundary // PAGE] if route else []
        self.routes.append(
            TwinRoute(self.made, root, tokens, boundary, shared + [Cell() for _ in range(need)], now, holder=who)
        )
        return boundary

    def copied(self, who: int) -> None:
        for route in self.routes:
            route.copying.discard(who)

    def release(self, who: int, tokens: tuple[int, ...], end: int, started: bool, now: float) -> None:
        self.copied(who)
        route = next(route for route in self.routes if route.holder == who)
        if end == 0 or not started:
            self.routes.remove(route)
            return
        route.tokens, route.end, route.holder, route.used = tokens[:end], end, None, now
        del route.cells[-(-end // PAGE) :]
        for mark in (end, end // 16 * 16):
            if mark % 256:
                route.marks.add(mark)
        route.marks = set(sorted(route.marks)[-16:])


def document(rng: random.Random) -> tuple[int, ...]:
    length = rng.choice([rng.randint(1, 700), 255, 256, 257, 272, 512, 513])
    branch = rng.randrange(3)
    return tuple(([1] * 300 + [2 + branch] * 120 + [9 + branch + i % 2 for i in range(300)])[:length])


@pytest.mark.parametrize("seed", range(20))
def test_pool_and_twin_agree(seed: int) -> None:
    rng = random.Random(seed)
    total = rng.choice([50, 90, 160])
    pool, twin = PagePool([GroupSpec("full", 0, total)], PageSizes(PAGE, 256, 4_096)), Twin(total)
    jobs: dict[int, tuple[list[int], int, int, int, bool]] = {}  # tokens, budget end, base, end, claimed
    accepted = refused = shared = 0
    for number in range(1, 220):
        now = float(number)
        if not jobs or rng.random() < 0.45:
            root = rng.choice(ROOTS)
            tokens = document(rng)
            if jobs and rng.random() < 0.2:
                tokens = (*rng.choice(list(jobs.values()))[0], 77)
            budget = rng.choice([1, 20, 200])
            before = twin.made
            expected = twin.reserve(number, root, tokens, budget, now)
            try:
                made = pool.reserve(key(number), Wanted(Continuation("ff", root, ""), tokens, budget), now)
            except InsufficientPagesError:
                assert expected is None
                refused += 1
                continue
            assert made.resident == expected
            accepted += 1
            shared += made.resident > 0
            claimed = twin.made == before
            jobs[number] = (list(tokens), len(tokens) + budget - 1, made.resident, made.resident, claimed)
            pages = pool.job_pages(key(number))
            pages.begin()
        elif rng.random() < 0.6:
            who = rng.choice(list(jobs))
            tokens_of, budget_end, base, end, claimed = jobs[who]
            goal = min(end + rng.randint(1, 300), budget_end)
            twin.copied(who)
            while end < goal:
                step = min(len(tokens_of), goal)
                pool.prepare(key(who), step)
                pool.computed(key(who), step)
                end = step
                drawn = [1_000 + who] if end == len(tokens_of) and end < budget_end else []
                tokens_of += drawn
                for what in pool.progress(key(who), drawn):
                    pool.settled(what, durable=False)
            jobs[who] = (tokens_of, budget_end, base, end, claimed)
            route = next(route for route in twin.routes if route.holder == who)
            route.end, route.tokens = end, tuple(tokens_of)
        else:
            who = rng.choice(list(jobs))
            tokens_of, _, base, end, claimed = jobs.pop(who)
            for what in pool.release(key(who), now):
                pool.settled(what, durable=False)
            twin.release(who, tuple(tokens_of), end, claimed or end > base, now)
        pool.check_integrity()
        assert pool.pages()["full"].free == twin.free(), number
    assert accepted > 20
    assert shared > 5
