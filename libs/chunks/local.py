"""The chunk directory: objects as files on the worker's SSD, read in place.

Reads map the file (`Held.data` is the page cache itself) under a lease; a leased file is never evicted, and removing it
waits for the last lease. One cap per directory, kept exactly over what lies there and what is being written, and the
file system is asked before each write, since others use it too: `keep_free` bytes stay free. Too little room evicts;
where nothing can be evicted the tier stops taking files, counted, and inference goes on. The disk filling up in the
middle of a write is the same case, found later: the tier then rests for a while.

Damaged files are moved to the quarantine, never served again, and `on_gone` tells whoever keeps the replica facts;
evicted and vanished files likewise. `on_gone` is called from any thread and without the lock.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from libs.chunks.books import Books, Entry
from libs.chunks.cost import CostMeter, Price
from libs.chunks.directory_files import DirectoryFiles, Mapped, drop_cached, read_through, sync_folder
from libs.chunks.errors import (
    AbortedError,
    DirectoryError,
    MissingObjectError,
    SlowTierError,
    TierClosedError,
    TierFullError,
)
from libs.chunks.tier import Held, Parts, Stored, TierKind, Transfer, size_of
from libs.continuation.errors import ObjectError
from libs.continuation.keys import ObjectKey

_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_GUESS = Price(latency_ms=0.5, bytes_per_ms=800_000)
_RELOAD = Price(latency_ms=5.0, bytes_per_ms=200_000)


def _counter(about: str, kind: str = "counter") -> int:
    found: int = field(default=0, metadata={"help": about, "kind": kind})
    return found


@dataclass
class DirectoryCounts:
    """Counters of one chunk directory."""

    used_bytes: int = _counter("Bytes of files in the chunk directory, those being written included", "gauge")
    cap_bytes: int = _counter("Most bytes the chunk directory may hold", "gauge")
    files: int = _counter("Files in the chunk directory", "gauge")
    leases: int = _counter("Files being read in place", "gauge")
    read_bytes: int = _counter("Bytes of files opened")
    written_bytes: int = _counter("Bytes written")
    evicted_files: int = _counter("Files evicted to make room")
    evicted_bytes: int = _counter("Bytes evicted to make room")
    refused_full: int = _counter("Files not taken because the cap or the disk was full")
    disk_full: int = _counter("Writes that ran into a full disk")
    quarantined: int = _counter("Damaged files moved aside")
    vanished: int = _counter("Files that were gone when they were to be read")
    leftovers: int = _counter("Files without a valid name found at start and moved aside")


class LocalDirectory:
    """The SSD tier.

    Args:
        cap: bytes of object files, those being written included.
        keep_free: bytes of the file system left to others.
        reload_ms: what bringing back a file of so many bytes from elsewhere would cost; ranks evictions.
        on_gone: told of each file that is no longer there (evicted, quarantined, vanished, removed).
        rest_s: after a full disk, how long no file is taken.

    Raises DirectoryError, DirectoryInUseError.
    """

    kind = TierKind.SSD

    def __init__(
        self,
        root: Path,
        *,
        cap: int,
        keep_free: int = 0,
        reload_ms: Callable[[int], float] = _RELOAD.ms,
        on_gone: Callable[[ObjectKey], None] = lambda key: None,
        rest_s: float = 10.0,
    ) -> None:
        self._files = DirectoryFiles(root)
        self._index = Books(cap, reload_ms)
        self._keep_free, self._on_gone, self._rest_s = keep_free, on_gone, rest_s
        self.meter = CostMeter(_GUESS)
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._writing: set[ObjectKey] = set()
        self._resting_until = 0.0
        self._closed = False
        self.counts = DirectoryCounts(cap_bytes=cap)
        self._load()

    @property
    def node(self) -> str:
        """The directory's UUID."""
        return self._files.node

    @property
    def used(self) -> int:
        """Bytes counted against the cap."""
        return self._index.used

    @property
    def cap(self) -> int:
        return self._index.cap

    def objects(self) -> tuple[ObjectKey, ...]:
        """Every object there now."""
        with self._lock:
            return tuple(entry.key for entry in self._index)

    def find(self, fingerprint: str, owner: str, node: str, group: str) -> tuple[ObjectKey, ...]:
        """The objects of one group of one chunk, whoever computed them."""
        with self._lock:
            return self._index.of_node(fingerprint, owner, node, group)

    def _load(self) -> None:
        found = sorted(self._files.scan(), key=lambda file: file.modified_ns)
        for file in found:
            if file.key is None:
                self.counts.leftovers += 1
                self._files.set_aside(file.path, "unknown")
            else:
                self._index.add(file.key, file.size)
        with self._lock:
            gone = self._evict_down_to(self.cap)
        self._tell(gone)
        self._gauge()

    # ---------------------------------------------------------------------------------------------------------- reading

    def probe(self, size: int = 8 << 20) -> None:
        """Measures the medium itself, past the page cache. Raises OSError; leaves nothing behind."""
        path = self._files.write_temporary([memoryview(os.urandom(size))])
        try:
            drop_cached(path)
            started = time.monotonic()
            read_through(path, 4096)
            first = time.monotonic()
            read_through(path, size)
            self.meter.observe(4096, (first - started) * 1e3)
            self.meter.observe(size, (time.monotonic() - first) * 1e3)
        finally:
            path.unlink(missing_ok=True)

    def get(self, key: ObjectKey, size: int, *, within: float, abort: Transfer | None = None) -> Held:
        """See `Tier.get`. The bytes are a mapping of the file; a file that was cut short is returned as it is."""
        if abort is not None and abort.is_set():
            raise AbortedError(f"reading {key.text} was aborted", remedy="nobody waits for it")
        with self._lock:
            self._check_open()
            entry = self._index.get(key)
            if entry is None:
                raise MissingObjectError(f"{key.text} is not in the chunk directory", remedy="take another source")
            self._index.lease(entry)
            self.counts.leases += 1
        try:
            mapped = self._files.map(key)
        except OSError as error:
            self._release(entry, vanished=True)
            raise MissingObjectError(
                f"{key.text} cannot be opened ({error.strerror})", remedy="take another source"
            ) from error
        self.counts.read_bytes += mapped.data.nbytes
        if abort is not None:
            abort.came(mapped.data.nbytes)
        return _Leased(self, entry, mapped)

    def stat(self, key: ObjectKey, *, within: float) -> Stored | None:
        """See `Tier.stat`."""
        with self._lock:
            self._check_open()
            entry = self._index.get(key)
            return None if entry is None else Stored(entry.size)

    def _release(self, entry: Entry, *, vanished: bool = False) -> None:
        gone = False
        with self._lock:
            self.counts.leases -= 1
            if vanished and not entry.doomed:
                self.counts.vanished += 1
                self._index.take_out(entry)
                gone = True
            if self._index.release(entry):
                self._drop(entry)
        if gone:
            self._tell([entry])

    # ---------------------------------------------------------------------------------------------------------- writing

    def put(self, key: ObjectKey, parts: Parts, *, within: float) -> Stored:
        """See `Tier.put`. Returns after the file and its folder are synced."""
        size = size_of(parts)
        with self._lock:
            if not self._written.wait_for(lambda: key not in self._writing, within):
                raise SlowTierError(f"{key.text} is being written by another thread", remedy="check the disk")
            self._check_open()
            entry = self._index.get(key)
            if entry is not None:
                return Stored(entry.size)
            gone, refused = self._reserve(key, size)
        self._tell(gone)
        if refused is not None:
            raise refused
        try:
            temporary = self._files.write_temporary(parts)
        except OSError as error:
            self._abandon(key, size)
            raise self._write_failed(key, size, error) from error
        except BaseException:
            self._abandon(key, size)
            raise
        try:
            with self._lock:
                self._check_open()
                changed = self._files.publish(temporary, key)
                self._unreserve(key, size)
                self._index.add(key, size)
                self.counts.written_bytes += size
                self._gauge()
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            self._abandon(key, size)
            if isinstance(error, OSError):
                raise self._write_failed(key, size, error) from error
            raise
        for folder in changed:
            sync_folder(folder)
        return Stored(size, created=True)

    def _reserve(self, key: ObjectKey, size: int) -> tuple[list[Entry], TierFullError | None]:
        """Takes room for a file, evicting others, which are returned; or says why there is none."""
        if time.monotonic() < self._resting_until or size > self.cap:
            why = "it exceeds the cap" if size > self.cap else "the disk was full a moment ago"
            return [], self._refused(key, size, why)
        gone = self._evict_down_to(self.cap - size)
        while (lacking := not self._disk_has(size)) and (entry := self._index.victim()) is not None:
            self._evict(entry)
            gone.append(entry)
        if lacking or self.used + size > self.cap:
            self._gauge()
            return gone, self._refused(key, size, "nothing more can be evicted")
        self._index.reserve(size)
        self._writing.add(key)
        self._gauge()
        return gone, None

    def _disk_has(self, size: int) -> bool:
        """Whether the file system has room for one more file: what is reserved will take its room too."""
        return self._files.free_bytes() - self._index.reserved - size >= self._keep_free

    def _evict_down_to(self, limit: int) -> list[Entry]:
        gone: list[Entry] = []
        while self.used > limit and (entry := self._index.victim()) is not None:
            self._evict(entry)
            gone.append(entry)
        return gone

    def _evict(self, entry: Entry) -> None:
        self.counts.evicted_files += 1
        self.counts.evicted_bytes += entry.size
        self._drop(entry)

    def _refused(self, key: ObjectKey, size: int, why: str) -> TierFullError:
        self.counts.refused_full += 1
        return TierFullError(
            f"chunk directory has no room for {size} bytes of {key.text} ({self.used} of {self.cap} used): {why}",
            remedy="raise the directory's cap, or free disk space",
        )

    def _write_failed(self, key: ObjectKey, size: int, error: OSError) -> DirectoryError | TierFullError:
        if error.errno not in _FULL_ERRORS:
            return DirectoryError(f"{key.text} cannot be written ({error.strerror})", remedy="check the disk")
        with self._lock:
            self.counts.disk_full += 1
            self._resting_until = time.monotonic() + self._rest_s
            # What the disk lacks is about this file: give it back from our own, so that others can go on.
            gone = self._evict_down_to(max(0, self.used - size))
            self._gauge()
            refused = self._refused(key, size, f"{error.strerror}")
        self._tell(gone)
        return refused

    def _abandon(self, key: ObjectKey, size: int) -> None:
        with self._lock:
            self._unreserve(key, size)

    def _unreserve(self, key: ObjectKey, size: int) -> None:
        if key in self._writing:
            self._writing.discard(key)
            self._written.notify_all()
            self._index.unreserve(size)
            self._gauge()

    # --------------------------------------------------------------------------------------------------------- removing

    def remove(self, key: ObjectKey, *, within: float) -> None:
        """See `Tier.remove`: a file that is being read goes with its last lease."""
        with self._lock:
            self._check_open()
            entry = self._index.get(key)
            if entry is None:
                return
            if self._index.take_out(entry):
                self._drop(entry)
            self._gauge()
        self._tell([entry])

    def reject(self, key: ObjectKey, error: ObjectError) -> None:
        """Moves a damaged file to the quarantine. Those who read it at this moment keep their mapping."""
        with self._lock:
            entry = self._index.get(key)
            if entry is None:
                return
            self.counts.quarantined += 1
            if self._index.take_out(entry):
                self._index.gone(entry)
            self._files.set_aside(self._files.path(key), error.reason)
            self._gauge()
        self._tell([entry])

    def _drop(self, entry: Entry) -> None:
        """Unlinks a file that was taken out. A newer file may lie under the same key: then that one stays."""
        if entry.key not in self._index and not self._closed:
            self._files.unlink(entry.key)
        self._index.gone(entry)
        self._gauge()

    def _tell(self, gone: list[Entry]) -> None:
        for entry in gone:
            self._on_gone(entry.key)

    def _gauge(self) -> None:
        self.counts.used_bytes, self.counts.files = self.used, len(self._index)

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"chunk directory {self._files.root} is closed", remedy="open it again")

    def close(self) -> None:
        """Gives the directory to the next process. Bytes held stay mapped until released."""
        with self._lock:
            self._closed = True
        self._files.close()


class _Leased:
    """A mapped file under a lease."""

    def __init__(self, directory: LocalDirectory, entry: Entry, mapped: Mapped) -> None:
        self._directory, self._entry, self._mapped = directory, entry, mapped
        self._released = threading.Lock()

    @property
    def data(self) -> memoryview:
        return self._mapped.data

    @property
    def verified(self) -> bool:
        return self._entry.verified == self._mapped.identity

    def mark_verified(self) -> None:
        self._entry.verified = self._mapped.identity

    def release(self) -> None:
        if self._released.acquire(blocking=False):
            self._mapped.close()
            self._directory._release(self._entry)
