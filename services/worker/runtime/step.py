"""The ragged step: everything one forward pass must know about its rows, built once per iteration and read by all
layers.

The rows of an iteration are laid end to end in one sequence `[1, T]`: decoding lanes first, one row each, ordered by
length, then the chunk of each prompt. Row r is a token at absolute position `positions[r]` of its lane. Per layer
group the step holds

- `slots [T]`: where each row's K and V are stored (page * page_size + offset);
- decode blocks: runs of decoding rows whose histories have about the same number of pages, attended in one batch,
  padded to the longest (a block is split where padding would exceed a quarter);
- prompt blocks: the rows of one prompt's chunk, which attend to the same pages.

A windowed group names only the pages that hold its last window, so what lies behind may already be freed and its table
entries may hold anything. Bias tensors are additive masks (0 or -inf), built here once, not per layer.

The lanes' page tables live on the device (`PageTables`) and change only when a lane is refilled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from libs.continuation.layout import LayerGroup, Layout

_PADDING_FREE_PAGES = 4  # blocks this close in length are never split: a second kernel launch would cost more


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """Rows [start, end), one query each. `pages` int64 `[rows * width]`; `bias` `[rows, 1, 1, width * page_size]`."""

    start: int
    end: int
    pages: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """Rows [start, end) of one sequence. `pages` int64 `[width]`; `bias` `[1, 1, end - start, width * page_size]`."""

    start: int
    end: int
    pages: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One layer group's part of a step. `slots` int64 `[T]`."""

    slots: Tensor
    decodes: tuple[DecodeBlock, ...]
    prompts: tuple[PromptBlock, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """`tokens`, `positions` int64 `[1, T]`; `logit_rows` int64 `[n]`: rows whose next token is wanted, decodes
    first.
    """

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    groups: tuple[GroupStep, ...]
    group_of_layer: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows to compute for one lane: `tokens` at positions start, start + 1, ... `wants_logits`: of the last one."""

    lane: int
    start: int
    tokens: Sequence[int]
    wants_logits: bool

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.tokens)


class PageTables:
    """Per layer group an int64 tensor `[lanes, pages of the longest context]` on the device: logical page to page
    id.
    """

    def __init__(self, layout: Layout, lanes: int, max_context: int, page_size: int, device: torch.device) -> None:
        self.layout = layout
        self.page_size = page_size
        self.device = device
        width = -(-max_context // page_size)
        self.tables = tuple(torch.zeros((lanes, width), dtype=torch.int64, device=device) for _ in layout.groups)
        self.group_of_layer = {layer: index for index, group in enumerate(layout.groups) for layer in group.layers}

    def prime(self, lane: int, group: str, pages: Sequence[int]) -> None:
        """Uploads the page ids of one group of a lane."""
        index = next(i for i, known in enumerate(self.layout.groups) if known.name == group)
        row = self.tables[index][lane]
        ids = torch.tensor(pages[: len(row)], dtype=torch.int64, device=self.device)
        row[: len(ids)] = ids


def build_step(tables: PageTables, decodes: Sequence[Span], prompts: Sequence[Span], dtype: torch.dtype) -> Step:
    """Lays out one iteration. `decodes` hold one token each and must be sorted by start, longest first."""
    spans = [*decodes, *prompts]
    tokens = [token for span in spans for token in span.tokens]
    positions = [span.start + offset for span in spans for offset in range(len(span.tokens))]
    lanes = [span.lane for span in spans for _ in span.tokens]
    logit_rows: list[int] = []
    row = 0
    for span in spans:
        row += len(span.tokens)
        if span.wants_logits:
            logit_rows.append(row - 1)
    device = tables.device
    position_tensor = torch.tensor(positions, dtype=torch.int64, device=device)
    lane_tensor = torch.tensor(lanes, dtype=torch.int64, device=device)
    logical = position_tensor // tables.page_size
    offsets = position_tensor - logical * tables.page_size
    groups = tuple(
        GroupStep(
            slots=table[lane_tensor, logical] * tables.page_size + offsets,
            decodes=_decode_blocks(group, table, tables.page_size, decodes, lane_tensor, position_tensor, dtype),
            prompts=_prompt_blocks(group, table, tables.page_size, len(decodes), prompts, position_tensor, dtype),
        )
        for group, table in zip(tables.layout.groups, tables.tables, strict=True)
    )
    return Step(
        tokens=torch.tensor([tokens], dtype=torch.int64, device=device),
        positions=position_tensor.unsqueeze(0),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        groups=groups,
        group_of_layer=tables.group_of_layer,
    )


def first_page(group: LayerGroup, position: int, page_size: int) -> int:
    """The first logical page that a query at `position` reads in this group."""
    return 0 if group.window is None else max(0, position - group.window + 1) // page_size


def _decode_blocks(
    group: LayerGroup,
    table: Tensor,
    page_size: int,
    decodes: Sequence[Span],
    lanes: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
) -> tuple[DecodeBlock, ...]:
    firsts = [first_page(group, span.start, page_size) for span in decodes]
    widths = [span.start // page_size - first + 1 for span, first in zip(decodes, firsts, strict=True)]
    blocks: list[DecodeBlock] = []
    start = 0
    while start < len(decodes):
        end = start + 1
        # Sorted by length, so widths fall (up to one page of alignment): padding is the first one's width less the
        # last's.
        while end < len(decodes) and max(widths[start : end + 1]) <= 1.25 * widths[end] + _PADDING_FREE_PAGES:
            end += 1
        width = max(widths[start:end])
        first = torch.tensor(firsts[start:end], dtype=torch.int64, device=table.device).unsqueeze(1)
        query = positions[start:end].unsqueeze(1)
        columns = first + torch.arange(width, device=table.device)
        # A padded column repeats the lane's last page (masked below): entries past a lane's end are never read.
        pages = table[lanes[start:end].unsqueeze(1), torch.minimum(columns, query // page_size)]
        keys = first * page_size + torch.arange(width * page_size, device=table.device)
        bias = _bias(keys, query, group.window, dtype)
        blocks.append(DecodeBlock(start, end, pages.reshape(-1), bias[:, None, None, :]))
        start = end
    return tuple(blocks)


def _prompt_blocks(
    group: LayerGroup,
    table: Tensor,
    page_size: int,
    row: int,
    prompts: Sequence[Span],
    positions: Tensor,
    dtype: torch.dtype,
) -> tuple[PromptBlock, ...]:
    blocks: list[PromptBlock] = []
    for span in prompts:
        end = row + len(span.tokens)
        first = first_page(group, span.start, page_size)
        last = (span.start + len(span.tokens) - 1) // page_size
        keys = torch.arange(first * page_size, (last + 1) * page_size, device=table.device)
        bias = _bias(keys.unsqueeze(0), positions[row:end].unsqueeze(1), group.window, dtype)
        blocks.append(PromptBlock(row, end, table[span.lane, first : last + 1], bias[None, None]))
        row = end
    return tuple(blocks)


def _bias(keys: Tensor, queries: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query may see the key, -inf elsewhere. Shapes broadcast; a query always sees itself."""
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, float("-inf"))
