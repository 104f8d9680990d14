"""The writers there are: the one owner of every writer's record and contour.

A record lives from publication to the end of its tunnel. Once the pool has decided to close a writer (``closing``) it
takes no binds and counts for nothing but memory, until its tunnel says that it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from .contours import Contour, Move, after
from .model import Cell, Endpoint, EndpointKey, PoolBugError, WriterId

K = TypeVar("K")


@dataclass(slots=True, eq=False)
class WriterRecord:
    """One writer. Times are the caller's monotonic seconds."""

    writer: WriterId
    endpoint: Endpoint  # as last listed
    generation: int
    opened_at: float
    incarnation: int  # of the process it leads to: as the map had it at the dial, or as learnt since; 0 = not known
    learnt: bool = False  # whether the process itself has said so
    contour: Contour = Contour.WARM
    since: float = 0.0  # in this contour
    why: Move | None = None  # the move that led here
    bound: int = 0
    idle_since: float | None = 0.0  # without routes; None while any is bound
    degraded: frozenset[str] = frozenset()
    degraded_since: float | None = None
    closing: Move | None = None
    # Of a draining writer: still taken by binds that find nothing else, and until when (None = until covered).
    fallback: bool = False
    stale_until: float | None = None
    warned: bool = False
    superseded: bool = False  # its process has been replaced by another

    @property
    def key(self) -> EndpointKey:
        """Its endpoint's."""
        return self.endpoint.key

    @property
    def live(self) -> bool:
        """Not on its way out of the inventory."""
        return self.closing is None

    @property
    def standing(self) -> bool:
        """Neither draining nor on its way out: it belongs to a generation."""
        return self.closing is None and self.contour is not Contour.DRAINING

    @property
    def active(self) -> bool:
        """Takes regular binds."""
        return self.contour is Contour.ACTIVE and self.closing is None

    @property
    def serving(self) -> bool:
        """Takes binds, regular ones or as the last resort: what coverage counts."""
        return self.closing is None and (self.contour is Contour.ACTIVE or self.fallback)


@dataclass(slots=True)
class Churn:
    """What came and went; monotonic."""

    connects: int = 0
    reconnects: int = 0  # connects to an endpoint that had lost a writer
    removals: dict[Move, int] = field(default_factory=dict)
    writer_seconds: float = 0.0  # of writers that are gone


class Inventory:
    """See the module. Iteration is in the order of writer ids."""

    def __init__(self) -> None:
        self._writers: dict[WriterId, WriterRecord] = {}
        self._endpoints: dict[EndpointKey, dict[WriterId, WriterRecord]] = {}
        self._workers: dict[str, dict[WriterId, WriterRecord]] = {}
        self._cells: dict[Cell, dict[WriterId, WriterRecord]] = {}
        self._lost: set[EndpointKey] = set()
        self.churn = Churn()
        self.version = 0
        """Changes with all that selection depends on but load."""

    def __len__(self) -> int:
        return len(self._writers)

    def __iter__(self) -> Iterator[WriterRecord]:
        return iter(tuple(self._writers.values()))

    def __contains__(self, writer: WriterId) -> bool:
        return writer in self._writers

    def get(self, writer: WriterId) -> WriterRecord | None:
        """None once it is gone."""
        return self._writers.get(writer)

    def of_endpoint(self, key: EndpointKey) -> tuple[WriterRecord, ...]:
        """Its writers."""
        return tuple(self._endpoints.get(key, {}).values())

    def of_worker(self, worker: str) -> tuple[WriterRecord, ...]:
        """Writers to any address of the worker."""
        return tuple(self._workers.get(worker, {}).values())

    def of_cell(self, cell: Cell) -> tuple[WriterRecord, ...]:
        """Writers to endpoints that serve the cell."""
        return tuple(self._cells.get(cell, {}).values())

    def bound(self) -> int:
        """Routes on all writers."""
        return sum(record.bound for record in self._writers.values())

    def add(self, record: WriterRecord, now: float) -> None:
        """A validated tunnel enters, Warm."""
        if record.writer in self._writers:
            raise PoolBugError(f"writer {record.writer} is in the inventory already")
        record.contour, record.since, record.idle_since = Contour.WARM, now, now
        self._writers[record.writer] = record
        self._index(record)
        self.churn.connects += 1
        if record.key in self._lost:
            self._lost.discard(record.key)
            self.churn.reconnects += 1
        self.version += 1

    def move(self, record: WriterRecord, move: Move, now: float) -> None:
        """To another contour. Raises PoolBugError if the table has no such move."""
        contour = after(record.contour, move)
        if contour is Contour.GONE or not record.live:
            raise PoolBugError(f"writer {record.writer} cannot {move.value}: it leaves by close and remove")
        record.contour, record.since, record.why = contour, now, move
        self.version += 1

    def close(self, record: WriterRecord, move: Move) -> None:
        """On its way out; its tunnel's end removes it."""
        if after(record.contour, move) is not Contour.GONE or not record.live:
            raise PoolBugError(f"writer {record.writer} cannot be closed by {move.value}")
        record.closing, record.fallback = move, False
        self.version += 1

    def remove(self, writer: WriterId, now: float) -> WriterRecord | None:
        """Its tunnel has ended; None if it was never here or is gone already."""
        record = self._writers.pop(writer, None)
        if record is None:
            return None
        move = record.closing or Move.LOST
        after(record.contour, move)
        self._unindex(record)
        self.churn.removals[move] = self.churn.removals.get(move, 0) + 1
        self.churn.writer_seconds += now - record.opened_at
        if record.closing is None:
            self._lost.add(record.key)
        self.version += 1
        return record

    def count_bound(self, record: WriterRecord, change: int, now: float) -> None:
        """A route was bound (+1) or has ended (-1)."""
        record.bound += change
        if record.bound < 0:
            raise PoolBugError(f"writer {record.writer} has fewer than no routes")
        if record.bound:
            record.idle_since = None
        elif record.idle_since is None:
            record.idle_since = now

    def set_degraded(self, record: WriterRecord, reasons: frozenset[str], now: float) -> None:
        """Its health as the tunnel sees it."""
        if record.degraded != reasons:
            record.degraded_since = None if not reasons else record.degraded_since or now
            record.degraded = reasons
            self.version += 1

    def identify(self, record: WriterRecord, incarnation: int) -> None:
        """The process behind it has said which it is."""
        if record.incarnation != incarnation or not record.learnt:
            record.incarnation, record.learnt = incarnation, True
            self.version += 1

    def set_fallback(self, record: WriterRecord, fallback: bool, until: float | None = None) -> None:
        """Whether a draining writer is still taken as the last resort."""
        if record.contour is not Contour.DRAINING or not record.live:
            raise PoolBugError(f"writer {record.writer} is no draining one")
        record.fallback, record.stale_until = fallback, until
        self.version += 1

    def relist(self, endpoint: Endpoint) -> None:
        """The endpoint is listed with other cells or another incarnation."""
        for record in self.of_endpoint(endpoint.key):
            self._unindex(record)
            record.endpoint = endpoint
            self._index(record)
        self.version += 1

    def forget_losses(self, keys: Iterable[EndpointKey]) -> None:
        """Endpoints that are gone for good."""
        self._lost.difference_update(keys)

    def check(self) -> None:
        """Raises PoolBugError if the indexes do not say what the records say."""
        listed = {writer: record for writers in self._endpoints.values() for writer, record in writers.items()}
        if listed != self._writers:
            raise PoolBugError("the index by endpoint disagrees with the inventory")
        for record in self._writers.values():
            if self._endpoints[record.key].get(record.writer) is not record:
                raise PoolBugError(f"writer {record.writer} is listed under another endpoint")
            if self._workers[record.key.worker].get(record.writer) is not record:
                raise PoolBugError(f"writer {record.writer} is not listed under its worker")
            for cell in record.endpoint.cells:
                if self._cells[cell].get(record.writer) is not record:
                    raise PoolBugError(f"writer {record.writer} is not listed under cell {cell}")
            if record.fallback and record.contour is not Contour.DRAINING:
                raise PoolBugError(f"writer {record.writer} is a fallback, but {record.contour.value}")
            if record.contour is Contour.WARM and record.bound:
                raise PoolBugError(f"writer {record.writer} is Warm and has {record.bound} routes")

    def _index(self, record: WriterRecord) -> None:
        self._endpoints.setdefault(record.key, {})[record.writer] = record
        self._workers.setdefault(record.key.worker, {})[record.writer] = record
        for cell in record.endpoint.cells:
            self._cells.setdefault(cell, {})[record.writer] = record

    def _unindex(self, record: WriterRecord) -> None:
        _drop(self._endpoints, record.key, record.writer)
        _drop(self._workers, record.key.worker, record.writer)
        for cell in record.endpoint.cells:
            _drop(self._cells, cell, record.writer)


def _drop(index: dict[K, dict[WriterId, WriterRecord]], key: K, writer: WriterId) -> None:
    writers = index[key]
    del writers[writer]
    if not writers:
        del index[key]
