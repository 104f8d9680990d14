"""Requests that come one after another with a long prefix which this router has just had computed. Pure.

While it is being computed, who comes too is held or joins (`holding`). Who comes a moment later finds it in the pages
of one worker, and by time alone all of them would go there, however many. So for `herd_ms` after the prefix was first
sent to a worker each that comes is given a seat, and from `herd_least` of them on they are dealt: each to the worker
that has been given the fewest of them. A conversation that goes on where it was is never so many at once, and a prefix
that is long known is nobody's news.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from libs.continuation.chain import Node
from libs.controller.protocol import AssignmentId

_REMEMBERED = 4_096  # planned requests, and herds
_T = TypeVar("_T")


@dataclass(slots=True)
class _Herd:
    until_ms: float
    chain: frozenset[str]  # the chunks of the request that led, by their hashes
    seats: int = 0
    served: Counter[str] = field(default_factory=Counter)  # how many were sent to each worker


@dataclass(frozen=True, slots=True)
class Member:
    """One of a herd. `prefix`: the first chunk that was new, by its hash; `end`: of what it has in common with who led;
    `seat`: how many came before.
    """

    prefix: str
    end: int
    seat: int


class Herds:
    """Of one router."""

    def __init__(self, herd_ms: float) -> None:
        self._herd_ms = herd_ms
        self._herds: dict[str, _Herd] = {}
        self._members: dict[str, Member] = {}  # planned requests
        self._leads: dict[str, tuple[str, Sequence[Node]]] = {}  # requests that lead if they are booked
        self._sent: dict[str, tuple[_Herd, str]] = {}  # requests that are counted, and at which worker

    def __len__(self) -> int:
        return len(self._herds)

    def leads(self, request_id: str, prefix: str, chunks: Sequence[Node]) -> None:
        """If this request is booked, the prefix is being computed; `chunks`: all of its own."""
        self._leads[request_id] = prefix, chunks
        _bound(self._leads)

    def booked(self, assignment: AssignmentId, worker: str, now_ms: float) -> None:
        """It is on its way to the worker, and not to the one that had it before."""
        request_id = assignment.request_id
        prefix, chunks = self._leads.pop(request_id, ("", ()))
        if prefix and prefix not in self._herds:
            self._expire(now_ms)
            self._herds[prefix] = _Herd(now_ms + self._herd_ms, frozenset([chunk.hash for chunk in chunks]))
            _bound(self._herds)
        member = self._members.get(request_id)
        herd = self._herds.get(member.prefix if member is not None else prefix)
        if (sent := self._sent.pop(request_id, None)) is not None:
            sent[0].served[sent[1]] -= 1
            herd = herd or sent[0]
        if herd is not None:
            herd.served[worker] += 1
            self._sent[request_id] = (herd, worker)
            _bound(self._sent)

    def served(self, prefix: str) -> Mapping[str, int]:
        """How many of its herd were sent to each worker."""
        herd = self._herds.get(prefix)
        return {} if herd is None else herd.served

    def member(self, request_id: str, chunks: Sequence[Node], now_ms: float) -> Member | None:
        """Of the herd that one of these chunks belongs to. Planned again, a request keeps its seat."""
        self._expire(now_ms)
        prefix = next((chunk.hash for chunk in chunks if chunk.hash in self._herds), None)
        if prefix is None:
            return None
        known = self._members.get(request_id)
        if known is None or known.prefix != prefix:
            herd = self._herds[prefix]
            end = max([chunk.end for chunk in chunks if chunk.hash in herd.chain], default=0)
            known = self._members[request_id] = Member(prefix, end, herd.seats)
            herd.seats += 1
            _bound(self._members)
        return known

    def _expire(self, now_ms: float) -> None:
        """They began in the order in which they are kept."""
        while self._herds and (first := next(iter(self._herds.items())))[1].until_ms <= now_ms:
            del self._herds[first[0]]


def _bound(kept: dict[str, _T]) -> None:
    """The oldest goes first."""
    if len(kept) > _REMEMBERED:
        del kept[next(iter(kept))]
