"""Where a simulated worker's blocks lie: three tiers, each least recently used first out, each a part of the one below.

What is computed or restored enters every tier of the worker; what leaves one stays in the one below. A block that is
used is used in every tier that holds it. Within one use the end of a prompt is the older: it leaves before what it
follows. Capacity is counted in blocks that may be reused; pages of running requests are not counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from libs.simulation.traces.costs import Costs


class Local(IntEnum):
    """A worker's own tiers."""

    DEVICE = 0
    RAM = 1
    SSD = 2


@dataclass(frozen=True, slots=True)
class Changes:
    """Blocks that a tier has since it was last looked at, and those that it has no more."""

    entered: tuple[int, ...] = ()
    left: tuple[int, ...] = ()


UNCHANGED = Changes()


class Directory:
    """Who holds which block, of all workers, now: block -> bits of workers, by tier; the object store's by time."""

    def __init__(self) -> None:
        self.holders: tuple[dict[int, int], dict[int, int], dict[int, int]] = ({}, {}, {})
        self.stored: dict[int, float] = {}  # block -> when it is there
        self.computed: set[int] = set()  # blocks that were ever computed

    def set(self, tier: Local, block: int, bit: int) -> None:
        """A worker has it now."""
        holders = self.holders[tier]
        holders[block] = holders.get(block, 0) | bit

    def clear(self, tier: Local, block: int, bit: int) -> None:
        """It has it no more."""
        holders = self.holders[tier]
        left = holders[block] & ~bit
        if left:
            holders[block] = left
        else:
            del holders[block]


class Tiers:
    """One worker's. `changed`: what entered or left which tier since it was last emptied. `directory` None: nobody asks
    who holds what.
    """

    def __init__(self, worker: int, costs: Costs, directory: Directory | None) -> None:
        self._bit = 1 << worker
        self._directory = directory
        self._held: tuple[dict[int, object], ...] = ({}, {}, {})  # least recently used first
        self._capacity = (costs.device_blocks, costs.ram_blocks, costs.ssd_blocks)
        self.changed: tuple[dict[int, object], ...] = ({}, {}, {})

    def has(self, tier: Local, block: int) -> bool:
        """Whether the tier holds it."""
        return block in self._held[tier]

    def prefix(self, blocks: Sequence[int], tier: Local = Local.DEVICE) -> int:
        """How many of a prompt's first blocks the tier holds without a gap."""
        held = self._held[tier]
        count = 0
        for block in blocks:
            if block not in held:
                break
            count += 1
        return count

    def use(self, blocks: Sequence[int]) -> None:
        """A prompt's first blocks are read or written: they are in every tier now, the first one the newest."""
        order = dict.fromkeys(reversed(blocks))
        for tier, held, changed, capacity in zip(Local, self._held, self.changed, self._capacity, strict=True):
            fresh = [block for block in order if held.pop(block, self) is self]
            held.update(order)
            over = len(held) - capacity
            gone = list(islice(held, over)) if over > 0 else []
            for block in gone:
                del held[block]
            changed.update(dict.fromkeys(fresh))
            changed.update(dict.fromkeys(gone))
            if self._directory is not None:
                for block in fresh:
                    self._directory.set(tier, block, self._bit)
                for block in gone:
                    self._directory.clear(tier, block, self._bit)

    def drain(self, tier: Local) -> Changes:
        """What changed since the last call."""
        changed, held = self.changed[tier], self._held[tier]
        entered: list[int] = []
        left: list[int] = []
        for block in changed:
            if block in held:
                entered.append(block)
            else:
                left.append(block)
        changed.clear()
        return Changes(tuple(entered), tuple(left))
