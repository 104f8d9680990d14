"""Refill: the dials under way and what each endpoint's dials have come to. Closes the gap between floor and inventory.

An endpoint that fails is retried fast, then ever more slowly, then quarantined; one whose tunnels break young (flaps)
is quarantined too. The only endpoint of a cell, and every endpoint of a cell that has nothing left, is in *outage mode*
instead: short pauses, no quarantine. While an endpoint fails it is dialled once at a time, and other endpoints of its
cell stand in (``floor.stand_in``). Never more than ``dials_per_cell`` dials are under way in one cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .backoff import pause_s
from .knobs import PoolPolicy
from .model import Cell, Chance, Endpoint, EndpointKey, PoolBugError, WriterId


@dataclass(frozen=True, slots=True)
class Attempt:
    """A dial under way. ``generation``: the one its writer may publish into; ``replaces``: the writer it succeeds."""

    writer: WriterId
    endpoint: Endpoint
    generation: int
    started: float
    replaces: WriterId | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """A dial that should be made."""

    endpoint: Endpoint
    generation: int
    replaces: WriterId | None = None


@dataclass(slots=True)
class Record:
    """What an endpoint's dials have come to."""

    failures: int = 0  # in a row
    flaps: int = 0  # in a row
    last_flap: float = float("-inf")
    next_at: float = float("-inf")
    failed_at: float = float("-inf")  # the last failed dial or broken writer
    quarantined_until: float | None = None


@dataclass(slots=True)
class RefillCounts:
    """Monotonic."""

    dials: int = 0
    failures: int = 0
    abandoned: int = 0
    stale: int = 0  # connected, but for a generation or an endpoint that is no more
    flaps: int = 0
    quarantines: int = 0


class Refill:
    """The owner of attempts and records."""

    def __init__(self) -> None:
        self.attempts: dict[WriterId, Attempt] = {}
        self.counts = RefillCounts()
        self._by_endpoint: dict[EndpointKey, dict[WriterId, Attempt]] = {}
        self._records: dict[EndpointKey, Record] = {}
        self._last_writer = 0

    def begin(self, need: Need, now: float) -> Attempt:
        """Give a number to a dial that is to be made."""
        self._last_writer += 1
        attempt = Attempt(self._last_writer, need.endpoint, need.generation, now, need.replaces)
        self.attempts[attempt.writer] = attempt
        self._by_endpoint.setdefault(need.endpoint.key, {})[attempt.writer] = attempt
        self.counts.dials += 1
        return attempt

    def end(self, writer: WriterId) -> Attempt | None:
        """The dial is over, whatever came of it; None if it was over already."""
        attempt = self.attempts.pop(writer, None)
        if attempt is not None:
            siblings = self._by_endpoint[attempt.endpoint.key]
            del siblings[writer]
            if not siblings:
                del self._by_endpoint[attempt.endpoint.key]
        return attempt

    def connected(self, key: EndpointKey) -> None:
        """A dial of this endpoint succeeded."""
        record = self._record(key)
        record.failures, record.next_at, record.quarantined_until = 0, float("-inf"), None

    def failed(self, key: EndpointKey, policy: PoolPolicy, outage: bool, chance: Chance, now: float) -> bool:
        """A dial of this endpoint did not; whether that put it in quarantine."""
        self.counts.failures += 1
        record = self._record(key)
        record.failures += 1
        record.failed_at = now
        record.next_at = now + pause_s(policy, record.failures, outage, chance)
        if outage or record.failures < policy.quarantine_failures:
            return False
        return self._quarantine(record, policy, now)

    def broke(
        self, key: EndpointKey, opened_at: float, policy: PoolPolicy, outage: bool, chance: Chance, now: float
    ) -> bool:
        """A writer of this endpoint was lost, not closed; whether that put the endpoint in quarantine.

        Writers that broke together are one flap: only one opened since the last flap can be another.
        """
        record = self._record(key)
        record.failed_at = now
        record.next_at = max(record.next_at, now + chance.uniform(0.0, policy.fast_retry_s))
        if now - opened_at >= policy.flap_s:
            record.flaps = 0
            return False
        if opened_at < record.last_flap:
            return False
        self.counts.flaps += 1
        record.flaps += 1
        record.last_flap = now
        if outage:
            record.next_at = max(
                record.next_at, now + pause_s(policy, policy.fast_retries + record.flaps, True, chance)
            )
            return False
        return record.flaps >= policy.flap_limit and self._quarantine(record, policy, now)

    def left(self, key: EndpointKey, policy: PoolPolicy, now: float) -> None:
        """Its worker said goodbye: it may answer for a moment still, and a tunnel made then would be lost at once."""
        record = self._record(key)
        record.failed_at = now
        record.next_at = max(record.next_at, now + policy.reconnect_min_s)

    def renew(self, key: EndpointKey) -> None:
        """A new process, a return to the map, a probe that succeeded: what was does not count any more."""
        self._records.pop(key, None)

    def quarantined(self, key: EndpointKey, now: float) -> bool:
        """Whether the endpoint rests."""
        record = self._records.get(key)
        return record is not None and record.quarantined_until is not None and now < record.quarantined_until

    def failing(self, key: EndpointKey, policy: PoolPolicy, now: float) -> bool:
        """Whether others should stand in for it."""
        record = self._records.get(key)
        return record is not None and (record.failures > policy.fast_retries or self.quarantined(key, now))

    def blocked_until(self, key: EndpointKey, outage: PoolPolicy | None = None) -> float:
        """When it may be dialled next; ``outage``: the policy, if it is in outage mode by now."""
        record = self._records.get(key)
        if record is None:
            return float("-inf")
        if outage is not None:
            return min(record.next_at, record.failed_at + outage.outage_reconnect_max_s)
        return max(record.next_at, record.quarantined_until or float("-inf"))

    def failures(self, key: EndpointKey) -> int:
        """Dials in a row that failed."""
        record = self._records.get(key)
        return record.failures if record is not None else 0

    def of_endpoint(self, key: EndpointKey) -> list[Attempt]:
        """Dials of it under way."""
        return list(self._by_endpoint.get(key, {}).values())

    def allowed(
        self, needs: Sequence[Need], policy: PoolPolicy, now: float, outage: Collection[EndpointKey] = ()
    ) -> tuple[list[Need], float | None]:
        """The needs that may be dialled now, in the order given, and when the next of the others may be.

        ``outage``: endpoints that are in outage mode, whatever they were when they failed last.
        What waits only for one of the dials under way to end needs no time: its end is an event.
        """
        busy: Counter[Cell] = Counter(cell for a in self.attempts.values() for cell in a.endpoint.cells)
        under_way: Counter[EndpointKey] = Counter(attempt.endpoint.key for attempt in self.attempts.values())
        chosen: list[Need] = []
        wake_at: float | None = None
        for need in needs:
            key, cells = need.endpoint.key, need.endpoint.cells
            until = self.blocked_until(key, policy if key in outage else None)
            if now < until:
                wake_at = until if wake_at is None else min(wake_at, until)
                continue
            if any(busy[cell] >= policy.dials_per_cell for cell in cells):
                continue
            if under_way[key] and self.failures(key):
                continue
            busy.update(cells)
            under_way[key] += 1
            chosen.append(need)
        return chosen, wake_at

    def forget(self, keys: Iterable[EndpointKey]) -> None:
        """Endpoints that are gone for good."""
        for key in keys:
            self._records.pop(key, None)

    def check(self) -> None:
        """Raises PoolBugError."""
        for writer, attempt in self.attempts.items():
            if writer != attempt.writer or writer > self._last_writer:
                raise PoolBugError(f"dial {attempt.writer} is listed as {writer} of {self._last_writer}")
        listed = {writer for attempts in self._by_endpoint.values() for writer in attempts}
        if listed != set(self.attempts):
            raise PoolBugError(f"dials {sorted(self.attempts)} are under way, {sorted(listed)} listed by endpoint")

    def _record(self, key: EndpointKey) -> Record:
        return self._records.setdefault(key, Record())

    def _quarantine(self, record: Record, policy: PoolPolicy, now: float) -> bool:
        record.quarantined_until = now + policy.quarantine_s
        record.flaps = 0
        self.counts.quarantines += 1
        return True
