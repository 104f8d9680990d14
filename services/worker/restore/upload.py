"""Verified objects into pages, fragment by fragment, on one transfer thread.

The pipeline is the same everywhere: stage a fragment, write its pieces, give the buffer back. Where the device is the
host, the staged fragment is the mapped file itself and nothing is copied twice; elsewhere a second thread copies the
next fragments into a ring of pinned buffers while this one uploads, so that an object may be larger than the ring.

A call returns when the last write is complete on the device; `abort` ends it after the fragment under way (the pages
then hold parts of a node that never landed).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from libs.chunks.cost import CostMeter, Price
from libs.continuation.layout import LayerGroup, Layout
from libs.continuation.objects import ObjectView
from services.worker.handlers import GroupPages
from services.worker.restore.fragments import Fragment, Piece, fragments

_GUESS = Price(latency_ms=0.1, bytes_per_ms=4_000_000)
_PROBE_BYTES = 4 << 20


class PageWriter(Protocol):
    """The part of the KV store that restores use (`services.worker.runtime.kv.KVStore`)."""

    @property
    def page_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

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
        """Complete on the device when it returns."""
        ...


Staged = Sequence[tuple[Piece, Tensor]]
"""Pieces with their rows `[rows, kv_heads, head_dim]` on the host."""


class Stager(Protocol):
    """Brings fragments to where the device can take them from."""

    def stream(self, view: ObjectView, parts: Iterator[Fragment]) -> Iterator[Staged]:
        """In order; what was yielded stays valid until the next is asked for."""
        ...

    def close(self) -> None: ...


class InPlace:
    """The device is the host: pieces are rows of the mapped object."""

    def stream(self, view: ObjectView, parts: Iterator[Fragment]) -> Iterator[Staged]:
        for fragment in parts:
            yield [(piece, _rows(view, piece)) for piece in fragment]

    def close(self) -> None:
        """Nothing to give back."""


class PinnedRing:
    """`count` pinned buffers of `size` bytes, filled ahead of the upload by a thread of its own."""

    def __init__(self, count: int, size: int, pin: bool = True) -> None:
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _ in range(count)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stage")

    def stream(self, view: ObjectView, parts: Iterator[Fragment]) -> Iterator[Staged]:
        ahead: deque[Future[Staged]] = deque()
        number = 0
        try:
            for fragment in parts:
                ahead.append(self._pool.submit(self._fill, number % len(self._buffers), view, fragment))
                number += 1
                # Every buffer is in use; the one yielded is free again when the next fragment is asked for.
                if len(ahead) == len(self._buffers):
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.exception()

    def _fill(self, number: int, view: ObjectView, fragment: Fragment) -> Staged:
        need = sum(piece.nbytes for piece in fragment)
        buffer = self._buffers[number]
        if need > buffer.numel():  # a single row larger than a fragment
            buffer = self._buffers[number] = torch.empty(need, dtype=torch.uint8, pin_memory=buffer.is_pinned())
        host = buffer.numpy()
        staged: list[tuple[Piece, Tensor]] = []
        at = 0
        for piece in fragment:
            rows = _rows(view, piece)
            low = piece.row * (piece.nbytes // piece.rows)
            raw = view.raw(piece.tensor)[low : low + piece.nbytes]
            host[at : at + piece.nbytes] = np.frombuffer(raw, np.uint8)
            staged.append((piece, buffer[at : at + piece.nbytes].view(rows.dtype).view(rows.shape)))
            at += piece.nbytes
        return staged

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _rows(view: ObjectView, piece: Piece) -> Tensor:
    slot = view.slot(piece.tensor)
    array = view.array(piece.tensor)[piece.row : piece.row + piece.rows]
    if slot.dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Uploader:
    """Owns the transfer thread; concurrent restores take turns, object by object."""

    def __init__(self, kv: PageWriter, fragment_bytes: int, ring_fragments: int) -> None:
        self._kv, self._fragment_bytes = kv, fragment_bytes
        on_host = kv.device.type == "cpu"
        self._stager: Stager = InPlace() if on_host else PinnedRing(ring_fragments, fragment_bytes)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="transfer")
        self.meter = CostMeter(_GUESS)

    def start(
        self, items: Sequence[tuple[ObjectView, LayerGroup, int, GroupPages]], abort: threading.Event
    ) -> asyncio.Future[bool]:
        """Uploads objects given as (view, group, first position, fill). The result: whether all of it was written."""
        return asyncio.get_running_loop().run_in_executor(self._pool, self._upload, items, abort)

    def _upload(self, items: Sequence[tuple[ObjectView, LayerGroup, int, GroupPages]], abort: threading.Event) -> bool:
        started, size = time.monotonic(), 0
        for view, group, start, fill in items:
            parts = fragments(group, start, fill, self._kv.page_size, self._fragment_bytes)
            for staged in self._stager.stream(view, parts):
                if abort.is_set():
                    return False
                for piece, rows in staged:
                    self._write(group.name, piece, rows)
                    size += piece.nbytes
        self.meter.observe(size, (time.monotonic() - started) * 1e3)
        return True

    def _write(self, group: str, piece: Piece, rows: Tensor) -> None:
        if piece.kind == "k":
            self._kv.write_rows(group, piece.pages, piece.slot, piece.layer, keys=rows)
        else:
            self._kv.write_rows(group, piece.pages, piece.slot, piece.layer, values=rows)

    async def probe(self, layout: Layout) -> None:
        """Measures the device's side, on a page that nobody uses yet: call it before the pages are given out."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._probe, layout)

    def _probe(self, layout: Layout) -> None:
        group = layout.groups[0]
        shape = (self._kv.page_size, group.kv_heads, group.head_dim)
        zeros = torch.zeros(shape, dtype=cast("torch.dtype", getattr(torch, group.dtype)))
        one = zeros.numel() * zeros.element_size()
        for count in (1, 1, _PROBE_BYTES // one):
            started = time.monotonic()
            for _ in range(count):
                self._kv.write_rows(group.name, (0,), 0, group.layers[0], keys=zeros)
            self.meter.observe(count * one, (time.monotonic() - started) * 1e3)

    def close(self) -> None:
        """After it nothing writes to a page. Blocks until the upload under way has ended."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._stager.close()
