"""The pool's machine: events in, one ``Ready`` out. No clock, no chance of its own, no I/O, nothing awaited.

Theory of operation
===================

An event changes the piece of state it is about. Then the same steps follow, in the same order, whatever the event was:
the map is taken if it holds still, endpoints whose grace is over lapse, floors are set, generations kept, warm
writers promoted where something lacks coverage, writers above the floor drain, draining ones go, dials start, and it is
seen whether a generation can be committed and whether the pool is ready. Each step looks at the whole state, so
what one event failed to bring about the next one does: nothing depends on an event not being lost.

Binds are the exception: ``Bound`` and ``Unbound`` change a count and no more, unless they wake an idle cell or empty a
draining writer; and ``candidates`` only reads.

Publication (``Connected``) and commit (``CommitGeneration``) must be fed while the shell holds the publication guard;
each is one synchronous step, so that cancellation finds it either done or not begun.
"""

from __future__ import annotations

from . import arrivals, mapping, swaps, upkeep
from .books import Books
from .contours import Contour, Move
from .desired import DesiredMap
from .effects import Outbox, Ready
from .events import (
    BeginShutdown,
    Bound,
    CommitGeneration,
    Connected,
    DialAbandoned,
    DialFailed,
    DrainWorker,
    Ended,
    HealthChanged,
    Identified,
    MapRead,
    PoolEvent,
    ProbeEnded,
    SetPolicy,
    SwapGeneration,
    Tick,
    Unbound,
    Wanted,
)
from .generation import Trigger
from .inventory import WriterRecord
from .knobs import PoolPolicy
from .model import Chance, Target, WorkerTarget, WriterId
from .readiness import Admission, Readiness, without_writer
from .replacement import Reservation
from .selection import Work
from .shutdown import Stage
from .telemetry import PoolSnapshot, snapshot

TICK_S = 1.0
"""Longest time between two looks at the whole, in seconds."""


class PoolCore:
    """See the module. Not reentrant. Times in the caller's monotonic seconds."""

    def __init__(self, policy: PoolPolicy, chance: Chance, now: float = 0.0, tick_s: float = TICK_S) -> None:
        self.books = Books(policy, chance, now=now)
        self._tick_s = tick_s

    # --- what a shell may read ---

    @property
    def policy(self) -> PoolPolicy:
        """The knobs in force."""
        return self.books.policy

    @property
    def readiness(self) -> Readiness:
        """Whether traffic should come."""
        return self.books.gate.now

    @property
    def stopping(self) -> bool:
        """Whether the end has begun."""
        return not self.books.running

    def degraded(self, writer: WriterId) -> frozenset[str]:
        """Why a writer is degraded, as far as the core knows."""
        record = self.books.inventory.get(writer)
        return record.degraded if record is not None else frozenset()

    def parting(self, writer: WriterId) -> tuple[Move | None, bool]:
        """Why the pool is closing a writer (None: it is not), and whether because its process has been replaced."""
        record = self.books.inventory.get(writer)
        if record is None:
            return None, False
        return record.closing, record.superseded

    def candidates(self, target: Target, work: Work) -> list[WriterRecord]:
        """Writers that may take a bind, best first; empty = no coverage. Call under the binding lock."""
        books = self.books
        if not books.running:
            return []
        return books.picker.order(books.inventory, target, books.policy, work, books.chance)

    def drained(self, worker: str) -> frozenset[str]:
        """Addresses at which an operator has taken the worker out of use."""
        entries = (entry for entry in self.books.roster if entry.drained and entry.endpoint.worker == worker)
        return frozenset(entry.endpoint.address for entry in entries)

    def admit(self, held: int, waited_s: float) -> Admission:
        """What becomes of a bind without candidates."""
        return without_writer(self.books.policy, self.books.gate.now, held, waited_s)

    def taken(self, target: Target, writer: WriterId) -> None:
        """This candidate took the bind; feed Bound too."""
        self.books.picker.taken(target, writer)

    def reservation(self, writer: WriterId) -> Reservation:
        """To hold while a dial that replaces a writer is under way."""
        return Reservation(self.books.replacements, writer)

    def snapshot(self, now: float) -> PoolSnapshot:
        """All of the telemetry."""
        return snapshot(self.books, now)

    # --- events ---

    def handle(self, event: PoolEvent, now: float) -> Ready:
        """Applies one event. Raises PoolBugError if the books do not agree afterwards."""
        books = self.books
        books.now, books.out = now, Outbox()
        if self._apply(event):
            wake_at = self._reconcile()
            books.check_integrity()
            return books.out.seal(wake_at)
        return books.out.seal(None)

    def _apply(self, event: PoolEvent) -> bool:
        """The event itself; whether anything else may follow from it."""
        books = self.books
        match event:
            case Bound():
                return self._bound(event.writer)
            case Unbound():
                return self._unbound(event.writer)
            case Wanted():
                self._demand(event.target)
            case Tick():
                pass
            case MapRead():
                books.desired.read(DesiredMap.of(event.endpoints, event.revision), books.now)
            case Connected():
                arrivals.connected(books, event.writer)
            case DialFailed():
                arrivals.failed(books, event.writer)
            case DialAbandoned():
                arrivals.abandoned(books, event.writer)
            case ProbeEnded():
                arrivals.probed(books, event.endpoint, event.succeeded)
            case Ended():
                arrivals.ended(books, event.writer, event.end)
            case HealthChanged():
                record = books.inventory.get(event.writer)
                if record is not None:
                    books.inventory.set_degraded(record, event.reasons, books.now)
            case Identified():
                arrivals.identified(books, event.writer, event.incarnation)
            case DrainWorker():
                mapping.drain_worker(books, event.worker, event.address, event.drained)
            case SwapGeneration():
                swaps.want(books, Trigger.OPERATOR)
            case CommitGeneration():
                swaps.commit(books, event.key)
            case SetPolicy():
                self._set_policy(event.policy)
            case BeginShutdown():
                self._begin_shutdown(event.grace_s)
        return True

    def _reconcile(self) -> float:
        books = self.books
        wake: list[float | None] = [books.now + self._tick_s]
        if books.running:
            mapping.settle(books)
            mapping.lapse(books)
            upkeep.set_floors(books)
            swaps.keep(books)
            upkeep.promote(books)
            upkeep.shrink(books)
        upkeep.drain(books)
        if books.running:
            upkeep.prune(books)
            wake.append(upkeep.dial(books))
            upkeep.probe(books)
            books.out.commit = swaps.due(books)
            wake.append(books.desired.wake_at(books.policy))
        self._step_shutdown()
        cells, mapped = books.wanted_cells(), books.desired.taken is not None
        if books.gate.update(books.policy, cells, books.cover(), mapped, books.now):
            books.out.readiness = books.gate.now
        wake.append(books.shutdown.deadline)
        return min(moment for moment in wake if moment is not None and moment > books.now)

    def _bound(self, writer: WriterId) -> bool:
        books = self.books
        record = books.inventory.get(writer)
        if record is None:
            return False
        books.inventory.count_bound(record, 1, books.now)
        return books.floors.demand(record.endpoint.cells, books.now)

    def _unbound(self, writer: WriterId) -> bool:
        books = self.books
        record = books.inventory.get(writer)
        if record is None:
            return False
        books.inventory.count_bound(record, -1, books.now)
        return not record.bound and record.contour is Contour.DRAINING

    def _demand(self, target: Target) -> None:
        books = self.books
        if isinstance(target, WorkerTarget):
            cells = {cell for e in books.roster.dialable() if e.worker == target.worker for cell in e.cells}
        else:
            cells = {target.cell}
        books.floors.demand(cells, books.now)

    def _set_policy(self, policy: PoolPolicy) -> None:
        books = self.books
        timing = (policy.reinit_interval_s, policy.reinit_jitter)
        if timing != (books.policy.reinit_interval_s, books.policy.reinit_jitter):
            books.generations.reinit_at = None
        books.policy = policy
        books.out.bindable = True  # what waits may be allowed something else now

    def _begin_shutdown(self, grace_s: float) -> None:
        books = self.books
        if not books.shutdown.begin(grace_s, books.now):
            return
        books.gate.close()
        books.out.readiness = books.gate.now
        books.out.bindable = True  # what waits is told
        books.cancel(books.refill.attempts.values())
        for record in books.inventory:
            books.withdraw(record, Move.SHUTDOWN)

    def _step_shutdown(self) -> None:
        books = self.books
        if books.running:
            return
        left = len(books.inventory) + len(books.refill.attempts) + len(books.probes.under_way)
        stage = books.shutdown.step(books.inventory.bound(), left, books.now)
        if stage is Stage.CLOSING:
            for record in books.inventory:
                books.evict(record, Move.SHUTDOWN)
        books.out.released = stage is Stage.RELEASED
