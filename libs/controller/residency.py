"""The residency index: which worker holds which prefix boundary in device pages or host memory. Pure.

Inverted (hash -> worker -> tiers), so that a decision visits only the workers that hold something of the request's
chain. A boundary is advertised by its worker at its exact end and at every chunk end before it; a running prefill's
boundaries are advertised as INFLIGHT with an arrival time. What lies in host memory is advertised chunk by chunk, with
the layer groups there.
"""

from __future__ import annotations

from collections.abc import Mapping

from libs.controller.protocol import Gone, Heartbeat, Resident, Tier

Holding = dict[Tier, float]  # tier -> time of arrival on the router's clock (INFLIGHT), else 0


class ResidencyIndex:
    """See the module."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, Holding]] = {}
        self._held: dict[str, set[str]] = {}  # worker -> hashes
        self._parts: dict[tuple[str, str], frozenset[str]] = {}  # (worker, hash) -> groups, where not all are in memory

    def holders(self, name: str) -> Mapping[str, Holding]:
        """Workers that hold this boundary, and where."""
        return self._holders.get(name, {})

    def in_memory(self, worker: str, name: str, group: str) -> bool:
        """Whether the worker's host memory holds the object of one group of this chunk."""
        if Tier.RAM not in self._holders.get(name, {}).get(worker, {}):
            return False
        groups = self._parts.get((worker, name))
        return groups is None or group in groups

    def count(self, worker: str) -> int:
        """Boundaries known of a worker."""
        return len(self._held.get(worker, ()))

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, heartbeat: Heartbeat, now_ms: float, reset: bool) -> None:
        """Takes a heartbeat's changes; `reset` forgets the worker's earlier ones first (snapshot or gap)."""
        worker = heartbeat.worker
        if reset:
            self.forget(worker)
        # What went goes first: a boundary may leave a tier and come back within one heartbeat's interval.
        for gone in heartbeat.gone:
            self._remove(worker, gone)
        for resident in heartbeat.resident:
            self._add(worker, resident, now_ms)

    def forget(self, worker: str) -> None:
        """All of a worker's boundaries."""
        for name in self._held.pop(worker, ()):
            holders = self._holders[name]
            del holders[worker]
            self._parts.pop((worker, name), None)
            if not holders:
                del self._holders[name]

    def drop(self, worker: str, gone: Gone) -> None:
        """A boundary that proved not to be there."""
        self._remove(worker, gone)

    def _add(self, worker: str, resident: Resident, now_ms: float) -> None:
        holding = self._holders.setdefault(resident.hash, {}).setdefault(worker, {})
        self._held.setdefault(worker, set()).add(resident.hash)
        if resident.tier is Tier.GPU:
            holding.pop(Tier.INFLIGHT, None)  # it has arrived
        arrival = now_ms + resident.arrival_ms if resident.tier is Tier.INFLIGHT else 0.0
        holding[resident.tier] = arrival
        if resident.tier is Tier.RAM:
            self._parts.pop((worker, resident.hash), None)
            if resident.groups:
                self._parts[worker, resident.hash] = frozenset(resident.groups)

    def _remove(self, worker: str, gone: Gone) -> None:
        holders = self._holders.get(gone.hash)
        holding = holders.get(worker) if holders else None
        if holders is None or holding is None:
            return
        holding.pop(gone.tier, None)
        if gone.tier is Tier.RAM:
            self._parts.pop((worker, gone.hash), None)
        if not holding:
            del holders[worker]
            self._held[worker].discard(gone.hash)
            if not holders:
                del self._holders[gone.hash]
