"""How many offers one worker process may leave unanswered, and who waits until it answers. Pure.

A worker answers offers one after another. What is offered beyond what it can answer within the timeout times out there,
is cancelled there, and is offered elsewhere or again: work for nobody. So of one process only so many offers are
unanswered at a time; whoever else would go there is held here, in fair order, for as long as an answer takes, and then
*planned anew*: by then another worker may be the better one. The window that was opened for it is kept until it has
been used or given up (`settled`), so that no window stands open beside somebody who waits for it.

An offer that timed out occupies nothing any more: its worker may never answer.
"""

from __future__ import annotations

from collections import Counter

from libs.controller.fair_queue import FairQueue, Refusal, Waiter

Process = tuple[str, int]
"""A worker and its epoch."""


class OfferWindows:
    """Of one router. `bound`: unanswered offers a process; `held`: requests that may wait at one process."""

    def __init__(self, bound: int, held: int, weights: dict[str, float]) -> None:
        self._bound, self._held, self._weights = bound, held, weights
        self._unanswered: Counter[Process] = Counter()
        self._queues: dict[Process, FairQueue] = {}
        self._waits_at: dict[str, Process] = {}  # held requests
        self._woken: dict[str, Process] = {}  # planned anew, each with a window kept for it there
        self._kept: Counter[Process] = Counter()  # windows kept

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._waits_at)

    def unanswered(self, process: Process) -> int:
        """Offers it has not answered."""
        return self._unanswered[process]

    def open(self, request_id: str, process: Process) -> bool:
        """Whether the request may be offered there now: there is a window, kept for it or wanted by nobody else."""
        if self._woken.get(request_id) == process:
            return True
        return process not in self._queues and self._used(process) < self._bound

    def sent(self, process: Process) -> None:
        """An offer is on its way there."""
        self._unanswered[process] += 1

    def answered(self, process: Process) -> None:
        """It was answered, timed out, or is wanted no more."""
        self._unanswered[process] -= 1
        if self._unanswered[process] <= 0:
            del self._unanswered[process]

    def hold(self, waiter: Waiter, process: Process) -> Refusal | None:
        """Holds a request until there is a window; says so if too many are held there already."""
        queue = self._queues.get(process)
        if queue is None:
            queue = FairQueue(self._held, self._held, self._weights)
        refusal = queue.add(waiter)
        if refusal is not None:
            return refusal
        self._queues[process] = queue
        self._waits_at[waiter.key] = process
        return None

    def next(self) -> str | None:
        """A held request for which there is a window now; the window is kept for it from here on."""
        for process, queue in self._queues.items():
            if self._used(process) < self._bound:
                waiter = queue.take(set())
                assert waiter is not None  # an empty queue is forgotten
                self._left(waiter.key, process)
                self._woken[waiter.key] = process
                self._kept[process] += 1
                return waiter.key
        return None

    def settled(self, request_id: str) -> None:
        """It has been offered somewhere, waits for something else, or is over: the window kept for it is free."""
        process = self._woken.pop(request_id, None)
        if process is not None:
            self._kept[process] -= 1
            if not self._kept[process]:
                del self._kept[process]

    def discard(self, request_id: str) -> None:
        """It has ended."""
        self.settled(request_id)
        process = self._waits_at.get(request_id)
        if process is not None:
            self._queues[process].discard(request_id)
            self._left(request_id, process)

    def _used(self, process: Process) -> int:
        return self._unanswered[process] + self._kept[process]

    def _left(self, request_id: str, process: Process) -> None:
        del self._waits_at[request_id]
        if not len(self._queues[process]):
            del self._queues[process]
