"""What the pool is about: endpoints, the cells they serve, and the names of things. Immutable values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

T = TypeVar("T")

# A model fingerprint in a zone, as the pool's user spells it: the unit that must stay covered. Opaque here.
Cell = str
# "ipv4" or "ipv6": which way an endpoint is reached.
Family = str
# Given to a tunnel when its dial is asked for; never used again in this process.
WriterId = int


@dataclass(frozen=True, slots=True, order=True)
class EndpointKey:
    """What tells endpoints apart: a worker may be reached at several addresses."""

    worker: str
    address: str


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """A cell-family: the part of a cell that is reached one way."""

    cell: Cell
    family: Family


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker's tunnel address and the cells it serves: one for each of its models.

    ``incarnation`` grows with each new process behind the address; 0 = not known. ``family`` may be left empty: it is
    then read off the address. ``groups``: the cell-families it belongs to.
    """

    worker: str
    address: str
    cells: tuple[Cell, ...] = ()
    incarnation: int = 0
    family: Family = ""
    key: EndpointKey = field(init=False, repr=False, compare=False)
    groups: tuple[Group, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.worker or not self.address:
            raise ValueError(f"an endpoint needs a worker and an address: {self}")
        object.__setattr__(self, "cells", tuple(sorted(set(self.cells))))
        if not self.family:
            object.__setattr__(self, "family", "ipv6" if self.address.startswith("[") else "ipv4")
        object.__setattr__(self, "key", EndpointKey(self.worker, self.address))
        object.__setattr__(self, "groups", tuple(Group(cell, self.family) for cell in self.cells))


class Chance(Protocol):
    """A source of chance: ``random.Random`` is one. Handed in, so that what the pool decides can be replayed."""

    def uniform(self, a: float, b: float, /) -> float: ...

    def sample(self, population: Sequence[T], k: int) -> list[T]: ...


@dataclass(frozen=True, slots=True)
class WorkerTarget:
    """Bind to this worker, over whichever of its tunnels: the policy has chosen it.

    ``incarnation``: only tunnels that may lead to that process; 0 = any.
    """

    worker: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class CellTarget:
    """Bind to any worker of this cell."""

    cell: Cell


Target = WorkerTarget | CellTarget


class PoolBugError(Exception):
    """The pool's own books do not agree: a bug of the core or of its shell, never of the outside."""
