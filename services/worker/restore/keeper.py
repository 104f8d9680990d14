"""Keeps in the chunk directory what came from the object store: in the background, file by file, bounded by bytes.

The restore does not wait for it: the file is written from the buffer that was uploaded. A queue that is full drops,
counted; the next restore then fetches again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from libs.chunks.errors import TierError
from libs.chunks.local import LocalDirectory
from libs.continuation.keys import ObjectKey
from services.worker.restore.settings import RestoreCounts
from services.worker.threads import low_priority

_WRITE_WITHIN_S = 60.0


class Keeper:
    """`kept` is called, from the writing thread, for each object that is now in the directory."""

    def __init__(
        self, local: LocalDirectory, limit: int, counts: RestoreCounts, kept: Callable[[ObjectKey], None]
    ) -> None:
        self._local, self._limit, self._counts, self._kept = local, limit, counts, kept
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keep", initializer=low_priority)
        self._lock = threading.Lock()
        self._queued = 0

    def keep(self, key: ObjectKey, data: memoryview) -> None:
        """Queues the object; `data` must not change any more."""
        with self._lock:
            if self._queued + data.nbytes > self._limit:
                self._counts.persist_dropped += 1
                return
            self._queued += data.nbytes
        self._pool.submit(self._write, key, data)

    def _write(self, key: ObjectKey, data: memoryview) -> None:
        try:
            self._local.put(key, [data], within=_WRITE_WITHIN_S)
        except TierError:
            self._counts.persist_dropped += 1
        else:
            self._counts.persisted += 1
            self._kept(key)
        finally:
            with self._lock:
                self._queued -= data.nbytes

    def close(self) -> None:
        """Writes what is queued: at most `limit` bytes. Blocks."""
        self._pool.shutdown(wait=True)
