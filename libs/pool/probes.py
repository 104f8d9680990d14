"""Probes: now and then, dial and ping an endpoint that nobody uses (quarantined, or with a floor of none).

A probe that succeeds ends the quarantine; one that fails changes nothing, so probing never makes an outage longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from .knobs import PoolPolicy
from .model import EndpointKey


class Probes:
    """The owner of when each endpoint was probed last, and which probes are under way."""

    def __init__(self) -> None:
        self.under_way: set[EndpointKey] = set()
        self.done = 0
        self.failed = 0
        self._last: dict[EndpointKey, float] = {}

    def due(self, policy: PoolPolicy, unused: Iterable[EndpointKey], now: float) -> list[EndpointKey]:
        """Endpoints to probe now, of those unused; they count as under way from here on.

        The first probe comes an interval after the endpoint fell out of use.
        """
        unused = list(unused)
        for key in [key for key in self._last if key not in unused and key not in self.under_way]:
            del self._last[key]
        if not policy.probes:
            return []
        due = []
        for key in unused:
            since = self._last.setdefault(key, now)
            if now - since >= policy.probe_interval_s and key not in self.under_way:
                self._last[key] = now
                self.under_way.add(key)
                due.append(key)
        return due

    def ended(self, key: EndpointKey, succeeded: bool) -> None:
        """A probe is over."""
        if key in self.under_way:
            self.under_way.discard(key)
            self.done += 1
            self.failed += not succeeded
