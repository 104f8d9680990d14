"""The desired map: which endpoints there should be, as the source reads; taken once it holds still.

A map is taken when it was read equal ``map_stable_snapshots`` times and ``map_coalesce_s`` have passed since it first
differed: changes within that time are one change. A source that speaks only of changes counts as read again each
``map_coalesce_s`` it stays silent. A map that never holds still is taken as it stands after ``map_unsettled_s``.

An empty map is not taken while there are live writers (*a healthy writer outranks a missing endpoint*): a source that
has lost everything looks just like a cluster that has, and only one of them has writers that answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .knobs import PoolPolicy
from .model import Endpoint, EndpointKey


@dataclass(frozen=True)
class DesiredMap:
    """Endpoints in the order of their keys, and the source's revision. Build with ``of``."""

    endpoints: tuple[Endpoint, ...]
    revision: int
    hash: str

    @classmethod
    def of(cls, endpoints: Iterable[Endpoint], revision: int) -> DesiredMap:
        """Of one endpoint given twice the newer incarnation counts."""
        newest: dict[EndpointKey, Endpoint] = {}
        for endpoint in endpoints:
            known = newest.get(endpoint.key)
            if known is None or known.incarnation <= endpoint.incarnation:
                newest[endpoint.key] = endpoint
        ordered = tuple(newest[key] for key in sorted(newest))
        spelled = repr([(e.worker, e.address, e.family, e.cells, e.incarnation) for e in ordered])
        return cls(ordered, revision, hashlib.sha256(spelled.encode()).hexdigest())

    @cached_property
    def by_key(self) -> dict[EndpointKey, Endpoint]:
        """The same, to look up."""
        return {endpoint.key: endpoint for endpoint in self.endpoints}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A map that was read and not yet taken."""

    map: DesiredMap
    reads: int
    first_read: float
    last_read: float


class Desired:
    """The owner of what has been read and taken."""

    def __init__(self) -> None:
        self.taken: DesiredMap | None = None
        self.taken_at = 0.0
        self.read_at: float | None = None
        self.revision_read = 0
        self.candidate: Candidate | None = None
        self.unsettled_since: float | None = None
        self.empty_since: float | None = None
        """Since when an empty map is being refused."""

    def read(self, found: DesiredMap, now: float) -> None:
        """The source says this."""
        self.read_at, self.revision_read = now, found.revision
        if found.endpoints:
            self.empty_since = None
        if self.taken is not None and found.hash == self.taken.hash:
            self.candidate = self.unsettled_since = None
            return
        candidate = self.candidate
        if candidate is not None and candidate.map.hash == found.hash:
            self.candidate = Candidate(found, candidate.reads + 1, candidate.first_read, now)
        else:
            self.candidate = Candidate(found, 1, now, now)
        if self.unsettled_since is None:
            self.unsettled_since = now

    def settle(self, policy: PoolPolicy, live: bool, now: float) -> DesiredMap | None:
        """The newly taken map, if there is one now. ``live``: whether any writer is."""
        candidate = self.candidate
        if candidate is None or not self._settled(candidate, policy, now):
            return None
        if not candidate.map.endpoints and live and self.taken is not None:
            if self.empty_since is None:
                self.empty_since = now
            return None
        self.taken, self.taken_at = candidate.map, now
        self.candidate = self.unsettled_since = self.empty_since = None
        return self.taken

    def wake_at(self, policy: PoolPolicy) -> float | None:
        """When a silent source lets the candidate be taken."""
        candidate = self.candidate
        if candidate is None or self.empty_since is not None:
            return None
        more = max(1, policy.map_stable_snapshots - candidate.reads)
        return candidate.last_read + more * policy.map_coalesce_s

    def _settled(self, candidate: Candidate, policy: PoolPolicy, now: float) -> bool:
        if self.taken is None or not self.taken.endpoints:
            return True  # nothing to protect
        if self.unsettled_since is not None and now - self.unsettled_since >= policy.map_unsettled_s:
            return True
        # Compared as wake_at computes it, so that the wake-up is never a rounding too early.
        silent = 0
        while (
            silent < policy.map_stable_snapshots and now >= candidate.last_read + (silent + 1) * policy.map_coalesce_s
        ):
            silent += 1
        still = now >= candidate.first_read + policy.map_coalesce_s
        return still and candidate.reads + silent >= policy.map_stable_snapshots
