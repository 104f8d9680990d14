"""The page pool: every page of the device has exactly one life at a time, and an accepted assignment never runs short.

An assignment reserves its whole demand at once (`reserve`), or nothing. It extends a resident route in place where that
ends exactly at its prefix and nobody else extends it, else it branches: full pages are shared, a partial one is copied
into a page of its own before the first write (`JobStart.copies`; the page is part of the demand). What it reserved and
did not use goes back in `release`; what it filled stays resident, evictable once it is durable or given up.

Why a reservation suffices (`sizing.demand` has the arithmetic): a full-attention group gets all its pages at once. A
windowed group reuses the pages that fall behind the window, so a page the assignment counts on getting back must come
back: whoever begins to share such a page of a *running* assignment, or copies from it, adds one page to its own demand
and hands it over at once. A checkpoint's lease holds back at most one chunk of pages (one lease per route): that chunk
is in the demand.

Threads: all methods take the one lock and do no I/O under it. `JobPages` methods run on the device loop's thread,
leases on the checkpointer's, the rest on the event loop. Time is a parameter, in seconds of any monotonic clock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from libs.continuation.chain import TAIL_TOKENS, node_hash
from libs.controller.catalog_facts import Node
from libs.controller.protocol import AssignmentId, Pages
from services.worker.handlers import CheckpointRange, GroupPages, JobStart, LeaseHeldError, NodeFill
from services.worker.pages.admission import Admission, Awaited, Reserved, Wanted
from services.worker.pages.books import Books
from services.worker.pages.errors import (
    IntegrityError,
    PageStateError,
    UnknownReservationError,
)
from services.worker.pages.eviction import EvictionLog, EvictionReason, ReturnCost, default_return_cost
from services.worker.pages.frames import PageState
from services.worker.pages.residency import Changes, chunk_hashes
from services.worker.pages.restores import Restores
from services.worker.pages.route import UNMAPPED, Continuation, RangeLease, Reservation, Route
from services.worker.pages.sizing import GroupSpec, PageSizes
from services.worker.pages.views import PoolLease, ReservedPages


@dataclass(frozen=True, slots=True)
class Inflight:
    """A boundary a running assignment will pass: its hash, end, fingerprint, and the tokens still to be computed before
    it.
    """

    hash: str
    end: int
    fingerprint: str
    remaining: int


class PagePool:
    """See the module. Groups in the model's order."""

    def __init__(self, groups: Sequence[GroupSpec], sizes: PageSizes, cost: ReturnCost = default_return_cost) -> None:
        self.groups = tuple(groups)
        self.sizes = sizes
        self._books = Books(self.groups, sizes)
        self._restores = Restores(self._books)
        self._lock = threading.RLock()
        self._routes: dict[int, Route] = {}
        self._reservations: dict[AssignmentId, Reservation] = {}
        self.evictions = EvictionLog()
        self._admission = Admission(self._books, self._routes, self._reservations, self.evictions, cost)
        self.late = 0
        """Transfer or compute events that came for pages which had lost their assignment: ignored."""

    # --- admission ---

    def reserve(self, key: AssignmentId, wanted: Wanted, now: float) -> Reserved:
        """Reserves the whole demand, evicting what must go; on refusal nothing has changed.

        Raises:
            InsufficientPagesError: more than free and evictable pages together.
            PrefixGoneError: less than `wanted.resident` is resident or being computed.
        """
        hashes = chunk_hashes(wanted.of.root, wanted.tokens)
        with self._lock:
            return self._admission.admit(key, wanted, hashes, now)

    def release(self, key: AssignmentId, now: float) -> tuple[CheckpointRange, ...]:
        """Gives back what is reserved and unused; what is computed stays. Returns the ranges to checkpoint, tail
        included.

        Call it once nothing touches the assignment's pages any more. Raises UnknownReservationError.
        """
        with self._lock:
            held = self._reservation(key)
            route, sizes = held.route, self.sizes
            unstarted = not held.claimed and route.end == held.base
            self._books.finish_copies(held)
            self._books.dismiss(held)
            del self._reservations[key]
            self._books.seal(route)
            route.end = route.sealed
            del route.tokens[route.end :]
            del route.hashes[route.end // sizes.chunk :]
            route.holder, route.last_used = None, now
            for g, frames in enumerate(self._books.frames):
                table = route.tables[g]
                while len(table) > sizes.pages(route.end):
                    if (page := table.pop()) != UNMAPPED:
                        self._books.unmap(route, g, page, None)
                for page in held.spare[g]:
                    frames.give_back(page)
                held.spare[g] = []
            if unstarted or route.end == 0:
                self._admission.drop(route, EvictionReason.UNUSED, now)
                return ()
            ranges = (*self._ranges(route, key), *self._tail(route, key))
            self._books.index.add_mark(route, route.end)
            self._trim(route, now)
            self._books.settle(route)
            return ranges

    def discard(self, key: AssignmentId, now: float) -> None:
        """As `release`, but forgets what was computed: nobody will ask for it. Raises UnknownReservationError."""
        with self._lock:
            route = self._reservation(key).route
            for what in self.release(key, now):
                self.settled(what, durable=False)
            if self._routes.get(route.id) is route and not route.must_stay:
                self._admission.drop(route, EvictionReason.UNUSED, now)

    # --- restore ---

    def plan_restore(self, key: AssignmentId, nodes: Sequence[Node]) -> tuple[NodeFill, ...]:
        """Maps the pages a restore up to the last node's end fills, marks them loading, and says which they are.

        Called again with fewer nodes after a restore that ended early, it names only what that boundary still lacks.
        """
        with self._lock:
            return self._restores.plan(self._reservation(key), nodes)

    def landed(self, key: AssignmentId, fill: NodeFill) -> bool:
        """The fill's upload is complete. False, and counted, where its pages have lost the assignment meanwhile."""
        with self._lock:
            late = self._restores.landed(self._reservations.get(key), fill)
            self.late += late
            return not late

    def restored(self, key: AssignmentId, boundary: int) -> int:
        """The restore has ended with `boundary` landed. Returns the computed tokens the assignment now has.

        That is `boundary` where every group has what a continuation there needs, else what it had before.
        """
        with self._lock:
            held = self._reservation(key)
            self._restores.finish(held, boundary)
            self._books.settle(held.route)
            return held.route.end

    # --- run ---

    def job_pages(self, key: AssignmentId) -> ReservedPages:
        """The tables as the device loop reads and moves them."""
        with self._lock:
            tables = self._reservation(key).route.tables
            return ReservedPages(self, key, {group.name: tables[g] for g, group in enumerate(self.groups)})

    def begin(self, key: AssignmentId) -> JobStart:
        """See JobPages.begin. Adopts a longer prefix that another assignment has computed since the reservation."""
        with self._lock:
            held = self._reservation(key)
            if held.could_adopt:
                self._admission.adopt(held)
            return JobStart(held.route.end, tuple(held.copies))

    def awaits(self, key: AssignmentId, without: Collection[AssignmentId] = ()) -> Awaited | None:
        """The farthest boundary that an assignment reserved earlier is on its way to and this one could begin at.

        Computing the same tokens beside it would be wasted: it is better to begin when they are there (`begin` adopts
        them). Only who came earlier is waited for, so nobody waits in a circle; who is in `without` is not. None:
        nothing to wait for. Raises UnknownReservationError.
        """
        with self._lock:
            held = self._reservation(key)
            return self._admission.awaited(held, without) if held.could_adopt else None

    def stirred(self, waits: Mapping[AssignmentId, Awaited]) -> list[AssignmentId]:
        """Of those who wait, whose boundary is there or whose leader is not: `awaits` knows whether they wait on."""
        with self._lock:
            self._admission.seal_all()
            there, under_way = self._books.index.has, self._reservations
            return [key for key, wait in waits.items() if wait.leader not in under_way or there(wait.hash)]

    def has(self, digest: str) -> bool:
        """Whether a full chunk is there, computed."""
        with self._lock:
            return self._books.index.has(digest)

    def prepare(self, key: AssignmentId, end: int) -> tuple[str, ...]:
        """See JobPages.prepare."""
        with self._lock:
            held = self._reservation(key)
            if end > held.budget_end:
                raise PageStateError("pool", -1, f"{key} goes to {end}, beyond its budget {held.budget_end}")
            lows = list(held.route.low)
            changed = tuple(
                group.name
                for g, group in enumerate(self.groups)
                if group.window and self._books.map_window(held, g, end)
            )
            lost = sum(self._books.give_back(held, g) for g, group in enumerate(self.groups) if group.window)
            self.evictions.record(held.route, EvictionReason.WINDOW, lost, held.route.last_used)
            if held.route.low != lows:
                self._books.index.update(held.route)
            return changed

    def computed(self, key: AssignmentId, end: int) -> None:
        """See JobPages.computed. Late calls, after the release, are counted and ignored."""
        with self._lock:
            held = self._reservations.get(key)
            if held is None:
                self.late += 1
                return
            route = held.route
            self._books.finish_copies(held)
            for g, frames in enumerate(self._books.frames):
                for page in route.tables[g][route.end // self.sizes.page : self.sizes.pages(end)]:
                    if frames.states[page] is PageState.RESERVED:
                        frames.move(page, PageState.RESIDENT)
            route.end = end

    def progress(self, key: AssignmentId, tokens: Sequence[int] = ()) -> tuple[CheckpointRange, ...]:
        """Books drawn tokens; returns the chunks completed since the last call. Raises UnknownReservationError."""
        with self._lock:
            route = self._reservation(key).route
            route.tokens.extend(tokens)
            self._books.seal(route)
            return self._ranges(route, key)

    # --- checkpoints ---

    def lease(self, wanted: CheckpointRange) -> PoolLease | None:
        """See PageLeases.lease."""
        with self._lock:
            route = self._routes.get(wanted.route)
            if route is None or route.unsettled.get(wanted.start) != wanted or route.end < wanted.end:
                return None
            if route.lease is not None:
                raise LeaseHeldError(
                    f"route {route.id} is leased from {route.lease.range.start} on: release that first"
                )
            parts: list[GroupPages] = []
            pinned: list[tuple[int, int]] = []
            first, last = wanted.start // self.sizes.page, self.sizes.pages(wanted.end)
            for g, group in enumerate(self.groups):
                if route.low[g] <= first:
                    pages = tuple(route.tables[g][first:last])
                    parts.append(GroupPages(group.name, wanted.start, wanted.end, pages))
                    pinned += [(g, page) for page in pages]
            for g, page in pinned:
                self._books.pin(g, page)
            route.lease = RangeLease(route, wanted, tuple(parts), tuple(pinned))
            self._books.refresh(route)
            return PoolLease(self, route.lease)

    def end_lease(self, lease: RangeLease) -> None:
        """Unpins the pages of a lease; what fell behind the window meanwhile goes to whom it belongs."""
        with self._lock:
            if lease.route.lease is not lease:
                return
            lease.route.lease = None
            for g, page in lease.held:
                self._books.unpin(g, page)
            self._books.refresh(lease.route)

    def settled(self, what: CheckpointRange, *, durable: bool) -> None:
        """See PageLeases.settled."""
        with self._lock:
            route = self._routes.get(what.route)
            if route is None or route.unsettled.get(what.start) != what:
                return
            del route.unsettled[what.start]
            if durable:
                route.durable = max(route.durable, what.end)
            if route.holder is None:
                self._trim(route, route.last_used)
            self._books.settle(route)

    # --- observation ---

    def pages(self) -> dict[str, Pages]:
        """Counts by state, by group name."""
        with self._lock:
            return {group.name: frames.pages() for group, frames in zip(self.groups, self._books.frames, strict=True)}

    def largest(self) -> Pages:
        """Counts of the group with the most pages."""
        with self._lock:
            return max((frames.pages() for frames in self._books.frames), key=lambda pages: pages.total)

    def lookup(self, of: Continuation, tokens: Sequence[int], limit: int) -> int:
        """Length of the longest resident prefix of at most `limit` tokens."""
        hashes = chunk_hashes(of.root, tokens)
        with self._lock:
            self._admission.seal_all()
            match = self._books.index.find(of.root, tokens, hashes, limit)
            return match.boundary if match else 0

    def changes(self, version: int | None) -> Changes:
        """What came and went after `version`; a snapshot where None, or where that is too long ago."""
        with self._lock:
            self._admission.seal_all()
            changes = None if version is None else self._books.index.since(version)
            return changes or self._books.index.snapshot()

    def inflight(self) -> list[Inflight]:
        """Prompt boundaries that running assignments have not passed yet; of several on the way to one, the nearest."""
        found: dict[str, Inflight] = {}
        with self._lock:
            self._admission.seal_all()
            chunk, there = self.sizes.chunk, self._books.index.has
            for route in (held.route for held in self._reservations.values()):
                for index in range(route.end // chunk, len(route.hashes)):
                    digest, end = route.hashes[index], (index + 1) * chunk
                    other = found.get(digest)
                    if (other is None or end - route.end < other.remaining) and not there(digest):
                        found[digest] = Inflight(digest, end, route.of.fingerprint, end - route.end)
        return list(found.values())

    def held(self) -> tuple[AssignmentId, ...]:
        """Assignments with a reservation."""
        with self._lock:
            return tuple(self._reservations)

    def check_integrity(self) -> None:
        """Raises IntegrityError with every contradiction found. Reads everything: for tests and drills."""
        with self._lock:
            problems = self._books.check(self._routes, self._reservations)
        if problems:
            raise IntegrityError(problems)

    def _reservation(self, key: AssignmentId) -> Reservation:
        held = self._reservations.get(key)
        if held is None:
            raise UnknownReservationError(f"{key} has no reservation")
        return held

    def _ranges(self, route: Route, key: AssignmentId) -> tuple[CheckpointRange, ...]:
        """The full chunks that were computed and not offered yet."""
        chunk, ranges = self.sizes.chunk, []
        while route.offered + chunk <= route.sealed:
            start, end = route.offered, route.offered + chunk
            ranges.append(self._range(route, key, start, end, route.hashes[start // chunk]))
            route.offered = end
        return tuple(ranges)

    def _tail(self, route: Route, key: AssignmentId) -> tuple[CheckpointRange, ...]:
        start = route.end // self.sizes.chunk * self.sizes.chunk
        end = route.end // TAIL_TOKENS * TAIL_TOKENS
        if end <= max(start, route.tail) or start != route.offered:
            return ()
        route.tail = end
        parent = route.hashes[-1] if route.hashes else route.of.root
        return (self._range(route, key, start, end, node_hash(parent, route.tokens[start:end])),)

    def _range(self, route: Route, key: AssignmentId, start: int, end: int, digest: str) -> CheckpointRange:
        chunk = self.sizes.chunk
        parent = route.hashes[start // chunk - 1] if start else route.of.root
        tokens = tuple(route.tokens[start:end])
        of = route.of
        made = CheckpointRange(
            route.id, key, of.fingerprint, of.owner, parent, digest, start, end, end - start < chunk, tokens
        )
        route.unsettled[start] = made
        return made

    def _trim(self, route: Route, now: float) -> None:
        for g, group in enumerate(self.groups):
            if group.window:
                below = self._books.rest_index(route, g, pressed=False)
                self.evictions.record(route, EvictionReason.WINDOW, self._books.trim(route, g, below, None) or 0, now)
