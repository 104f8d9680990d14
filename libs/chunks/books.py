"""The books of a tier with a byte cap: what there is, how big, who leases it, who goes next. No I/O, no lock.

Bytes counted = objects known + room reserved for those being written; exactly what the cap is compared with. An object
that is to go while somebody holds it is *doomed*: no longer found, still counted, freed with its last lease.

Who goes first: GreedyDual-Size with frequency (Cherkasova 1998). Each object has the priority
`clock at its last use + uses * cost / size`, cost being what bringing it back would take; the lowest goes, and the
clock advances to its priority, so that what is not used ages against what is. A heap holds stale entries, skipped when
met.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from libs.continuation.keys import ObjectKey

Identity = tuple[int, int, int]
"""Tells bytes found good from others: of a file (inode, size, modification time in ns), in memory (0, size, sum)."""

_MOST_USES = 64


@dataclass(slots=True)
class Entry:
    """One object. `verified`: the identity under which its bytes were checked in this process."""

    key: ObjectKey
    size: int
    priority: float = 0.0
    uses: int = 1
    leases: int = 0
    doomed: bool = False
    verified: Identity | None = None


class Books:
    """Sizes in bytes. `reload_ms(size)`: what bringing an object of that size back would cost."""

    def __init__(self, cap: int, reload_ms: Callable[[int], float]) -> None:
        self.cap = cap
        self._reload_ms = reload_ms
        self._entries: dict[ObjectKey, Entry] = {}
        self._by_node: dict[tuple[str, str, str, str], list[ObjectKey]] = {}
        self._heap: list[tuple[float, int, ObjectKey]] = []
        self._clock = 0.0
        self._sequence = 0
        self.used = 0
        self.reserved = 0
        self.doomed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: ObjectKey) -> Entry | None:
        return self._entries.get(key)

    def of_node(self, fingerprint: str, owner: str, node: str, group: str) -> tuple[ObjectKey, ...]:
        """The objects of one group of one chunk, oldest first: usually one."""
        return tuple(self._by_node.get((fingerprint, owner, node, group), ()))

    def add(self, key: ObjectKey, size: int) -> Entry:
        """An object that is there now. The caller has made sure that it is new."""
        entry = Entry(key, size)
        self._entries[key] = entry
        self._by_node.setdefault(_node(key), []).append(key)
        self.used += size
        self._rank(entry)
        return entry

    def lease(self, entry: Entry) -> None:
        entry.leases += 1
        entry.uses = min(_MOST_USES, entry.uses + 1)

    def release(self, entry: Entry) -> bool:
        """True: it was doomed and this was the last lease; the caller frees it, then says `gone`."""
        entry.leases -= 1
        if entry.leases:
            return False
        if entry.doomed:
            return True
        self._rank(entry)
        return False

    def take_out(self, entry: Entry) -> bool:
        """Hides an object. True: nobody holds it, the caller frees it now, then says `gone`."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            siblings = self._by_node[_node(entry.key)]
            siblings.remove(entry.key)
            if not siblings:
                del self._by_node[_node(entry.key)]
            entry.doomed = True
            self.doomed += 1
        return entry.leases == 0

    def gone(self, entry: Entry) -> None:
        """An object taken out is no longer there."""
        self.used -= entry.size
        self.doomed -= 1

    def reserve(self, size: int) -> None:
        self.used += size
        self.reserved += size

    def unreserve(self, size: int) -> None:
        self.used -= size
        self.reserved -= size

    def victim(self) -> Entry | None:
        """The object that goes next, already taken out; None if every one is leased."""
        while self._heap:
            priority, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.priority != priority or entry.leases:
                continue  # stale, or ranked again when its lease ends
            self._clock = max(self._clock, priority)
            self.take_out(entry)
            return entry
        return None

    def _rank(self, entry: Entry) -> None:
        self._sequence += 1
        entry.priority = self._clock + entry.uses * self._reload_ms(entry.size) / max(1, entry.size)
        heapq.heappush(self._heap, (entry.priority, self._sequence, entry.key))
        if len(self._heap) > 64 + 4 * len(self._entries):
            live = [item for item in self._heap if (found := self._entries.get(item[2])) and found.priority == item[0]]
            heapq.heapify(live)
            self._heap = live


def _node(key: ObjectKey) -> tuple[str, str, str, str]:
    return key.fingerprint, key.owner, key.hash, key.group
