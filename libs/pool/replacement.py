"""Replacement: one writer's successor is prepared while it goes on serving. ``Open -> Preparing -> Retiring``.

A life of its own beside the contour. Preparing keeps a second preparation out and nothing else: the victim takes binds.
The commit, under the binding lock, moves the victim to Retiring before the successor is registered, so at no moment
do both count and at no moment does neither. A reservation that is dropped before restores Open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

from .model import PoolBugError, WriterId


class Phase(Enum):
    """Of a writer's replacement; Open is not stored."""

    OPEN = "open"
    PREPARING = "preparing"
    RETIRING = "retiring"


@dataclass(slots=True)
class ReplacementCounts:
    """Monotonic."""

    prepared: int = 0
    committed: int = 0
    restored: int = 0


class Replacements:
    """The owner of every writer's phase."""

    def __init__(self) -> None:
        self.counts = ReplacementCounts()
        self._phases: dict[WriterId, Phase] = {}
        self._successors: dict[WriterId, WriterId] = {}  # successor -> victim, while preparing

    def phase(self, victim: WriterId) -> Phase:
        """Where it is."""
        return self._phases.get(victim, Phase.OPEN)

    def phases(self) -> Mapping[WriterId, Phase]:
        """Of all that are not Open."""
        return self._phases

    def reserve(self, victim: WriterId, successor: WriterId) -> None:
        """Open -> Preparing. Raises PoolBugError if it is being replaced already."""
        if self.phase(victim) is not Phase.OPEN:
            raise PoolBugError(f"writer {victim} is {self.phase(victim).value} and cannot be reserved again")
        self._phases[victim] = Phase.PREPARING
        self._successors[successor] = victim
        self.counts.prepared += 1

    def commit(self, successor: WriterId) -> WriterId | None:
        """Preparing -> Retiring; the victim, or None if the reservation is no more (its victim is gone)."""
        victim = self._successors.pop(successor, None)
        if victim is None:
            return None
        self._phases[victim] = Phase.RETIRING
        self.counts.committed += 1
        return victim

    def release(self, successor: WriterId) -> None:
        """Preparing -> Open; nothing once committed or released."""
        victim = self._successors.pop(successor, None)
        if victim is not None:
            del self._phases[victim]
            self.counts.restored += 1

    def gone(self, writer: WriterId) -> None:
        """The writer has left the inventory; a preparation of its successor is no more."""
        if self._phases.pop(writer, None) is Phase.PREPARING:
            for successor in [s for s, victim in self._successors.items() if victim == writer]:
                del self._successors[successor]

    def __iter__(self) -> Iterator[tuple[WriterId, WriterId]]:
        """(successor, victim) of each preparation."""
        return iter(tuple(self._successors.items()))

    def check(self) -> None:
        """Raises PoolBugError."""
        preparing = sorted(victim for victim, phase in self._phases.items() if phase is Phase.PREPARING)
        if preparing != sorted(self._successors.values()):
            raise PoolBugError(f"preparing {preparing}, reserved {sorted(self._successors.values())}")


class Reservation:
    """What a dial that replaces a writer holds: leaving the block without a commit restores the victim."""

    def __init__(self, replacements: Replacements, successor: WriterId) -> None:
        self._replacements = replacements
        self._successor = successor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replacements.release(self._successor)
