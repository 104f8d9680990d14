"""The pool's mechanics: mapping, sharing, trimming, dropping, and what must be true of all routes together.

Every method leaves frames, tables and index consistent; the pool calls them under its lock. Where a page loses its last
reference it goes back to the assignment that counts on it (`heir`), else it is free; a pinned page waits for its last
pin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from libs.continuation.chain import node_hash
from libs.controller.protocol import AssignmentId
from services.worker.handlers import PageCopy
from services.worker.pages.errors import PageStateError
from services.worker.pages.frames import Frames, PageState
from services.worker.pages.residency import Match, ResidencyIndex
from services.worker.pages.route import UNMAPPED, Reservation, Route
from services.worker.pages.sizing import GroupSpec, PageSizes


class Books:
    """Frames of all groups, the residency index, and the pages that wait for a pin."""

    def __init__(self, groups: Sequence[GroupSpec], sizes: PageSizes) -> None:
        self.groups = tuple(groups)
        self.sizes = sizes
        self.frames = [Frames(group.name, group.pages) for group in groups]
        self.index = ResidencyIndex(groups, sizes)
        self._heirs: dict[tuple[int, int], Reservation | None] = {}
        self._live: set[Reservation] = set()

    # --- one page ---

    def admit(self, reservation: Reservation) -> None:
        """The reservation may be an heir from now on."""
        self._live.add(reservation)

    def dismiss(self, reservation: Reservation) -> None:
        """What was to come back to it will be free."""
        self._live.discard(reservation)

    def map(self, route: Route, g: int, page: int) -> None:
        """One entry of the route's table names the page."""
        self.frames[g].map(page, blocks=route.blocked)

    def unmap(self, route: Route, g: int, page: int, heir: Reservation | None) -> int:
        """One entry fewer; returns 1 where the page's content is lost with it."""
        frames = self.frames[g]
        frames.unmap(page, blocks=route.blocked)
        if frames.refs[page]:
            return 0
        state = frames.states[page]
        if state is PageState.RESIDENT:
            frames.move(page, PageState.EVICTING)
        elif state is PageState.LOADING:
            frames.move(page, PageState.RESERVED)
        if frames.pins[page]:
            self._heirs[(g, page)] = heir
        else:
            self._pass_on(g, page, heir)
        return int(state is PageState.RESIDENT)

    def pin(self, g: int, page: int) -> None:
        """A copy reads the page."""
        self.frames[g].pins[page] += 1

    def unpin(self, g: int, page: int) -> None:
        """The copy is done, or given up."""
        frames = self.frames[g]
        if frames.pins[page] <= 0:
            raise PageStateError(frames.group, page, "unpinned more often than pinned")
        frames.pins[page] -= 1
        if not frames.pins[page] and not frames.refs[page]:
            self._pass_on(g, page, self._heirs.pop((g, page), None))

    def _pass_on(self, g: int, page: int, heir: Reservation | None) -> None:
        frames = self.frames[g]
        if heir is None or heir not in self._live:
            frames.give_back(page)
            return
        if frames.states[page] is PageState.EVICTING:
            frames.move(page, PageState.RESERVED)
        heir.spare[g].append(page)

    # --- one route ---

    def refresh(self, route: Route) -> None:
        """Carries a change of `must_stay` over to the route's pages."""
        if route.must_stay == route.blocked:
            return
        route.blocked = route.must_stay
        change = 1 if route.blocked else -1
        for g, frames in enumerate(self.frames):
            for page in route.mapped(g):
                frames.block(page, change)

    def settle(self, route: Route) -> None:
        """Carries a change of a route's ends or claims over to the index and to its pages."""
        self.index.update(route)
        self.refresh(route)

    def seal(self, route: Route) -> None:
        """Lists the chunk boundaries the computation has passed."""
        chunk = self.sizes.chunk
        while len(route.hashes) < len(route.tokens) // chunk:
            start = len(route.hashes) * chunk
            parent = route.hashes[-1] if route.hashes else route.of.root
            route.hashes.append(node_hash(parent, route.tokens[start : start + chunk]))
        last = route.sealed // chunk
        if last and route.hashes[last - 1] not in route.listed:
            self.index.update(route)

    def share(self, reservation: Reservation, match: Match) -> None:
        """Maps the match's pages into the reservation's (empty) route; a partial page is copied into a spare one."""
        route, source, boundary = reservation.route, match.route, match.boundary
        full, rest = divmod(boundary, self.sizes.page)
        for g, group in enumerate(self.groups):
            start = self._share_from(match, g)
            table = route.tables[g]
            table[:] = [UNMAPPED] * start + source.tables[g][start:full]
            route.low[g] = start
            for page in table[start:]:
                self.map(route, g, page)
            if rest:
                target = reservation.spare[g].pop()
                self.map(route, g, target)
                table.append(target)
                reservation.copies.append(PageCopy(group.name, source.tables[g][full], target, rest))
                self.pin(g, source.tables[g][full])
        reservation.source = source if rest else None
        if rest:
            source.sources += 1
            self.refresh(source)
        route.end = reservation.base = boundary
        # What was restored before is durable, whatever the source knows of it.
        route.offered = max(route.offered, min(source.offered, boundary // self.sizes.chunk * self.sizes.chunk))
        route.durable = max(route.durable, min(source.durable, boundary))

    def finish_copies(self, reservation: Reservation) -> None:
        """The branch has its own partial pages (or will not need them): their sources are free to go."""
        if not reservation.copies or reservation.source is None:
            return
        for copy in reservation.copies:
            self.unpin(self.group(copy.group), copy.source)
        reservation.copies = []
        reservation.source.sources -= 1
        self.refresh(reservation.source)
        reservation.source = None

    def owed(self, match: Match) -> list[int]:
        """Pages, by group, that whoever branches here must hand to the running assignment it branches from.

        It counts on getting its own pages back once they are behind the window; shared ones do not come back. What
        it holds in spare beyond all it may still need covers the loss.
        """
        owed = [0] * len(self.groups)
        holder = match.route.holder
        if holder is None:
            return owed
        for g, group in enumerate(self.groups):
            if group.window:
                first = max(self._share_from(match, g), holder.first_new[g])
                touched = max(0, self.sizes.pages(match.boundary) - first)
                ahead = self.sizes.pages(holder.budget_end) - len(match.route.tables[g])
                owed[g] = min(touched, max(0, ahead - len(holder.spare[g])))
        return owed

    def pay(self, match: Match, spare: list[list[int]], owed: Sequence[int]) -> None:
        """Hands `owed` pages of `spare` over."""
        holder = match.route.holder
        for g, count in enumerate(owed):
            for _ in range(count):
                assert holder is not None
                holder.spare[g].append(spare[g].pop())

    def _share_from(self, match: Match, g: int) -> int:
        keep = self.sizes.keep_from(self.groups[g].window, match.boundary) // self.sizes.page
        return max(match.route.low[g], keep)

    def map_full(self, reservation: Reservation) -> None:
        """Full-attention groups: maps all spare pages behind what is there."""
        route = reservation.route
        for g, group in enumerate(self.groups):
            if not group.window:
                # Taken in the order of ids where they are free in that order: neighbouring pages are one copy.
                for page in reservation.spare[g]:
                    self.map(route, g, page)
                route.tables[g] += reservation.spare[g]
                reservation.spare[g] = []

    def map_window(self, reservation: Reservation, g: int, end: int) -> bool:
        """Maps a windowed group up to position `end`, and a chunk ahead where spare pages allow; whether anything
        changed.
        """
        route, sizes, spare = reservation.route, self.sizes, reservation.spare[g]
        table = route.tables[g]
        need = sizes.pages(end) - len(table)
        if need <= 0:
            return False
        while len(spare) < need:
            if self.trim(route, g, min(route.low[g] + 1, self._keep_index(route, g)), reservation) is None:
                raise PageStateError(self.groups[g].name, -1, f"{reservation.key} ran out of reserved pages at {end}")
        ahead = min(sizes.chunk // sizes.page, sizes.pages(reservation.budget_end) - len(table))
        for _ in range(min(max(need, ahead), len(spare))):
            page = spare.pop()
            self.map(route, g, page)
            table.append(page)
        return True

    def give_back(self, reservation: Reservation, g: int) -> int:
        """Frees what an assignment holds of a windowed group and will not need again; returns pages lost.

        Pages behind the window are worth more as spares while there is more to map than spares, and after that to
        whoever else wants them: they need not wait for the assignment's end.
        """
        route, spare = reservation.route, reservation.spare[g]
        ahead = max(0, self.sizes.pages(reservation.budget_end) - len(route.tables[g]))
        behind = max(0, self.rest_index(route, g, pressed=False) - route.low[g])
        surplus = len(spare) + behind - ahead
        if surplus <= 0:
            return 0
        lost = self.trim(route, g, route.low[g] + min(behind, surplus), reservation) or 0
        while len(spare) > ahead:
            self.frames[g].give_back(spare.pop())
        return lost

    def trim(self, route: Route, g: int, below: int, heir: Reservation | None) -> int | None:
        """Unmaps logical pages below `below`; returns pages lost, None where there was nothing to unmap."""
        low = route.low[g]
        if below <= low:
            return None
        table, lost = route.tables[g], 0
        for index in range(low, below):
            page, table[index] = table[index], UNMAPPED
            if page != UNMAPPED:
                lost += self.unmap(route, g, page, heir)
        route.low[g] = below
        return lost

    def _keep_index(self, route: Route, g: int) -> int:
        return self.sizes.keep_from(self.groups[g].window, route.end) // self.sizes.page

    def rest_index(self, route: Route, g: int, *, pressed: bool) -> int:
        """First logical page a resting route keeps; `pressed`: not even for a pending checkpoint."""
        index = self._keep_index(route, g)
        if route.unsettled and not pressed:
            index = min(index, min(route.unsettled) // self.sizes.page)
        return index

    def drop(self, route: Route) -> int:
        """Unmaps everything and forgets the route; returns pages lost."""
        self.index.remove(route)
        lost = 0
        for g in range(len(self.groups)):
            for page in route.mapped(g):
                lost += self.unmap(route, g, page, None)
            route.tables[g] = []
        return lost

    def group(self, name: str) -> int:
        """Index of a group by name."""
        for g, group in enumerate(self.groups):
            if group.name == name:
                return g
        raise KeyError(name)

    # --- what frees what ---

    def freed_by(self, routes: Sequence[Route], trims: Sequence[tuple[Route, int, int]]) -> Iterator[list[int]]:
        """Pages freed, by group, after dropping routes[:1], [:2], …, then also trimming (route, group, below) one by
        one.

        Pinned pages do not count: they are free only later.
        """
        gone: Counter[tuple[int, int]] = Counter()
        freed = [0] * len(self.groups)

        def lose(g: int, page: int) -> None:
            gone[(g, page)] += 1
            if gone[(g, page)] == self.frames[g].refs[page] and not self.frames[g].pins[page]:
                freed[g] += 1

        for route in routes:
            for g in range(len(self.groups)):
                for page in route.mapped(g):
                    lose(g, page)
            yield list(freed)
        for route, g, below in trims:
            for page in route.tables[g][route.low[g] : below]:
                lose(g, page)
            yield list(freed)

    # --- integrity ---

    def check(self, routes: Mapping[int, Route], reservations: Mapping[AssignmentId, Reservation]) -> list[str]:
        """Every contradiction between frames, tables, reservations and index."""
        problems = [problem for frames in self.frames for problem in frames.check()]
        problems += self.index.check(routes.values())
        for g, frames in enumerate(self.frames):
            problems += self._check_group(g, frames, routes, reservations)
        for route in routes.values():
            problems += self._check_route(route, reservations)
        return problems

    def _check_group(
        self, g: int, frames: Frames, routes: Mapping[int, Route], reservations: Mapping[AssignmentId, Reservation]
    ) -> list[str]:
        problems: list[str] = []
        refs: Counter[int] = Counter()
        blockers: Counter[int] = Counter()
        pins: Counter[int] = Counter()
        for route in routes.values():
            refs.update(route.mapped(g))
            if route.blocked:
                blockers.update(route.mapped(g))
            if route.lease is not None:
                pins.update(page for group, page in route.lease.held if group == g)
        spare: Counter[int] = Counter()
        for reservation in reservations.values():
            spare.update(reservation.spare[g])
            pins.update(copy.source for copy in reservation.copies if self.group(copy.group) == g)
        for page in range(frames.total):
            state, name = frames.states[page], f"page {page} of {frames.group}"
            counted = (frames.refs[page], frames.blockers[page], frames.pins[page])
            if counted != (refs[page], blockers[page], pins[page]):
                problems.append(
                    f"{name} counts {counted} references, blockers, pins, not {refs[page], blockers[page], pins[page]}"
                )
            if state is PageState.EVICTING and (refs[page] or not pins[page]):
                problems.append(f"{name} is evicting with {refs[page]} references and {pins[page]} pins")
            if spare[page] and (spare[page] > 1 or refs[page] or state is not PageState.RESERVED):
                problems.append(f"{name} is spare {spare[page]} times, {state.name}, {refs[page]} references")
            if state is PageState.RESERVED and refs[page] + spare[page] != 1:
                problems.append(f"{name} is reserved by {refs[page]} tables and {spare[page]} spares")
            if state in (PageState.LOADING, PageState.RESIDENT) and not refs[page]:
                problems.append(f"{name} is {state.name} and unreachable")
        return problems

    def _check_route(self, route: Route, reservations: Mapping[AssignmentId, Reservation]) -> list[str]:
        problems: list[str] = []
        name = f"route {route.id}"
        if route.blocked != route.must_stay:
            problems.append(f"{name} is blocked {route.blocked}, must stay {route.must_stay}")
        holder = route.holder
        if holder is not None and (reservations.get(holder.key) is not holder or holder.route is not route):
            problems.append(f"{name} is held by a released assignment")
        copies = set() if holder is None else {(copy.group, copy.target) for copy in holder.copies}
        for g, frames in enumerate(self.frames):
            table, low = route.tables[g], route.low[g]
            for index in range(low, self.sizes.pages(route.end)):
                page = table[index] if index < len(table) else UNMAPPED
                if page == UNMAPPED:
                    problems.append(f"{name} lacks logical page {index} of {frames.group} below its end {route.end}")
                elif frames.states[page] is not PageState.RESIDENT and (frames.group, page) not in copies:
                    problems.append(
                        f"{name} counts page {page} of {frames.group} as computed: {frames.states[page].name}"
                    )
            if holder is None and len(table) != self.sizes.pages(route.end):
                problems.append(f"{name} rests with {len(table)} pages of {frames.group} for {route.end} tokens")
            if any(page != UNMAPPED for page in table[:low]):
                problems.append(f"{name} maps pages of {frames.group} below {low}")
        return problems
