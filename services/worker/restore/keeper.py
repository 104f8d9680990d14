"""Keeps what came from elsewhere nearer: in host memory and in the chunk directory; in the background, bounded.

A restore does not wait for it: memory takes the very buffer that was uploaded, the file is written from it. What lies
in the chunk directory is copied into memory under a lease of its own. A queue that is full drops, counted; the next
restore then fetches again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from libs.chunks.errors import TierError
from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.continuation.keys import ObjectKey
from services.worker.restore.settings import RestoreCounts
from services.worker.threads import low_priority

_WRITE_WITHIN_S = 60.0


class Keeper:
    """`kept` is called, from the keeping thread, for each object that is now in the directory."""

    def __init__(
        self,
        memory: HostMemory | None,
        local: LocalDirectory | None,
        limit: int,
        counts: RestoreCounts,
        kept: Callable[[ObjectKey], None],
    ) -> None:
        self._memory, self._local, self._limit, self._counts, self._kept = memory, local, limit, counts, kept
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keep", initializer=low_priority)
        self._lock = threading.Lock()
        self._queued = 0

    def keep(self, key: ObjectKey, data: memoryview) -> None:
        """Queues an object that has been verified; `data` must not change any more."""
        if self._memory is not None or self._local is not None:
            self._queue(data.nbytes, lambda: self._keep(key, data))

    def remember(self, key: ObjectKey, size: int) -> None:
        """Queues a copy into memory of an object in the chunk directory, unless it is there."""
        if self._memory is not None and self._memory.stat(key, within=1.0) is None and size <= self._memory.cap:
            self._queue(size, lambda: self._copy(key))

    def _queue(self, size: int, work: Callable[[], None]) -> None:
        with self._lock:
            if self._queued + size > self._limit:
                self._counts.persist_dropped += 1
                return
            self._queued += size
        self._pool.submit(self._run, size, work)

    def _run(self, size: int, work: Callable[[], None]) -> None:
        try:
            work()
        except TierError:
            self._counts.persist_dropped += 1
        finally:
            with self._lock:
                self._queued -= size

    def _keep(self, key: ObjectKey, data: memoryview) -> None:
        try:
            if self._memory is not None:
                self._counts.remembered += self._memory.adopt(key, data, verified=True).created
        finally:
            if self._local is not None:
                self._local.put(key, [data], within=_WRITE_WITHIN_S)
                self._counts.persisted += 1
                self._kept(key)

    def _copy(self, key: ObjectKey) -> None:
        assert self._memory is not None
        assert self._local is not None
        held = self._local.get(key, 0, within=_WRITE_WITHIN_S)
        try:
            self._counts.remembered += self._memory.put(key, [held.data], within=_WRITE_WITHIN_S).created
        finally:
            held.release()

    def close(self) -> None:
        """Finishes what is queued: at most `limit` bytes. Blocks."""
        self._pool.shutdown(wait=True)
