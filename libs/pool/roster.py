"""The endpoints in effect: those of the taken map, and those that left it without a drain and still have their grace.

An endpoint that vanished keeps its writers, and is redialled, for ``vanish_grace_s``: an outage of the source and its
recovery close nothing. One that was drained (by an operator, or by its worker's orderly goodbye) goes at once, and a
drained one that is still listed is not dialled until its worker comes back as a new process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .desired import DesiredMap
from .knobs import PoolPolicy
from .model import Endpoint, EndpointKey, PoolBugError


@dataclass(frozen=True, slots=True)
class Entry:
    """One endpoint in effect."""

    endpoint: Endpoint
    vanished_at: float | None = None  # None while listed
    drained: bool = False
    leaving: bool = False  # its worker said goodbye

    @property
    def listed(self) -> bool:
        """In the taken map."""
        return self.vanished_at is None


@dataclass(frozen=True, slots=True)
class Changes:
    """What a newly taken map changed."""

    added: tuple[Endpoint, ...] = ()
    altered: tuple[Endpoint, ...] = ()  # other cells, or a new incarnation
    renewed: tuple[EndpointKey, ...] = ()  # of them: a new incarnation
    returned: tuple[EndpointKey, ...] = ()
    vanished: tuple[EndpointKey, ...] = ()
    gone: tuple[EndpointKey, ...] = ()


class Roster:
    """The owner of the entries. Iteration is in the order of keys."""

    def __init__(self) -> None:
        self._entries: dict[EndpointKey, Entry] = {}
        # Entries in order, and the two selections of them, until the next change.
        self._views: tuple[tuple[Entry, ...], tuple[Endpoint, ...], tuple[Endpoint, ...]] | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._viewed()[0])

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: EndpointKey) -> Entry | None:
        """None if it is not in effect."""
        return self._entries.get(key)

    def dialable(self) -> tuple[Endpoint, ...]:
        """Endpoints that should have writers, in the order of their keys."""
        return self._viewed()[1]

    def listed(self) -> tuple[Endpoint, ...]:
        """Of them, those in the taken map."""
        return self._viewed()[2]

    def apply(self, taken: DesiredMap, now: float) -> Changes:
        """A map was taken."""
        self._views = None
        added, altered, renewed, returned, vanished, gone = [], [], [], [], [], []
        for key, endpoint in taken.by_key.items():
            entry = self._entries.get(key)
            if entry is None:
                added.append(endpoint)
                self._entries[key] = Entry(endpoint)
                continue
            if not entry.listed:
                returned.append(key)
            if entry.endpoint != endpoint:
                altered.append(endpoint)
            new = entry.endpoint.incarnation < endpoint.incarnation
            if new:
                renewed.append(key)
            self._entries[key] = Entry(
                endpoint, drained=entry.drained and not new, leaving=entry.leaving and entry.listed and not new
            )
        for key, entry in sorted(self._entries.items()):
            if key in taken.by_key:
                continue
            if entry.drained or entry.leaving:
                gone.append(key)
                del self._entries[key]
            elif entry.listed:
                vanished.append(key)
                self._entries[key] = replace(entry, vanished_at=now)
        return Changes(*map(tuple, (added, altered, renewed, returned, vanished, gone)))  # type: ignore[arg-type]

    def drain(self, key: EndpointKey, drained: bool) -> None:
        """The operator's word on a listed endpoint; also lets one that vanished go at once."""
        self._views = None
        entry = self._entries.get(key)
        if entry is None:
            return
        if drained and not entry.listed:
            del self._entries[key]
        else:
            self._entries[key] = replace(entry, drained=drained)

    def goodbye(self, key: EndpointKey) -> bool:
        """Its worker leaves in order: it goes with the map that lacks it, at once if that has come. Whether it did."""
        self._views = None
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.listed:
            self._entries[key] = replace(entry, leaving=True)
            return False
        del self._entries[key]
        return True

    def reached(self, key: EndpointKey) -> None:
        """Its worker answers (again)."""
        self._views = None
        entry = self._entries.get(key)
        if entry is not None and entry.leaving:
            self._entries[key] = replace(entry, leaving=False)

    def overdue(self, policy: PoolPolicy, now: float) -> list[EndpointKey]:
        """Vanished endpoints whose grace is over, who vanished first first."""
        over = [
            (entry.vanished_at, entry.endpoint.key)
            for entry in self
            if entry.vanished_at is not None and now - entry.vanished_at >= policy.vanish_grace_s
        ]
        return [key for _, key in sorted(over)]

    def lapse(self, key: EndpointKey) -> None:
        """A vanished endpoint goes."""
        self._views = None
        if self._entries.pop(key).listed:
            raise PoolBugError(f"endpoint {key} is listed and cannot lapse")

    def check(self) -> None:
        """Raises PoolBugError."""
        for key, entry in self._entries.items():
            if entry.endpoint.key != key:
                raise PoolBugError(f"endpoint {entry.endpoint.key} is listed under {key}")
            if entry.drained and not entry.listed:
                raise PoolBugError(f"endpoint {key} was drained and has left the map, but is in effect")

    def _viewed(self) -> tuple[tuple[Entry, ...], tuple[Endpoint, ...], tuple[Endpoint, ...]]:
        if self._views is None:
            entries = tuple(self._entries[key] for key in sorted(self._entries))
            self._views = (
                entries,
                tuple(entry.endpoint for entry in entries if not entry.drained),
                tuple(entry.endpoint for entry in entries if entry.listed and not entry.drained),
            )
        return self._views
