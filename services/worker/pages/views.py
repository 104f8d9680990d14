"""The pool as seen by the device loop (one job's tables) and by the checkpointer (one range's pages)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from libs.controller.protocol import AssignmentId
from services.worker.handlers import GroupPages, JobStart
from services.worker.pages.route import RangeLease

if TYPE_CHECKING:
    from services.worker.pages.pool import PagePool


class ReservedPages:
    """`handlers.JobPages` over a reservation. The tables are the pool's own lists: they change under `begin` and
    `prepare`.
    """

    def __init__(self, pool: PagePool, key: AssignmentId, tables: Mapping[str, Sequence[int]]) -> None:
        self._pool, self._key = pool, key
        self.tables = tables

    def begin(self) -> JobStart:
        """See JobPages."""
        return self._pool.begin(self._key)

    def prepare(self, end: int) -> Sequence[str]:
        """See JobPages."""
        return self._pool.prepare(self._key, end)

    def computed(self, end: int) -> None:
        """See JobPages."""
        self._pool.computed(self._key, end)


class PoolLease:
    """`handlers.Lease` over pinned pages."""

    def __init__(self, pool: PagePool, lease: RangeLease) -> None:
        self._pool, self._lease = pool, lease

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        """The groups that hold the whole range."""
        return self._lease.pages

    def release(self) -> None:
        """Idempotent."""
        self._pool.end_lease(self._lease)
