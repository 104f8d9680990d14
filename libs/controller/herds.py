"""Requests under way that share a long prefix which this router has just had computed. Pure.

While it is being computed, who comes too is held or joins (`holding`). Who comes a moment later finds it in the pages
of one worker, and by time alone all of them would go there, however many. So from `herd_least` of them on, for
`herd_ms` after the prefix was first sent to a worker, more of them are dealt in turn, as those that were held are. A
conversation that goes on where it was is never many at once, and a prefix that is long known is nobody's news.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from libs.controller.protocol import AssignmentId

_REMEMBERED = 4_096  # planned requests, and herds
_T = TypeVar("_T")


@dataclass(slots=True)
class _Herd:
    until_ms: float
    seats: int = 0
    active: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One of a herd. `prefix`: the first chunk that was new, by its hash; `others`: that are under way."""

    prefix: str
    seat: int
    others: int


class Herds:
    """Of one router."""

    def __init__(self, herd_ms: float) -> None:
        self._herd_ms = herd_ms
        self._herds: dict[str, _Herd] = {}
        self._seats: dict[str, tuple[str, int]] = {}  # planned requests: herd and seat
        self._leads: dict[str, str] = {}  # requests that would lead, if they are booked
        self._active: dict[AssignmentId, _Herd] = {}

    def __len__(self) -> int:
        return len(self._herds)

    def leads(self, request_id: str, prefix: str) -> None:
        """If this request is booked, the prefix is being computed."""
        self._leads[request_id] = prefix
        _bound(self._leads)

    def member(self, request_id: str, hashes: Iterable[str], now_ms: float) -> Member | None:
        """Of the herd that one of these chunks belongs to."""
        for prefix in hashes:
            herd = self._herds.get(prefix)
            if herd is None:
                continue
            if herd.until_ms <= now_ms:
                del self._herds[prefix]
                continue
            known = self._seats.get(request_id)
            if known is None or known[0] != prefix:
                known = self._seats[request_id] = (prefix, herd.seats)
                herd.seats += 1
                _bound(self._seats)
            return Member(prefix, known[1], herd.active)
        return None

    def booked(self, assignment: AssignmentId, now_ms: float) -> None:
        """It is on its way to a worker."""
        prefix = self._leads.pop(assignment.request_id, None)
        if prefix is not None and prefix not in self._herds:
            self._herds[prefix] = _Herd(now_ms + self._herd_ms)
            _bound(self._herds)
        known = self._seats.get(assignment.request_id)
        herd = self._herds.get(prefix or (known[0] if known else ""))
        if herd is not None:
            herd.active += 1
            self._active[assignment] = herd

    def unbooked(self, assignment: AssignmentId) -> None:
        """It is over."""
        herd = self._active.pop(assignment, None)
        if herd is not None:
            herd.active -= 1


def _bound(kept: dict[str, _T]) -> None:
    """The oldest goes first."""
    if len(kept) > _REMEMBERED:
        del kept[next(iter(kept))]
