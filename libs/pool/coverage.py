"""Coverage: how many serving writers each cell, cell-family and endpoint has. Pure functions over records.

An endpoint that serves several models counts in each of their cells. A cell can spare a writer if, without it, it still
has its minimum; a cell that is below its minimum already spares nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from .inventory import WriterRecord
from .model import Cell, Endpoint, EndpointKey, Group


@dataclass(slots=True)
class Cover:
    """Counts of serving writers."""

    cells: Counter[Cell] = field(default_factory=Counter)
    groups: Counter[Group] = field(default_factory=Counter)
    endpoints: Counter[EndpointKey] = field(default_factory=Counter)

    def add(self, record: WriterRecord, change: int = 1) -> None:
        """Count one more, or one less."""
        self.endpoints[record.key] += change
        for group in record.endpoint.groups:
            self.groups[group] += change
            self.cells[group.cell] += change

    def spares(self, records: Iterable[WriterRecord], wanted: Collection[Cell], minimum: int) -> bool:
        """Whether no wanted cell would fall below its minimum, or further below it, without these records."""
        return not self.short_without(records, wanted, minimum)

    def short_without(self, records: Iterable[WriterRecord], wanted: Collection[Cell], minimum: int) -> frozenset[Cell]:
        """The wanted cells that would."""
        less = Counter(cell for record in records if record.serving for cell in record.endpoint.cells)
        return frozenset(cell for cell, count in less.items() if cell in wanted and self.cells[cell] - count < minimum)


def serving(record: WriterRecord) -> bool:
    """See WriterRecord.serving."""
    return record.serving


def cover(records: Iterable[WriterRecord], counts: Callable[[WriterRecord], bool] = serving) -> Cover:
    """The coverage by those records that count."""
    found = Cover()
    for record in records:
        if counts(record):
            found.add(record)
    return found


def cells_of(endpoints: Iterable[Endpoint]) -> frozenset[Cell]:
    """All cells of these endpoints."""
    return frozenset(cell for endpoint in endpoints for cell in endpoint.cells)


def groups_of(endpoints: Iterable[Endpoint]) -> frozenset[Group]:
    """All cell-families of these endpoints."""
    return frozenset(group for endpoint in endpoints for group in endpoint.groups)


def sole_endpoints(endpoints: Collection[Endpoint]) -> frozenset[EndpointKey]:
    """Endpoints that are the only one of a cell."""
    by_cell: dict[Cell, list[EndpointKey]] = {}
    for endpoint in endpoints:
        for cell in endpoint.cells:
            by_cell.setdefault(cell, []).append(endpoint.key)
    return frozenset(keys[0] for keys in by_cell.values() if len(keys) == 1)
