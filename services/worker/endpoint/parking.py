"""Runs that wait for a prefix which another assignment of this worker is on its way to.

A hundred requests that begin alike meet here: the first computes, the others are *parked* until its boundary is there,
then begin behind it (`PagePool.begin`). Nobody is the worse for it:

- who is waited for came earlier, so it gets its lane and its share of every step earlier too; computing beside it
  would not have been quicker;
- if it ends early, whatever the reason, those that wait look again: the next of them computes what is missing, and the
  others wait for that one;
- one that *restores* computes nothing, and its source may be slow: for it alone a wait has a limit, what computing
  would have taken. Past that the first that waits computes, and the others wait for that one. A restore that fails
  goes on as a computation.

A deadline that passes reaches a parked run as a cancel, like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from libs.controller.protocol import AssignmentId
from services.worker.handlers import Job, Runtime
from services.worker.pages.admission import Awaited
from services.worker.pages.pool import PagePool


@dataclass(slots=True, eq=False)
class _Parked:
    job: Job
    timer: asyncio.TimerHandle
    patient: bool = True
    """Whether it still waits for restores."""


class Parking:
    """`submit` gives a run to the device loop; `restoring`: the assignments that are being restored."""

    def __init__(
        self,
        pool: PagePool,
        runtime: Runtime,
        submit: Callable[[Job], None],
        restoring: Callable[[], Collection[AssignmentId]],
    ) -> None:
        self._pool, self._runtime, self._submit, self._restoring = pool, runtime, submit, restoring
        self._parked: dict[AssignmentId, _Parked] = {}  # in the order in which they came
        self._waits: dict[AssignmentId, Awaited] = {}
        self.most = 0
        """Most that have been parked at a time."""

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def tokens(self) -> list[int]:
        """What each will have to compute when its boundary is there."""
        return [
            len(parked.job.request.tokens) - self._waits[assignment].boundary
            for assignment, parked in self._parked.items()
        ]

    def park(self, job: Job) -> bool:
        """Keeps the job if there is something to wait for."""
        wait = self._pool.awaits(job.assignment)
        if wait is None:
            return False
        loop = asyncio.get_running_loop()
        alone_ms = self._runtime.queue((wait.boundary - job.cached,)).ms
        timer = loop.call_later(alone_ms / 1e3, self._waited, job.assignment)
        self._parked[job.assignment] = _Parked(job, timer)
        self._waits[job.assignment] = wait
        self.most = max(self.most, len(self._parked))
        return True

    def forget(self, assignment: AssignmentId) -> bool:
        """It is given up; False if it was not parked."""
        return self._take(assignment) is not None

    def look(self) -> None:
        """Something was computed or restored, or somebody gave up."""
        if not self._parked:
            return
        for assignment in self._pool.stirred(self._waits):
            self._look_at(assignment)

    def close(self) -> None:
        """No timer fires any more."""
        for parked in self._parked.values():
            parked.timer.cancel()

    def _take(self, assignment: AssignmentId) -> Job | None:
        parked = self._parked.pop(assignment, None)
        if parked is None:
            return None
        del self._waits[assignment]
        parked.timer.cancel()
        return parked.job

    def _waited(self, assignment: AssignmentId) -> None:
        """As long as computing would have taken."""
        self._parked[assignment].patient = False
        self._look_at(assignment)

    def _look_at(self, assignment: AssignmentId) -> None:
        parked = self._parked.get(assignment)
        if parked is None:
            return
        wait = self._pool.awaits(assignment, without=() if parked.patient else self._restoring())
        if wait is not None:
            self._waits[assignment] = wait
        else:
            found = self._waits[assignment]
            # Without patience it may be the one that computes: then nothing is there, and all of it is ahead of others.
            likely = found.boundary if parked.patient or self._pool.has(found.hash) else 0
            self._take(assignment)
            self._submit(replace(parked.job, likely=likely))
