"""The bounded queue of requests that wait for capacity: streams first, then weighted fair by tenant, priority, arrival.

Requests whose stream has already begun (their worker was lost) come before all others and are not bounded here: their
number is bounded by what was admitted. Among the rest, start-time fair queueing: a tenant's virtual time advances by
cost / weight when one of its requests leaves the queue for a worker; the tenant with the least virtual time is next,
and within it the largest priority, then the earliest arrival. A tenant that was absent starts at the virtual time of
the last one served, so that idling saves up no credit. Cost is the request's tokens (prompt and budget), so that shares
are of work and not of requests.

A waiter that is *taken* may come back (`restore`) if its plan found no room: refunded, and in its old place.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from enum import Enum


class Refusal(Enum):
    """Which bound refused a waiter."""

    QUEUE = "queue"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True, order=True)
class Waiter:
    """Ordered within its tenant; `key` identifies it."""

    negative_priority: int
    arrival: int
    key: str
    tenant: str = field(compare=False)
    cost: float = field(compare=False)
    streaming: bool = field(compare=False, default=False)


@dataclass(slots=True)
class _Tenant:
    virtual: float
    waiters: list[Waiter] = field(default_factory=list)


class FairQueue:
    """See the module."""

    def __init__(self, bound: int, tenant_bound: int, weights: dict[str, float] | None = None) -> None:
        self._bound = bound
        self._tenant_bound = tenant_bound
        self._weights = weights or {}
        self._streams: list[Waiter] = []
        self._tenants: dict[str, _Tenant] = {}
        self._by_key: dict[str, Waiter] = {}
        self._bounded = 0
        self._virtual = 0.0  # of the last tenant served
        self._idle: dict[str, float] = {}  # virtual times ahead of the last one served, of tenants without waiters

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def tenant_length(self, tenant: str) -> int:
        """Waiters of a tenant, streams apart."""
        entry = self._tenants.get(tenant)
        return len(entry.waiters) if entry else 0

    def add(self, waiter: Waiter) -> Refusal | None:
        """Queues it, or says which bound forbids it."""
        if not waiter.streaming:
            if self._bounded >= self._bound:
                return Refusal.QUEUE
            if self.tenant_length(waiter.tenant) >= self._tenant_bound:
                return Refusal.TENANT
        self._insert(waiter)
        return None

    def restore(self, waiter: Waiter) -> None:
        """Puts back one that `take` gave out, in its old place, whatever the bounds."""
        self._insert(waiter)
        if not waiter.streaming:
            self._tenants[waiter.tenant].virtual -= waiter.cost / self._weight(waiter.tenant)

    def take(self, skip: set[str]) -> Waiter | None:
        """The next waiter whose key is not in `skip`, charged to its tenant."""
        for waiter in self._streams:
            if waiter.key not in skip:
                self._remove(waiter)
                return waiter
        best: tuple[float, str] | None = None
        chosen: Waiter | None = None
        for name, tenant in self._tenants.items():
            rank = (tenant.virtual, name)
            if best is not None and rank >= best:
                continue
            first = next((waiter for waiter in tenant.waiters if waiter.key not in skip), None)
            if first is not None:
                best, chosen = rank, first
        if chosen is None or best is None:
            return None
        self._virtual = max(self._virtual, best[0])
        self._tenants[chosen.tenant].virtual += chosen.cost / self._weight(chosen.tenant)
        self._remove(chosen)
        return chosen

    def discard(self, key: str) -> None:
        """Forgets a waiter that ended by itself (deadline, cancel): nothing is charged."""
        waiter = self._by_key.get(key)
        if waiter is not None:
            self._remove(waiter)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _insert(self, waiter: Waiter) -> None:
        self._by_key[waiter.key] = waiter
        if waiter.streaming:
            insort(self._streams, waiter)
            return
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None:
            virtual = max(self._idle.pop(waiter.tenant, 0.0), self._virtual)
            tenant = self._tenants[waiter.tenant] = _Tenant(virtual)
        insort(tenant.waiters, waiter)
        self._bounded += 1

    def _remove(self, waiter: Waiter) -> None:
        del self._by_key[waiter.key]
        if waiter.streaming:
            self._streams.remove(waiter)
            return
        tenant = self._tenants[waiter.tenant]
        tenant.waiters.remove(waiter)
        self._bounded -= 1
        if not tenant.waiters:
            del self._tenants[waiter.tenant]
            self._idle = {name: virtual for name, virtual in self._idle.items() if virtual > self._virtual}
            if tenant.virtual > self._virtual:
                self._idle[waiter.tenant] = tenant.virtual
