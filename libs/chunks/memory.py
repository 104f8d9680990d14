"""Host memory: the objects of late, each one buffer, served in place under a lease.

One byte cap, kept exactly over what is there, what is being copied in, and what was taken out while somebody still
reads it; too little room evicts by what bringing an object back would cost, never a leased one. `adopt` takes a buffer
over without a copy (a checkpoint's, a fetch's); `put` copies.

Memory has no modification time, so that bytes found good are told from others by a 64-bit sum over all of them, taken
again at each read at the speed of memory: a single changed bit changes the sum, and then the full check is made.

`on_here` and `on_gone` tell whoever advertises what is here. They are called from any thread and without the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from libs.chunks.books import Books, Entry, Identity
from libs.chunks.cost import CostMeter, Price
from libs.chunks.errors import AbortedError, MissingObjectError, SlowTierError, TierClosedError, TierFullError
from libs.chunks.tier import Held, Parts, Stored, TierKind, Transfer, size_of
from libs.continuation.errors import ObjectError
from libs.continuation.keys import ObjectKey

_GUESS = Price(latency_ms=0.05, bytes_per_ms=5_000_000)
_RELOAD = Price(latency_ms=1.0, bytes_per_ms=500_000)
_WORD = 8


def _counter(about: str, kind: str = "counter") -> int:
    found: int = field(default=0, metadata={"help": about, "kind": kind})
    return found


@dataclass
class MemoryCounts:
    """Counters of one worker's chunks in host memory."""

    used_bytes: int = _counter("Bytes of chunks in host memory, those being copied in included", "gauge")
    cap_bytes: int = _counter("Most bytes of chunks in host memory", "gauge")
    objects: int = _counter("Objects in host memory", "gauge")
    leases: int = _counter("Objects in host memory being read", "gauge")
    read_bytes: int = _counter("Bytes of objects in host memory opened")
    written_bytes: int = _counter("Bytes of objects taken into host memory")
    evicted_objects: int = _counter("Objects evicted from host memory to make room")
    evicted_bytes: int = _counter("Bytes evicted from host memory to make room")
    refused_full: int = _counter("Objects not taken into host memory for want of room")
    quarantined: int = _counter("Objects in host memory found damaged and dropped")


class HostMemory:
    """The RAM tier. Every method is thread-safe.

    Args:
        cap: bytes, those being copied in and those taken out under a lease included.
        reload_ms: what bringing back an object of so many bytes from elsewhere would cost; ranks evictions.
        on_here, on_gone: told of each object that came or is no longer here.
    """

    kind = TierKind.RAM

    def __init__(
        self,
        cap: int,
        *,
        reload_ms: Callable[[int], float] = _RELOAD.ms,
        on_here: Callable[[ObjectKey], None] = lambda key: None,
        on_gone: Callable[[ObjectKey], None] = lambda key: None,
    ) -> None:
        self._books = Books(cap, reload_ms)
        self._data: dict[ObjectKey, memoryview] = {}
        self._on_here, self._on_gone = on_here, on_gone
        self.meter = CostMeter(_GUESS)
        self._lock = threading.Lock()
        self._copied = threading.Condition(self._lock)
        self._copying: set[ObjectKey] = set()
        self._closed = False
        self.counts = MemoryCounts(cap_bytes=cap)

    @property
    def used(self) -> int:
        """Bytes counted against the cap."""
        return self._books.used

    @property
    def cap(self) -> int:
        return self._books.cap

    def objects(self) -> tuple[ObjectKey, ...]:
        """Every object here now."""
        with self._lock:
            return tuple(entry.key for entry in self._books)

    def find(self, fingerprint: str, owner: str, node: str, group: str) -> tuple[ObjectKey, ...]:
        """The objects of one group of one chunk, whoever computed them."""
        with self._lock:
            return self._books.of_node(fingerprint, owner, node, group)

    def holds(self, key: ObjectKey) -> bool:
        """Whether it is here now."""
        with self._lock:
            return key in self._books

    def peek(self, key: ObjectKey) -> memoryview | None:
        """The bytes, unchecked and uncounted, for looking at the header; None: not here."""
        with self._lock:
            return self._data.get(key)

    def probe(self, size: int = 8 << 20) -> None:
        """Measures reading from memory; keeps nothing."""
        data = np.ones(size, np.uint8).data
        for count in (4096, size):
            started = time.monotonic()
            _sum(data[:count])
            self.meter.observe(count, (time.monotonic() - started) * 1e3)

    # ---------------------------------------------------------------------------------------------------------- reading

    def get(self, key: ObjectKey, size: int, *, within: float, abort: Transfer | None = None) -> Held:
        """See `Source.get`. The bytes are the buffer itself."""
        if abort is not None and abort.is_set():
            raise AbortedError(f"reading {key.text} was aborted", remedy="nobody waits for it")
        with self._lock:
            self._check_open()
            entry = self._books.get(key)
            if entry is None:
                raise MissingObjectError(f"{key.text} is not in host memory", remedy="take another source")
            self._books.lease(entry)
            data = self._data[key]
            self.counts.leases += 1
            self.counts.read_bytes += data.nbytes
        if abort is not None:
            abort.came(data.nbytes)
        return _Leased(self, entry, data)

    def stat(self, key: ObjectKey, *, within: float) -> Stored | None:
        """See `Source.stat`."""
        with self._lock:
            self._check_open()
            entry = self._books.get(key)
            return None if entry is None else Stored(entry.size)

    def _release(self, entry: Entry) -> None:
        with self._lock:
            self.counts.leases -= 1
            if self._books.release(entry):
                self._books.gone(entry)
            self._gauge()

    # ---------------------------------------------------------------------------------------------------------- writing

    def put(self, key: ObjectKey, parts: Parts, *, within: float) -> Stored:
        """See `Tier.put`; as durable as this process."""
        size = size_of(parts)
        with self._lock:
            if not self._copied.wait_for(lambda: key not in self._copying, within):
                raise SlowTierError(f"{key.text} is being copied by another thread", remedy="try again")
            found, gone, refused = self._room(key, size)
            if found is None and refused is None:
                self._books.reserve(size)
                self._copying.add(key)
            self._gauge()
        self._tell(gone)
        if refused is not None:
            raise refused
        if found is not None:
            return found
        data: memoryview | None = None
        try:
            data = _joined(parts, size)
        finally:
            with self._lock:
                self._books.unreserve(size)
                self._copying.discard(key)
                self._copied.notify_all()
                if data is not None and not self._closed:
                    self._add(key, data, None)
        self._on_here(key)
        return Stored(size, created=True)

    def adopt(self, key: ObjectKey, data: memoryview, *, verified: bool) -> Stored:
        """Takes a whole object over without copying; `data` must not change any more. Raises TierFullError.

        verified: these bytes have been found good (or hashed where they were made).
        """
        identity = (0, data.nbytes, _sum(data)) if verified else None
        with self._lock:
            found, gone, refused = self._room(key, data.nbytes)
            if key in self._copying:
                found = Stored(data.nbytes)
            if found is None and refused is None:
                self._add(key, data, identity)
            self._gauge()
        self._tell(gone)
        if refused is not None:
            raise refused
        if found is not None:
            return found
        self._on_here(key)
        return Stored(data.nbytes, created=True)

    def _room(self, key: ObjectKey, size: int) -> tuple[Stored | None, list[Entry], TierFullError | None]:
        """What is here already, or room for it (evicting others, which are returned), or why there is none."""
        self._check_open()
        entry = self._books.get(key)
        if entry is not None:
            return Stored(entry.size), [], None
        gone: list[Entry] = []
        while size <= self.cap < self.used + size and (victim := self._books.victim()) is not None:
            self.counts.evicted_objects += 1
            self.counts.evicted_bytes += victim.size
            self._drop(victim)
            gone.append(victim)
        if self.used + size <= self.cap:
            return None, gone, None
        self.counts.refused_full += 1
        return (
            None,
            gone,
            TierFullError(
                f"host memory has no room for {size} bytes of {key.text} ({self.used} of {self.cap} used)",
                remedy="raise the setting ram_bytes",
            ),
        )

    def _add(self, key: ObjectKey, data: memoryview, verified: Identity | None) -> None:
        entry = self._books.add(key, data.nbytes)
        entry.verified = verified
        self._data[key] = data
        self.counts.written_bytes += data.nbytes
        self._gauge()

    # --------------------------------------------------------------------------------------------------------- removing

    def remove(self, key: ObjectKey, *, within: float) -> None:
        """See `Tier.remove`."""
        self._take_out(key)

    def reject(self, key: ObjectKey, error: ObjectError) -> None:
        """Drops damaged bytes; whoever reads them at this moment keeps them."""
        self._take_out(key, damaged=True)

    def _take_out(self, key: ObjectKey, *, damaged: bool = False) -> None:
        with self._lock:
            entry = self._books.get(key)
            if entry is None:
                return
            self.counts.quarantined += damaged
            if self._books.take_out(entry):
                self._drop(entry)
            else:
                self._data.pop(key, None)
            self._gauge()
        self._tell([entry])

    def _drop(self, entry: Entry) -> None:
        """Frees what was taken out and nobody holds."""
        if entry.key not in self._books:
            self._data.pop(entry.key, None)
        self._books.gone(entry)

    def _tell(self, gone: list[Entry]) -> None:
        for entry in gone:
            self._on_gone(entry.key)

    def _gauge(self) -> None:
        self.counts.used_bytes, self.counts.objects = self.used, len(self._books)

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError("the worker's host memory tier is closed", remedy="open it again")

    def close(self) -> None:
        """Frees everything. Bytes held stay until released."""
        with self._lock:
            self._closed = True
            for entry in list(self._books):
                if self._books.take_out(entry):
                    self._drop(entry)
            self._data.clear()
            self._gauge()


class _Leased:
    """A buffer under a lease."""

    def __init__(self, memory: HostMemory, entry: Entry, data: memoryview) -> None:
        self._memory, self._entry, self.data = memory, entry, data
        self._released = threading.Lock()

    @property
    def verified(self) -> bool:
        known = self._entry.verified
        return known is not None and known == (0, self.data.nbytes, _sum(self.data))

    def mark_verified(self) -> None:
        self._entry.verified = (0, self.data.nbytes, _sum(self.data))

    def release(self) -> None:
        if self._released.acquire(blocking=False):
            self._memory._release(self._entry)


def _joined(parts: Parts, size: int) -> memoryview:
    data = np.empty(size, np.uint8).data
    at = 0
    for part in parts:
        data[at : at + part.nbytes] = part.cast("B")
        at += part.nbytes
    return data


def _sum(data: memoryview) -> int:
    """Of all bytes, as 64-bit words, modulo 2^64: one changed bit changes it."""
    whole = data.nbytes // _WORD * _WORD
    words = int(np.frombuffer(data[:whole], np.uint64).sum(dtype=np.uint64)) if whole else 0
    return (words + int.from_bytes(data[whole:], "little")) % (1 << 64)
