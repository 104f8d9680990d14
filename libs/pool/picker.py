"""Candidates of each bind target, kept until the inventory changes, and who was taken last."""

from __future__ import annotations

from collections.abc import Sequence

from .inventory import Inventory, WriterRecord
from .knobs import PoolPolicy
from .model import Chance, Target, WorkerTarget, WriterId
from .selection import Work, order, tiers

_REMEMBERED = 4096


class Picker:
    """See the module."""

    def __init__(self) -> None:
        self._version = -1
        self._tiers: dict[Target, list[list[WriterRecord]]] = {}
        self._last: dict[Target, WriterId] = {}

    def order(
        self, inventory: Inventory, target: Target, policy: PoolPolicy, work: Work, chance: Chance
    ) -> list[WriterRecord]:
        """Writers that may take a bind, best first; none if there is no coverage."""
        if self._version != inventory.version:
            self._version = inventory.version
            self._tiers.clear()
        found = self._tiers.get(target)
        if found is None:
            found = self._tiers[target] = tiers(_candidates(inventory, target))
        return order(found, policy, work, chance, self._last.get(target, 0))

    def taken(self, target: Target, writer: WriterId) -> None:
        """This one took the bind."""
        if target not in self._last and len(self._last) >= _REMEMBERED:
            self._last.clear()
        self._last[target] = writer


def _candidates(inventory: Inventory, target: Target) -> Sequence[WriterRecord]:
    if not isinstance(target, WorkerTarget):
        return inventory.of_cell(target.cell)
    found = inventory.of_worker(target.worker)
    if not target.incarnation:
        return found
    # What a writer only assumes of its process may be wrong either way: the process itself will refuse.
    return [record for record in found if not record.learnt or record.incarnation == target.incarnation]
