"""The KV store: where attention state lies on the device, in pages of equal size.

Per layer there are two tensors, keys (after RoPE) and values, each `[pages, page_size, kv_heads, head_dim]`. Page ids
count within a layer group; all layers of a group share them, so one page table per group serves all its layers. Who
owns which page is the page pool's business: the store neither allocates nor checks.

Threads. The device loop writes through `keys`/`values` while others `read` (checkpoint), `write` (restore) and
`copy_page` (copy-on-write). That is safe because the pool hands a page range to one writer at a time and completed
ranges are immutable. On the CPU the others copy through NumPy views: a torch copy would start a second OpenMP team
beside the loop's, and spinning teams that share cores slow each other down tenfold. On CUDA they use a stream of their
own, of the lowest priority.

The tensors start as zeros and only ever receive model outputs and verified chunks, so masked slots hold finite numbers:
attention multiplies them by an exact zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from libs.continuation.layout import LayerGroup, Layout

LayerKV = tuple[Tensor, Tensor]
"""Keys and values of one layer, each `[tokens, kv_heads, head_dim]`, contiguous, on the host."""


@dataclass(frozen=True, slots=True)
class PageBudget:
    """Pages per layer group, by group name, and what they cost."""

    pages: Mapping[str, int]
    page_size: int
    bytes: int


def size_pages(layout: Layout, kv_bytes: int, page_size: int, *, sequence_tokens: int, window_slack: int) -> PageBudget:
    """Splits a byte budget between the groups so that they run out together.

    A sequence of `sequence_tokens` needs that many tokens in a full group, but in a windowed group only the window and
    `window_slack` tokens (what one iteration adds, and chunks not yet captured). Groups get pages in that proportion.
    Raises ValueError where the budget holds less than one page of each group.
    """
    per_sequence = {group.name: -(-_held(group, sequence_tokens, window_slack) // page_size) for group in layout.groups}
    page_bytes = {group.name: group.bytes_per_token * page_size for group in layout.groups}
    sequence_bytes = sum(per_sequence[name] * page_bytes[name] for name in per_sequence)
    pages = {name: count * kv_bytes // sequence_bytes for name, count in per_sequence.items()}
    if min(pages.values()) < 1:
        raise ValueError(f"kv budget of {kv_bytes} bytes holds less than one page of each group: raise --kv-bytes")
    return PageBudget(pages, page_size, sum(pages[name] * page_bytes[name] for name in pages))


def _held(group: LayerGroup, sequence_tokens: int, window_slack: int) -> int:
    return sequence_tokens if group.window is None else min(sequence_tokens, group.window + window_slack)


class KVStore:
    """Device tensors of all layers. Groups, layers and shapes come from the layout."""

    def __init__(self, layout: Layout, pages: Mapping[str, int], page_size: int, device: torch.device) -> None:
        self.layout = layout
        self.page_size = page_size
        self.device = device
        self.pages = dict(pages)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for group in layout.groups:
            shape = (pages[group.name], page_size, group.kv_heads, group.head_dim)
            dtype = cast(torch.dtype, getattr(torch, group.dtype))
            for layer in group.layers:
                self.keys[layer] = torch.zeros(shape, dtype=dtype, device=device)
                self.values[layer] = torch.zeros(shape, dtype=dtype, device=device)
        # Priority 0 is the lowest there is; the device loop's stream has -1.
        self._side = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def bytes(self) -> int:
        """Device bytes of all pages."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys.values(), *self.values.values()))

    def read(self, group: str, pages: Sequence[int], start_in_first_page: int, n: int) -> dict[int, LayerKV]:
        """Copies n tokens of every layer of a group to the host, by layer index.

        pages: ids in logical order, the first holding the first token at slot `start_in_first_page`.
        """
        self._check(group, pages, start_in_first_page, n)
        return {
            layer: (
                self._read(self.keys[layer], pages, start_in_first_page, n),
                self._read(self.values[layer], pages, start_in_first_page, n),
            )
            for layer in self.layout.group(group).layers
        }

    def write(self, group: str, pages: Sequence[int], start_in_first_page: int, tensors: Mapping[int, LayerKV]) -> None:
        """Uploads tokens into pages, for the layers given. The pages must belong to the caller alone."""
        for layer, (keys, values) in tensors.items():
            self.write_rows(group, pages, start_in_first_page, layer, keys=keys, values=values)

    def write_rows(
        self,
        group: str,
        pages: Sequence[int],
        start_in_first_page: int,
        layer: int,
        *,
        keys: Tensor | None = None,
        values: Tensor | None = None,
    ) -> None:
        """Uploads a fragment: keys or values (or both) of one layer, `[tokens, kv_heads, head_dim]` on the host."""
        for source, target in ((keys, self.keys[layer]), (values, self.values[layer])):
            if source is not None:
                self._check(group, pages, start_in_first_page, source.shape[0])
                self._write(target, pages, start_in_first_page, source)

    def copy_page(self, group: str, source: int, target: int, slots: int) -> None:
        """Copies the first `slots` tokens of a page to another, in every layer of the group: a branch's private
        tail.
        """
        self._check(group, (source, target), 0, slots)
        for layer in self.layout.group(group).layers:
            for tensor in (self.keys[layer], self.values[layer]):
                if self._side is None:
                    flat = _host_view(tensor)
                    flat[target, :slots] = flat[source, :slots]
                else:
                    with torch.cuda.stream(self._side):
                        tensor[target, :slots].copy_(tensor[source, :slots])
        self._finish_side()

    def _check(self, group: str, pages: Sequence[int], start: int, n: int) -> None:
        count = self.pages[group]
        if not 0 <= start < self.page_size or start + n > len(pages) * self.page_size or n < 0:
            raise ValueError(f"{n} tokens from slot {start} do not fit {len(pages)} pages of {self.page_size} tokens")
        if pages and not (min(pages) >= 0 and max(pages) < count):
            raise ValueError(f"page ids {min(pages)}..{max(pages)} of group {group!r} are not within its {count} pages")

    def _read(self, tensor: Tensor, pages: Sequence[int], start: int, n: int) -> Tensor:
        out = torch.empty((n, *tensor.shape[2:]), dtype=tensor.dtype, pin_memory=self._side is not None)
        if self._side is None:
            source, target = _host_view(tensor).reshape(-1, *tensor.shape[2:]), _host_view(out)
            for position, slot, length in self._runs(pages, start, n):
                target[position : position + length] = source[slot : slot + length]
            return out
        with torch.cuda.stream(self._side):
            index = torch.tensor(pages, device=self.device)
            gathered = tensor.index_select(0, index).view(-1, *tensor.shape[2:])[start : start + n]
            out.copy_(gathered, non_blocking=True)
        self._finish_side()
        return out

    def _write(self, tensor: Tensor, pages: Sequence[int], start: int, source: Tensor) -> None:
        if self._side is None:
            target, rows = _host_view(tensor).reshape(-1, *tensor.shape[2:]), _host_view(source)
            for position, slot, length in self._runs(pages, start, source.shape[0]):
                target[slot : slot + length] = rows[position : position + length]
            return
        with torch.cuda.stream(self._side):
            flat = tensor.view(-1, *tensor.shape[2:])
            for position, slot, length in self._runs(pages, start, source.shape[0]):
                flat[slot : slot + length].copy_(source[position : position + length], non_blocking=True)
        self._finish_side()

    def _runs(self, pages: Sequence[int], start: int, n: int) -> list[tuple[int, int, int]]:
        """(position in the range, slot in the store, length): neighbouring pages with consecutive ids are one copy."""
        bounds = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(pages)) if b != a + 1), len(pages)]
        runs: list[tuple[int, int, int]] = []
        for first, end in pairwise(bounds):
            low = max(first * self.page_size, start)
            high = min(end * self.page_size, start + n)
            if low < high:
                runs.append((low - start, pages[first] * self.page_size + low - first * self.page_size, high - low))
        return runs

    def _finish_side(self) -> None:
        if self._side is not None:
            self._side.synchronize()


def _host_view(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The bytes of a host tensor as NumPy sees them: bfloat16, unknown to NumPy, as int16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return cast("npt.NDArray[np.generic]", tensor.numpy())
