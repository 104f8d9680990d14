"""The step's geometry against the definition: each row sees exactly the positions of its window, in its own pages.

Every table entry that a step may not touch is poisoned with -1, before and past what the lane holds.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.continuation.layout import LayerSpec, Layout
from services.worker.runtime.step import GroupStep, PageTables, Span, build_step, first_page

PAGE = 4
WINDOW = 10
LANES = 6
CONTEXT = 200
LAYOUT = Layout.from_layers([LayerSpec(0, WINDOW, 1, 4, "float32"), LayerSpec(1, None, 1, 4, "float32")])
WIDTH = CONTEXT // PAGE


def page_of(lane: int, logical: int) -> int:
    """Any injective numbering will do."""
    return (logical * LANES + lane) * 7


def tables_for(spans: list[Span]) -> PageTables:
    tables = PageTables(LAYOUT, LANES, CONTEXT, PAGE, torch.device("cpu"))
    for table in tables.tables:
        table.fill_(-1)
    for span in spans:
        for group in LAYOUT.groups:
            held = range(first_page(group, span.start, PAGE), (span.end - 1) // PAGE + 1)
            ids = [page_of(span.lane, logical) if logical in held else -1 for logical in range(WIDTH)]
            tables.prime(span.lane, group.name, ids)
    return tables


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Span], list[Span]]:
    decodes: list[Span] = []
    prompts: list[Span] = []
    for lane in draw(st.lists(st.integers(0, LANES - 1), unique=True, min_size=1)):
        start = draw(st.integers(0, CONTEXT - 41))
        if draw(st.booleans()):
            decodes.append(Span(lane, start, [lane], wants_logits=True))
        else:
            prompts.append(Span(lane, start, list(range(draw(st.integers(1, 40)))), wants_logits=draw(st.booleans())))
    return sorted(decodes, key=lambda span: -span.start), prompts


def seen_by_row(group: GroupStep) -> dict[int, list[int]]:
    """Row → the slots whose bias is 0, in the order gathered; each row belongs to exactly one block."""
    seen: dict[int, list[int]] = {}
    for block in group.decodes:
        pages = block.pages.view(block.end - block.start, -1)
        for index, row in enumerate(range(block.start, block.end)):
            seen[row] = visible(pages[index], block.bias[index, 0, 0])
    for prompt in group.prompts:
        for index, row in enumerate(range(prompt.start, prompt.end)):
            assert row not in seen
            seen[row] = visible(prompt.pages, prompt.bias[0, 0, index])
    return seen


def visible(pages: torch.Tensor, bias: torch.Tensor) -> list[int]:
    assert int(pages.min()) >= 0, "a poisoned entry was read"
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    assert set(bias.tolist()) <= {0.0, float("-inf")}
    return slots[bias == 0].tolist()


@settings(max_examples=200, deadline=None)
@given(steps())
def test_rows_see_their_window_and_nothing_else(step: tuple[list[Span], list[Span]]) -> None:
    decodes, prompts = step
    spans = [*decodes, *prompts]
    built = build_step(tables_for(spans), decodes, prompts, torch.float32)
    rows = [(span.lane, span.start + offset) for span in spans for offset in range(len(span.tokens))]
    assert built.positions[0].tolist() == [position for _, position in rows]
    assert built.tokens[0].tolist() == [token for span in spans for token in span.tokens]
    for group, part in zip(LAYOUT.groups, built.groups, strict=True):
        seen = seen_by_row(part)
        assert sorted(seen) == list(range(len(rows)))
        for row, (lane, position) in enumerate(rows):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            expected = [page_of(lane, p // PAGE) * PAGE + p % PAGE for p in range(first, position + 1)]
            assert seen[row] == expected
            assert part.slots[row] == expected[-1]
    ends = [sum(len(s.tokens) for s in spans[: i + 1]) - 1 for i, span in enumerate(spans) if span.wants_logits]
    assert built.logit_rows.tolist() == ends


def test_lanes_of_very_different_length_are_not_padded_together() -> None:
    spans = [Span(lane, start, [1], wants_logits=True) for lane, start in enumerate([190, 180, 20, 3])]
    full = build_step(tables_for(spans), spans, [], torch.float32).groups[1]
    assert [(block.start, block.end) for block in full.decodes] == [(0, 2), (2, 3), (3, 4)]
    gathered = sum(len(block.pages) for block in full.decodes)
    assert gathered <= 1.25 * sum(span.start // PAGE + 1 for span in spans) + 4 * len(spans)
