"""How an assignment gets its pages: what it begins with, what it needs, what must go for it. All or nothing.

Works on the pool's books under the pool's lock; `pool` says why a reservation suffices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from libs.continuation.chain import node_hash
from libs.controller.catalog_facts import Node
from libs.controller.protocol import AssignmentId
from services.worker.pages.books import Books
from services.worker.pages.errors import InsufficientPagesError, PageStateError, PrefixGoneError
from services.worker.pages.eviction import EvictionLog, EvictionReason, ReturnCost, ranked
from services.worker.pages.residency import Match
from services.worker.pages.route import UNMAPPED, Continuation, Reservation, Route


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an offer asks the pool for.

    `max_new`: generation budget, at least 1. `resident`: tokens that must be resident or under computation already
    (PrefixGoneError otherwise). `chain`: nodes to restore, contiguous; used as far as it connects to what is resident.
    """

    of: Continuation
    tokens: tuple[int, ...]
    max_new: int
    resident: int = 0
    chain: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """`resident`: computed tokens the assignment begins with; `restore`: the nodes worth restoring behind them."""

    resident: int
    restore: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Awaited:
    """A boundary an assignment waits for, its hash, and who is on the way to it, the first of several."""

    leader: AssignmentId
    hash: str
    boundary: int


class Admission:
    """Routes and reservations are the pool's own; nobody else adds to them."""

    def __init__(
        self,
        books: Books,
        routes: dict[int, Route],
        reservations: dict[AssignmentId, Reservation],
        log: EvictionLog,
        cost: ReturnCost,
    ) -> None:
        self._books, self._routes, self._reservations = books, routes, reservations
        self._log, self._cost = log, cost
        self._groups, self._sizes = books.groups, books.sizes
        self._next_route = 1

    def admit(self, key: AssignmentId, wanted: Wanted, hashes: list[str], now: float) -> Reserved:
        """See PagePool.reserve."""
        if key in self._reservations:
            raise PageStateError("pool", -1, f"{key} reserves twice")
        self.seal_all()
        match = self._books.index.find(wanted.of.root, wanted.tokens, hashes, len(wanted.tokens) - 1)
        found = match.boundary if match else 0
        if wanted.resident > max(found, self._computing(hashes)):
            raise PrefixGoneError(wanted.resident, found)
        match, restore = self._connect(wanted, hashes, match)
        boundary = match.boundary if match else 0
        claims = match is not None and match.route.holder is None and match.route.end == boundary
        budget_end = len(wanted.tokens) + max(1, wanted.max_new) - 1
        owed = [0] * len(self._groups) if match is None or claims else self._books.owed(match)
        demand = self.demand(match, claims, budget_end, owed)
        self._make_room(demand, match.route if match else None, now)
        spare = [frames.take(count) for frames, count in zip(self._books.frames, demand, strict=True)]
        if match is not None and claims:
            route = match.route
            route.tokens, route.hashes = list(wanted.tokens), hashes
        else:
            route = self._new_route(wanted, hashes, now)
        held = Reservation(
            key, route, budget_end, boundary, claims, [self._first_new(match, claims)] * len(self._groups), spare
        )
        self._reservations[key] = route.holder = held
        self._books.admit(held)
        route.last_used = now
        if match is not None and not claims:
            match.route.last_used = now
            self._books.pay(match, spare, owed)
            self._books.share(held, match)
        self._books.map_full(held)
        self._books.settle(route)
        return Reserved(boundary, restore)

    def adopt(self, held: Reservation) -> None:
        """Swaps what a fresh assignment shares for a longer prefix of another route, if its free pages allow."""
        route, sizes, books = held.route, self._sizes, self._books
        self.seal_all()
        match = books.index.find(route.of.root, route.tokens, route.hashes, len(route.tokens) - 1)
        if match is None or match.boundary <= route.end or match.route is route:
            return
        owed = books.owed(match)
        if any(count > frames.free for count, frames in zip(owed, books.frames, strict=True)):
            return
        books.pay(match, [frames.take(count) for frames, count in zip(books.frames, owed, strict=True)], owed)
        books.finish_copies(held)
        first_new = match.boundary // sizes.page
        for g, (group, frames) in enumerate(zip(self._groups, books.frames, strict=True)):
            # Everything of its own goes back to spare first: pages it shares go to nobody.
            own = held.first_new[g]
            for index, page in enumerate(route.tables[g]):
                if page != UNMAPPED:
                    books.unmap(route, g, page, held if index >= own else None)
            route.tables[g].clear()
            needed = sizes.demand(group.window, first_new, held.budget_end)
            while len(held.spare[g]) > needed:
                frames.give_back(held.spare[g].pop())
            held.first_new[g] = first_new
        match.route.last_used = route.last_used
        books.share(held, match)
        books.map_full(held)
        books.settle(route)

    def awaited(self, held: Reservation, without: Collection[AssignmentId]) -> Awaited | None:
        """See PagePool.awaits."""
        route, chunk = held.route, self._sizes.chunk
        mine = route.hashes[: (len(route.tokens) - 1) // chunk]
        leader, most = None, route.end // chunk
        for key, other in self._reservations.items():
            if other is held:
                break
            if len(other.route.hashes) <= most or len(mine) <= most or other.route.hashes[most] != mine[most]:
                continue  # goes no farther on this one's way than what is known to be coming
            count = _common(other.route.hashes, mine)
            if other.route.end < count * chunk and key not in without:
                leader, most = key, count
        if leader is None:
            return None
        self.seal_all()
        match = self._books.index.find(route.of.root, route.tokens, route.hashes, len(route.tokens) - 1)
        boundary = most * chunk
        return None if match is not None and match.boundary >= boundary else Awaited(leader, mine[most - 1], boundary)

    def demand(self, match: Match | None, claims: bool, budget_end: int, owed: Sequence[int]) -> list[int]:
        """New pages by group. A branch that leaves its match inside a page needs that page anew: copy-on-write."""
        first_new = self._first_new(match, claims)
        return [
            self._sizes.demand(group.window, first_new, budget_end) + extra
            for group, extra in zip(self._groups, owed, strict=True)
        ]

    def _first_new(self, match: Match | None, claims: bool) -> int:
        if match is None:
            return 0
        return self._sizes.pages(match.boundary) if claims else match.boundary // self._sizes.page

    def drop(self, route: Route, reason: EvictionReason, now: float) -> None:
        """Forgets a route."""
        del self._routes[route.id]
        self._log.record(route, reason, self._books.drop(route), now)

    def seal_all(self) -> None:
        """The device may have passed boundaries that nobody has heard of yet."""
        for held in self._reservations.values():
            self._books.seal(held.route)

    def _new_route(self, wanted: Wanted, hashes: list[str], now: float) -> Route:
        empty: list[list[int]] = [[] for _ in self._groups]
        route = Route(
            self._next_route, wanted.of, list(wanted.tokens), 0, empty, [0] * len(self._groups), hashes, 0, now
        )
        self._next_route += 1
        self._routes[route.id] = route
        return route

    def _computing(self, hashes: Sequence[str]) -> int:
        """Tokens of the longest prefix that a running assignment has in its prompt too, computed or not."""
        longest = max((_common(held.route.hashes, hashes) for held in self._reservations.values()), default=0)
        return longest * self._sizes.chunk

    def _connect(
        self, wanted: Wanted, hashes: Sequence[str], match: Match | None
    ) -> tuple[Match | None, tuple[Node, ...]]:
        """Where to begin, and what to restore behind it: from a resident chunk boundary, or from 0."""
        limit = len(wanted.tokens) - 1
        chain = [node for node in wanted.chain if node.chunk.end <= limit]
        found = match.boundary if match else 0
        if not chain or chain[-1].chunk.end <= found or not self._is_chain(wanted, chain):
            return match, ()
        base = found // self._sizes.chunk * self._sizes.chunk
        nodes = tuple(node for node in chain if node.chunk.start >= base)
        if not nodes or nodes[0].chunk.start != base:
            return match, ()
        if base == 0:
            return None, nodes
        lower = self._books.index.find(wanted.of.root, wanted.tokens, hashes, base)
        return (lower, nodes) if lower is not None and lower.boundary == base else (match, ())

    def _is_chain(self, wanted: Wanted, chain: Sequence[Node]) -> bool:
        """Whether the nodes are contiguous and name the request's own tokens."""
        position, parent = chain[0].chunk.start, chain[0].chunk.parent
        for node in chain:
            chunk = node.chunk
            if chunk.start != position or chunk.parent != parent:
                return False
            if node_hash(parent, wanted.tokens[chunk.start : chunk.end]) != chunk.hash:
                return False
            position, parent = chunk.end, chunk.hash
        return True

    def _make_room(self, demand: Sequence[int], protected: Route | None, now: float) -> None:
        """Evicts until the demand is free. Raises InsufficientPagesError before anything has gone."""
        frames = self._books.frames
        lacking = [count - frame.free for count, frame in zip(demand, frames, strict=True)]
        if max(lacking) <= 0:
            return
        idle = (route for route in self._routes.values() if not route.must_stay and route is not protected)
        victims = ranked(idle, now, self._cost)
        trims = [
            (route, g, self._books.rest_index(route, g, pressed=True))
            for route in self._routes.values()
            if route.holder is None and route.lease is None and route.unsettled and route is not protected
            for g, group in enumerate(self._groups)
            if group.window and lacking[g] > 0
        ]
        for count, freed in enumerate(self._books.freed_by(victims, trims), 1):
            if all(have >= lack for have, lack in zip(freed, lacking, strict=True)):
                for route in victims[:count]:
                    self.drop(route, EvictionReason.CAPACITY, now)
                for route, g, below in trims[: max(0, count - len(victims))]:
                    lost = self._books.trim(route, g, below, None)
                    self._log.record(route, EvictionReason.PRESSURE, lost or 0, now)
                    self._books.settle(route)
                return
        names = [group.name for group in self._groups]
        raise InsufficientPagesError(
            dict(zip(names, demand, strict=True)),
            {frame.group: frame.free for frame in frames},
            {frame.group: frame.evictable for frame in frames},
        )


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many hashes of two chains are the same: a chain's hash names all that comes before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
