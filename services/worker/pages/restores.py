"""Pages under restore: which are filled by what, and when they count.

A restore up to `boundary` needs [0, boundary) of a full-attention group, but of a windowed one only the window, so that
the table may have a gap between what was resident before and what is loaded. Until every group is whole the route ends
where it ended: a fallback finds its base untouched. Each page under restore is remembered with its generation; an event
for a page that has another one by then is late and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libs.controller.catalog_facts import Node
from services.worker.handlers import GroupPages, NodeFill
from services.worker.pages.books import Books
from services.worker.pages.errors import PageStateError
from services.worker.pages.frames import PageState
from services.worker.pages.route import UNMAPPED, Reservation


class Restores:
    """Works on the pool's books, under the pool's lock."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._page = books.sizes.page

    def plan(self, held: Reservation, nodes: Sequence[Node]) -> tuple[NodeFill, ...]:
        """See PagePool.plan_restore."""
        if held.route.end % self._page:
            raise PageStateError("pool", -1, f"{held.key} restores behind {held.route.end}, inside a page")
        boundary = nodes[-1].chunk.end
        held.restoring = True
        self._forget_loads(held)
        fills: list[list[GroupPages]] = [[] for _ in nodes]
        for g, group in enumerate(self._books.groups):
            first = max(self._books.sizes.restore_from(group.window, boundary), held.route.end) // self._page
            if group.window:
                self._map_window(held, g, first, self._books.sizes.pages(boundary))
            for fill, node in zip(fills, nodes, strict=True):
                fill += self._load(held, g, first, node)
        tokens = held.route.tokens
        return tuple(
            NodeFill(node, tuple(tokens[node.chunk.start : node.chunk.end]), tuple(fill))
            for node, fill in zip(nodes, fills, strict=True)
        )

    def landed(self, held: Reservation | None, fill: NodeFill) -> int:
        """Marks the fill's pages resident; returns how many of them were late."""
        late = 0
        for part in fill.fills:
            g = self._books.group(part.group)
            frames = self._books.frames[g]
            for page in part.pages:
                generation = None if held is None else held.loading.pop((g, page), None)
                if generation is None or frames.generations[page] != generation:
                    late += 1
                else:
                    frames.move(page, PageState.RESIDENT)
        return late

    def finish(self, held: Reservation, boundary: int) -> None:
        """The route goes up to `boundary` where every group is whole; what else was loaded becomes reserved again."""
        route, sizes = held.route, self._books.sizes
        self._forget_loads(held)
        whole = boundary > route.end and all(
            self._is_whole(held, g, sizes.first_needed(group.window, boundary), boundary)
            for g, group in enumerate(self._books.groups)
        )
        if whole:
            route.end = boundary
            route.offered = max(route.offered, boundary // sizes.chunk * sizes.chunk)
            route.durable = max(route.durable, boundary)
            route.tail = max(route.tail, boundary if boundary % sizes.chunk else 0)
        for g, group in enumerate(self._books.groups):
            if whole and group.window:
                self._close_gap(held, g)
            self._unload(held, g, sizes.pages(route.end))
        held.restoring = False
        held.brought = route.end if route.end != held.base else 0

    def _map_window(self, held: Reservation, g: int, first: int, last: int) -> None:
        """Maps logical pages [first, last) behind the route's end, and nothing else there."""
        route = held.route
        table, base = route.tables[g], self._books.sizes.pages(route.end)
        table += [UNMAPPED] * (last - len(table))
        for index in range(base, len(table)):
            if table[index] != UNMAPPED and not first <= index < last:
                page, table[index] = table[index], UNMAPPED
                self._books.unmap(route, g, page, held)
        del table[last:]
        for index in range(first, last):
            if table[index] == UNMAPPED:
                table[index] = held.spare[g].pop()
                self._books.map(route, g, table[index])

    def _load(self, held: Reservation, g: int, first: int, node: Node) -> Iterator[GroupPages]:
        """The node's pages that hold nothing yet, as runs; now loading."""
        frames, table = self._books.frames[g], held.route.tables[g]
        run: list[int] = []
        last = self._books.sizes.pages(node.chunk.end)
        for index in range(max(first, node.chunk.start // self._page), last + 1):
            if index < last and frames.states[table[index]] is PageState.RESERVED:
                frames.move(table[index], PageState.LOADING)
                held.loading[(g, table[index])] = frames.generations[table[index]]
                run.append(table[index])
            elif run:
                end = min(index * self._page, node.chunk.end)
                yield GroupPages(self._books.groups[g].name, (index - len(run)) * self._page, end, tuple(run))
                run = []

    def _is_whole(self, held: Reservation, g: int, start: int, end: int) -> bool:
        frames, table = self._books.frames[g], held.route.tables[g]
        pages = table[start // self._page : self._books.sizes.pages(end)]
        return len(table) >= self._books.sizes.pages(end) and all(
            page != UNMAPPED and frames.states[page] is PageState.RESIDENT for page in pages
        )

    def _close_gap(self, held: Reservation, g: int) -> None:
        """What lies below the gap serves nothing any more."""
        table = held.route.tables[g]
        top = len(table)
        while top and table[top - 1] != UNMAPPED:
            top -= 1
        self._books.trim(held.route, g, top, held)

    def _forget_loads(self, held: Reservation) -> None:
        """Loads under way have ended: what has not landed never will."""
        for g, page in held.loading:
            self._books.frames[g].move(page, PageState.RESERVED)
        held.loading = {}

    def _unload(self, held: Reservation, g: int, first: int) -> None:
        """Pages behind the route's end hold nothing: those of a windowed group go back to spare."""
        frames, table = self._books.frames[g], held.route.tables[g]
        if self._books.groups[g].window:
            while len(table) > first:
                if (page := table.pop()) != UNMAPPED:
                    self._books.unmap(held.route, g, page, held)
            return
        for page in table[first:]:
            if frames.states[page] is PageState.RESIDENT:
                frames.move(page, PageState.EVICTING)
                frames.move(page, PageState.RESERVED)
