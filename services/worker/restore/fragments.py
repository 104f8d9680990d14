"""How an object is cut into pipeline steps: pure arithmetic over rows, pages and bytes.

A *piece* is a run of rows of one tensor and the pages they go to; a *fragment* is a list of pieces of at most
`fragment_bytes`, so that a step costs about the same however many layers a model has and however large its chunks are.
A row larger than a fragment is a piece of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from libs.continuation.layout import LayerGroup
from services.worker.handlers import GroupPages


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [row, row + rows) of tensor `kind.layer` go to `pages`, from slot `slot` of the first one on."""

    kind: str
    layer: int
    row: int
    rows: int
    pages: tuple[int, ...]
    slot: int
    nbytes: int

    @property
    def tensor(self) -> str:
        """Its name in the object."""
        return f"{self.kind}.{self.layer}"


Fragment = tuple[Piece, ...]


def fragments(
    group: LayerGroup, object_start: int, fill: GroupPages, page_size: int, fragment_bytes: int
) -> Iterator[Fragment]:
    """The fragments that bring positions [fill.start, fill.end) of an object that begins at `object_start`.

    Raises ValueError where the pages do not hold the fill.
    """
    if (
        fill.start % page_size
        or fill.start < object_start
        or not 0 < fill.end - fill.start <= (len(fill.pages) * page_size)
    ):
        raise ValueError(
            f"[{fill.start}, {fill.end}) does not fit {len(fill.pages)} pages of {page_size} tokens "
            f"and an object from {object_start} on"
        )
    row_bytes = group.tensor_bytes_per_token
    most_rows = max(1, fragment_bytes // row_bytes)
    collected: list[Piece] = []
    size = 0
    for layer in group.layers:
        for kind in "kv":
            for start, end in _steps(fill.start, fill.end, most_rows):
                piece = _piece(kind, layer, object_start, fill, (start, end), page_size, row_bytes)
                if collected and size + piece.nbytes > fragment_bytes:
                    yield tuple(collected)
                    collected, size = [], 0
                collected.append(piece)
                size += piece.nbytes
    yield tuple(collected)


def _steps(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for low in range(start, end, step):
        yield low, min(low + step, end)


def _piece(
    kind: str,
    layer: int,
    object_start: int,
    fill: GroupPages,
    span: tuple[int, int],
    page_size: int,
    row_bytes: int,
) -> Piece:
    start, end = span
    first, slot = divmod(start - fill.start, page_size)
    pages: Sequence[int] = fill.pages[first : first - (-(slot + end - start) // page_size)]
    return Piece(kind, layer, start - object_start, end - start, tuple(pages), slot, (end - start) * row_bytes)
