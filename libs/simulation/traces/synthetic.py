"""A load of any size out of a recorded one: copies of it side by side, each with blocks of its own.

Eight workers' worth of the trace is one copy, as if each were a tenant; copies begin apart, and each starts over, with
new blocks, when its trace is through. Rows are made when they are asked for, so that a million of them take no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from libs.simulation.traces.recorded import Recorded

WORKERS = 8  # of one copy


class Copies(Sequence[Recorded]):
    """See the module. `rows`: one copy, its times scaled to the load wanted of WORKERS workers."""

    def __init__(self, rows: Sequence[Recorded], workers: int, count: int) -> None:
        self._rows, self._copies, self._count = rows, max(1, workers // WORKERS), count
        self._blocks = 1 + max(max(row.blocks) for row in rows)
        last = rows[-1].at_ms
        self._span = last + (last - rows[0].at_ms) / max(1, len(rows) - 1)
        # All copies' n-th rows come together, spread over the copies' shifts: ascending in time as a whole.
        self._order = self._merged()

    def _merged(self) -> list[tuple[float, int, int]]:
        """One round of all copies: when, copy, row."""
        found = [
            ((row.at_ms + self._span * copy / self._copies) % self._span, copy, number)
            for copy in range(self._copies)
            for number, row in enumerate(self._rows)
        ]
        return sorted(found)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Recorded: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Recorded]: ...
    def __getitem__(self, index: int | slice) -> Recorded | Sequence[Recorded]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        turn, place = divmod(index, len(self._order))
        at_ms, copy, number = self._order[place]
        row = self._rows[number]
        offset = (turn * self._copies + copy) * self._blocks
        return Recorded(
            at_ms + turn * self._span, row.input_tokens, row.output_tokens, tuple([b + offset for b in row.blocks])
        )
