"""The residency index: which worker holds which prefix boundary in device pages or host memory. Pure.

Inverted (hash -> workers, by tier), so that a decision visits only the workers that hold something of the request's
chain. A boundary is advertised by its worker at its exact end and at every chunk end before it; a running prefill's
boundaries are advertised as INFLIGHT with an arrival time. What lies in host memory is advertised chunk by chunk, with
the layer groups there.

A million boundaries take about a hundred bytes each: workers are numbered (*slots*), the holders of a boundary are the
bits of one integer, equal integers are one object (nearly all boundaries have one of few sets of holders), a hash is
kept as 60 bits of it, and what one worker holds is a log of such keys, compacted when half of it is history. Two of a
million boundaries share 60 bits with a probability of 4e-7; what follows is an offer that its worker answers with
PREFIX_GONE, since only the whole hash names tokens there.

What the router itself has just assigned is *assumed*: INFLIGHT at that worker until a heartbeat tells
(`Fleet.account`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import and_

from libs.controller.protocol import Gone, Heartbeat, Resident, Tier

Holding = dict[Tier, float]  # tier -> time of arrival on the router's clock (INFLIGHT), else 0

_CHUNK_TOKENS = 256  # ends that are no multiple of it are tails'
_KEY_BITS = (1 << 60) - 1
_SHARED = 1 << 16  # sets of holders that are kept as one object each; beyond it sharing starts anew
_GPU, _RAM, _INFLIGHT = Tier.GPU, Tier.RAM, Tier.INFLIGHT
_SLACK = 64  # entries of a log that are not worth compacting


def key_of(name: str) -> int:
    """A boundary's name in the index: 60 bits, of this process only."""
    return hash(name) & _KEY_BITS


def bits(mask: int) -> Iterator[int]:
    """The slots of a set of holders, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class ResidencyIndex:
    """See the module. `gpu`, `ram`: key -> holders, to read; `names`: slot -> worker, "" where it is free."""

    def __init__(self) -> None:
        self.gpu: dict[int, int] = {}
        self.ram: dict[int, int] = {}
        self.coming: dict[int, dict[int, float]] = {}  # key -> slot -> arrival, as workers said
        self.assumed: dict[int, dict[int, float]] = {}  # key -> slot -> arrival, as this router assigned
        self.parts: dict[int, dict[int, frozenset[str]]] = {}  # key -> slot -> groups, where not all are in memory
        self.tail_ends: dict[int, int] = {}  # ends inside a chunk -> how many tails have it
        self.names: list[str] = []
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._logs: list[array[int]] = []  # by slot: keys it holds, or held
        self._counts: list[int] = []  # by slot: keys it holds
        self._tails: dict[int, int] = {}  # key -> end, of tails
        self._bits: list[int] = []  # by slot: its own, as a set of holders
        self._shared: dict[int, int] = {}
        self._keys = 0

    # --- slots ---

    def slot(self, worker: str) -> int:
        """The worker's number; a free one for a new worker."""
        found = self._slots.get(worker)
        if found is not None:
            return found
        if self._free:
            found = self._free.pop()
            self.names[found] = worker
        else:
            found = len(self.names)
            self.names.append(worker)
            self._logs.append(array("q"))
            self._counts.append(0)
            self._bits.append(self._share(1 << found))
        self._slots[worker] = found
        return found

    def slot_of(self, worker: str) -> int | None:
        """The number of a worker that has one."""
        return self._slots.get(worker)

    def release(self, worker: str) -> None:
        """Forgets the worker and its number."""
        self.forget(worker)
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self.names[slot] = ""
            self._free.append(slot)

    # --- reading ---

    def holders(self, name: str) -> Mapping[str, Holding]:
        """Workers that hold this boundary, and where. For few: builds its answer."""
        key = key_of(name)
        found: dict[str, Holding] = {}
        for tier, holders in ((Tier.GPU, self.gpu.get(key, 0)), (Tier.RAM, self.ram.get(key, 0))):
            for slot in bits(holders):
                found.setdefault(self.names[slot], {})[tier] = 0.0
        for slot, arrival in self.arrivals(key):
            found.setdefault(self.names[slot], {})[Tier.INFLIGHT] = arrival
        return found

    def arrivals(self, key: int) -> list[tuple[int, float]]:
        """Slots where the boundary is being computed, and until when."""
        said, assumed = self.coming.get(key), self.assumed.get(key)
        if not said and not assumed:
            return []
        return [*(said or {}).items(), *((assumed or {}).items())]

    def in_memory(self, worker: str, name: str, group: str) -> bool:
        """Whether the worker's host memory holds the object of one group of this chunk."""
        slot, key = self._slots.get(worker), key_of(name)
        if slot is None or not self.ram.get(key, 0) >> slot & 1:
            return False
        groups = self.parts.get(key, {}).get(slot)
        return groups is None or group in groups

    def memory_of(self, key: int, group: str) -> int:
        """Who holds the object of one group of this chunk in host memory."""
        holders = self.ram.get(key, 0)
        for slot, groups in self.parts.get(key, {}).items():
            if group not in groups:
                holders &= ~(1 << slot)
        return holders

    def find_matches(self, names: Sequence[str]) -> dict[str, int]:
        """How many of a chain's boundaries, from its root on without a gap, each worker has in device pages."""
        found: dict[str, int] = {}
        alive, last, depth = 0, -1, 0
        for holders in map(self.gpu.get, map(and_, map(hash, names), repeat(_KEY_BITS))):
            # Of one chain most boundaries have the same holders, which are one object.
            if holders is not last:
                if holders is None:
                    break
                if depth == 0:
                    alive = holders
                elif alive & ~holders:
                    for slot in bits(alive & ~holders):
                        found[self.names[slot]] = depth
                    alive &= holders
                    if not alive:
                        break
                last = holders
            depth += 1
        for slot in bits(alive):
            found[self.names[slot]] = depth
        return found

    def count(self, worker: str) -> int:
        """Boundaries known of a worker."""
        slot = self._slots.get(worker)
        return self._counts[slot] if slot is not None else 0

    def __len__(self) -> int:
        return self._keys

    # --- changing ---

    def apply(self, heartbeat: Heartbeat, now_ms: float, reset: bool) -> None:
        """Takes a heartbeat's changes; `reset` forgets the worker's earlier ones first (snapshot or gap)."""
        worker = heartbeat.worker
        if reset:
            self.forget(worker)
        slot = self.slot(worker)
        # What went goes first: a boundary may leave a tier and come back within one heartbeat's interval.
        for gone in heartbeat.gone:
            self._remove(slot, hash(gone.hash) & _KEY_BITS, gone.tier)
        for resident in heartbeat.resident:
            self.add(slot, resident, now_ms)

    def forget(self, worker: str) -> None:
        """All of a worker's boundaries."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        log, self._logs[slot] = self._logs[slot], array("q")
        for key in log:
            for tier in (Tier.GPU, Tier.RAM, Tier.INFLIGHT):
                self._remove(slot, key, tier)

    def drop(self, worker: str, gone: Gone) -> None:
        """A boundary that proved not to be there."""
        slot = self._slots.get(worker)
        if slot is not None:
            self._remove(slot, key_of(gone.hash), gone.tier)

    def assume(self, slot: int, boundaries: Iterable[tuple[int, float]]) -> None:
        """This router has sent the worker something that will compute these keys' boundaries, and until when."""
        assumed = self.assumed
        for key, arrival_ms in boundaries:
            by_slot = assumed.get(key)
            if by_slot is None:
                assumed[key] = {slot: arrival_ms}
            else:
                by_slot.setdefault(slot, arrival_ms)

    def unassume(self, slot: int, boundaries: Iterable[tuple[int, float]]) -> None:
        """What was assumed with these arrivals is over, or known otherwise."""
        assumed = self.assumed
        for key, arrival_ms in boundaries:
            by_slot = assumed.get(key)
            if by_slot is not None and by_slot.get(slot) == arrival_ms:
                del by_slot[slot]
                if not by_slot:
                    del assumed[key]

    def add(self, slot: int, resident: Resident, now_ms: float) -> None:
        """A boundary that the worker in the slot holds now."""
        key, tier = hash(resident.hash) & _KEY_BITS, resident.tier
        coming = self.coming.get(key)
        if tier is _INFLIGHT:
            beside = self.gpu.get(key, 0) | self.ram.get(key, 0)
            if coming is None:
                coming = self.coming[key] = {}
                if not beside:
                    self._appeared(key, resident.end)
            if slot not in coming and not beside >> slot & 1:
                self._entered(slot, key)
            coming[slot] = now_ms + resident.arrival_ms
            return
        if tier is _GPU:
            holders, others = self.gpu, self.ram
        elif tier is _RAM:
            holders, others = self.ram, self.gpu
            if resident.groups or self.parts:
                self._part(slot, key, resident.groups)
        else:
            return
        old = holders.get(key, 0)
        if not old >> slot & 1:
            beside = others.get(key, 0)
            if not old and not beside and coming is None:
                self._appeared(key, resident.end)
            bit = self._bits[slot]
            holders[key] = self._share(old | bit) if old else bit
            if not beside >> slot & 1 and (coming is None or slot not in coming):
                self._entered(slot, key)
        if coming is not None and tier is _GPU:
            self._arrived(slot, key)  # it has

    def _appeared(self, key: int, end: int) -> None:
        """Nobody held the boundary in any tier."""
        self._keys += 1
        if end % _CHUNK_TOKENS:
            self._tails[key] = end
            self.tail_ends[end] = self.tail_ends.get(end, 0) + 1

    def _entered(self, slot: int, key: int) -> None:
        """The worker held the boundary in no tier."""
        counts = self._counts
        counts[slot] += 1
        log = self._logs[slot]
        log.append(key)
        if len(log) > 2 * counts[slot] + _SLACK:
            kept = [one for one in dict.fromkeys(log) if one == key or self._holds(slot, one)]
            self._logs[slot] = array("q", kept)

    def _holds(self, slot: int, key: int) -> bool:
        both = self.gpu.get(key, 0) | self.ram.get(key, 0)
        return bool(both >> slot & 1) or slot in self.coming.get(key, ())

    def _remove(self, slot: int, key: int, tier: Tier) -> None:
        if tier is _INFLIGHT:
            if slot not in self.coming.get(key, ()):
                return
            self._arrived(slot, key)
            both = self.gpu.get(key, 0) | self.ram.get(key, 0)
        else:
            if tier is _GPU:
                holders, others = self.gpu, self.ram
            elif tier is _RAM:
                holders, others = self.ram, self.gpu
                if self.parts:
                    self._part(slot, key, ())
            else:
                return
            old = holders.get(key, 0)
            if not old >> slot & 1:
                return
            new = old ^ self._bits[slot]
            if new:
                holders[key] = self._share(new)
            else:
                del holders[key]
            both = new | others.get(key, 0)
        coming = self.coming.get(key)
        if both >> slot & 1 or (coming is not None and slot in coming):
            return
        self._counts[slot] -= 1
        if not both and coming is None:
            self._keys -= 1
            end = self._tails.pop(key, 0) if self._tails else 0
            if end:
                self.tail_ends[end] -= 1
                if not self.tail_ends[end]:
                    del self.tail_ends[end]

    def _arrived(self, slot: int, key: int) -> None:
        by_slot = self.coming[key]
        by_slot.pop(slot, None)
        if not by_slot:
            del self.coming[key]

    def _part(self, slot: int, key: int, groups: tuple[str, ...]) -> None:
        if groups:
            self.parts.setdefault(key, {})[slot] = frozenset(groups)
            return
        by_slot = self.parts.get(key)
        if by_slot is not None and by_slot.pop(slot, None) is not None and not by_slot:
            del self.parts[key]

    def _share(self, holders: int) -> int:
        if len(self._shared) >= _SHARED + len(self._bits):
            self._shared = {bit: bit for bit in self._bits}
        return self._shared.setdefault(holders, holders)
