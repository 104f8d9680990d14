"""The store's copies against a naive index, for shuffled and consecutive pages; sizing; bounds."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.continuation.layout import LayerSpec, Layout
from services.worker.runtime.kv import KVStore, size_pages

LAYOUT = Layout.from_layers(
    [LayerSpec(0, 32, 2, 4, "float32"), LayerSpec(1, None, 2, 4, "float32"), LayerSpec(2, 32, 2, 4, "float32")]
)
WINDOWED, FULL = (group.name for group in LAYOUT.groups)
PAGES = 12


def store(page_size: int = 4, layout: Layout = LAYOUT) -> KVStore:
    return KVStore(layout, {group.name: PAGES for group in layout.groups}, page_size, torch.device("cpu"))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    pages = draw(st.lists(st.integers(0, PAGES - 1), unique=True, min_size=1, max_size=PAGES))
    if draw(st.booleans()):
        pages.sort()  # runs of consecutive pages are copied at once
    start = draw(st.integers(0, 3))
    return pages, start, draw(st.integers(0, len(pages) * 4 - start))


@settings(max_examples=150, deadline=None)
@given(ranges(), st.integers(0, 2**31))
def test_write_then_read_and_nothing_else_changes(where: tuple[list[int], int, int], seed: int) -> None:
    pages, start, n = where
    kv = store()
    generator = torch.Generator().manual_seed(seed)
    for layer in (0, 1, 2):
        kv.keys[layer].normal_(generator=generator)
        kv.values[layer].normal_(generator=generator)
    slots = [pages[(start + i) // 4] * 4 + (start + i) % 4 for i in range(n)]
    expected = {layer: (kv.keys[layer].clone(), kv.values[layer].clone()) for layer in (0, 1, 2)}
    rows = {layer: (torch.randn(n, 2, 4), torch.randn(n, 2, 4)) for layer in (0, 2)}
    for layer, (keys, values) in rows.items():
        for i, slot in enumerate(slots):
            expected[layer][0].view(-1, 2, 4)[slot] = keys[i]
            expected[layer][1].view(-1, 2, 4)[slot] = values[i]
    kv.write(WINDOWED, pages, start, rows)
    for layer in (0, 1, 2):
        assert torch.equal(kv.keys[layer], expected[layer][0])
        assert torch.equal(kv.values[layer], expected[layer][1])
    found = kv.read(WINDOWED, pages, start, n)
    assert set(found) == {0, 2}
    for layer, (keys, values) in found.items():
        assert torch.equal(keys, rows[layer][0])
        assert torch.equal(values, rows[layer][1])
        assert keys.is_contiguous() and keys.data_ptr() != kv.keys[layer].data_ptr()


def test_fragments_of_one_kind() -> None:
    kv = store()
    kv.write_rows(FULL, [3, 7], 2, 1, values=torch.ones(5, 2, 4))
    assert kv.values[1].view(-1, 8)[:, 0].nonzero().flatten().tolist() == [14, 15, 28, 29, 30]
    assert not kv.keys[1].any()


def test_copy_page_takes_the_first_slots_only() -> None:
    kv = store()
    for layer in (0, 2):
        kv.keys[layer][5].fill_(1.0)
        kv.values[layer][5].fill_(2.0)
    kv.copy_page(WINDOWED, 5, 9, 3)
    for layer in (0, 2):
        assert kv.keys[layer][9, :, 0, 0].tolist() == [1, 1, 1, 0]
        assert kv.values[layer][9, :, 0, 0].tolist() == [2, 2, 2, 0]
    assert not kv.keys[1].any(), "other groups have other pages"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_bits(dtype: str) -> None:
    layout = Layout.from_layers([LayerSpec(0, None, 1, 8, dtype)])
    kv = store(layout=layout)
    rows = torch.randn(6, 1, 8).to(getattr(torch, dtype))
    name = layout.groups[0].name
    kv.write(name, [2, 4], 1, {0: (rows, -rows)})
    keys, values = kv.read(name, [2, 4], 1, 6)[0]
    assert keys.dtype == rows.dtype
    assert torch.equal(keys, rows)
    assert torch.equal(values, -rows)


@pytest.mark.parametrize(
    ("pages", "start", "n"), [([1], 0, 5), ([1], 4, 0), ([12], 0, 1), ([-1], 0, 1), ([1, 2], 3, 6)]
)
def test_ranges_outside_the_pages_are_refused(pages: list[int], start: int, n: int) -> None:
    kv = store()
    with pytest.raises(ValueError, match="page"):
        kv.read(FULL, pages, start, n)
    with pytest.raises(ValueError, match="page"):
        kv.write(FULL, pages, start, {1: (torch.zeros(n, 2, 4), torch.zeros(n, 2, 4))})


def test_threads_on_their_own_pages_do_not_disturb_each_other() -> None:
    kv = store()
    wrong: list[int] = []

    def work(page: int) -> None:
        rows = torch.full((4, 2, 4), float(page))
        for _ in range(300):
            kv.write(FULL, [page], 0, {1: (rows, rows)})
            if not torch.equal(kv.read(FULL, [page], 0, 4)[1][0], rows):
                wrong.append(page)

    threads = [threading.Thread(target=work, args=(page,)) for page in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


@given(st.integers(400_000, 10_000_000), st.sampled_from([4, 16]), st.integers(1, 5000), st.integers(1, 300))
def test_sizing_stays_within_its_budget(kv_bytes: int, page_size: int, sequence: int, slack: int) -> None:
    budget = size_pages(LAYOUT, kv_bytes, page_size, sequence_tokens=sequence, window_slack=slack)
    cost = {group.name: group.bytes_per_token * page_size for group in LAYOUT.groups}
    assert budget.bytes == sum(budget.pages[name] * cost[name] for name in cost) <= kv_bytes
    assert min(budget.pages.values()) >= 1
    assert kv_bytes - budget.bytes < sum(cost.values()), "no whole page of each group is left over"
    held = min(sequence, 32 + slack)
    ratio = -(-held // page_size) / -(-sequence // page_size)
    assert abs(budget.pages[WINDOWED] - ratio * budget.pages[FULL]) <= 1.0


def test_too_small_a_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="--kv-bytes"):
        size_pages(LAYOUT, 100, 16, sequence_tokens=100, window_slack=16)
