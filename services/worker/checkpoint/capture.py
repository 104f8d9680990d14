"""From pages to finished objects in staging: lease, copy, release, encode. Runs on the one capture thread.

The lease lasts exactly as long as the copy. Encoding and hashing come after it, on bytes of our own, and let the
interpreter go; nothing here starts a team of threads beside the decode's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from libs.continuation.hashing import tokens_sha256
from libs.continuation.keys import ObjectKey
from libs.continuation.layout import LayerGroup, Layout
from libs.continuation.object_format import ObjectMetadata
from libs.continuation.objects import encode_object
from services.worker.checkpoint.kept import KeptObjects
from services.worker.handlers import CheckpointRange, GroupPages, Lease, LeaseHeldError, PageLeases


class PageReader(Protocol):
    """The part of the KV store that checkpoints use (`services.worker.runtime.kv.KVStore`)."""

    @property
    def page_size(self) -> int: ...

    def read(
        self, group: str, pages: Sequence[int], start_in_first_page: int, n: int
    ) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Keys and values `[n, kv_heads, head_dim]` by layer, on the host, complete when it returns."""
        ...


@dataclass(frozen=True, slots=True)
class StagedObject:
    """One object, encoded. `data` is the whole file, which nobody changes any more."""

    key: ObjectKey
    data: memoryview


@dataclass(frozen=True, slots=True)
class Captured:
    """A range in staging."""

    what: CheckpointRange
    tokens_sha256: str
    objects: tuple[StagedObject, ...]

    @property
    def bytes(self) -> int:
        return sum(found.data.nbytes for found in self.objects)


class Busy:
    """The route's pages are leased just now: try again."""


def largest_header(group: LayerGroup) -> int:
    """A bound on the header of the group's objects, bytes."""
    return 1_024 + 256 * len(group.layers)


def metadata_of(what: CheckpointRange, group: str) -> ObjectMetadata:
    """What the range's object of a group says of itself."""
    return ObjectMetadata(what.fingerprint, what.parent, what.hash, what.owner, group, what.start, what.end)


class Capturer:
    """Copies ranges out of the pages, or, where these are gone, out of what this machine has kept of them."""

    def __init__(self, kv: PageReader, layout: Layout, leases: PageLeases, kept: KeptObjects) -> None:
        self._kv, self._layout, self._leases, self._kept = kv, layout, leases, kept

    def size(self, what: CheckpointRange, without: Collection[str] = ()) -> int:
        """Most bytes the objects of a range may have, but for groups in `without`: what staging must admit."""
        tokens = what.end - what.start
        return sum(
            tokens * (group.bytes_per_token + 4) + largest_header(group)
            for group in self._layout.groups
            if group.name not in without
        )

    def capture(self, what: CheckpointRange, without: Collection[str]) -> Captured | Busy | None:
        """The groups that still hold the range, but for those in `without`; None: neither resident nor kept."""
        try:
            lease = self._leases.lease(what)
        except LeaseHeldError:
            return Busy()
        if lease is None:
            return self._of_kept(what, without)
        copied = self._copy(what, lease, without)
        objects = [self._encode(what, group, layers) for group, layers in copied]
        return Captured(what, tokens_sha256(what.tokens), tuple(objects))

    def _of_kept(self, what: CheckpointRange, without: Collection[str]) -> Captured | None:
        """A chunk may lack windowed groups, never the others."""
        wanted = [group.name for group in self._layout.groups if group.name not in without]
        objects = [StagedObject(key, data) for key, data in self._kept.objects(what, wanted)]
        there = {found.key.group for found in objects}
        whole = all(group.window or group.name in there or group.name in without for group in self._layout.groups)
        return Captured(what, tokens_sha256(what.tokens), tuple(objects)) if objects and whole else None

    def _copy(
        self, what: CheckpointRange, lease: Lease, without: Collection[str]
    ) -> list[tuple[LayerGroup, Mapping[int, tuple[Tensor, Tensor]]]]:
        try:
            return [
                (self._layout.group(held.group), self._read(what, held))
                for held in lease.groups
                if held.group not in without
            ]
        finally:
            lease.release()

    def _read(self, what: CheckpointRange, held: GroupPages) -> Mapping[int, tuple[Tensor, Tensor]]:
        first, slot = divmod(what.start - held.start, self._kv.page_size)
        count = what.end - what.start
        last = first - (-(slot + count) // self._kv.page_size)
        return self._kv.read(held.group, held.pages[first:last], slot, count)

    def _encode(
        self, what: CheckpointRange, group: LayerGroup, layers: Mapping[int, tuple[Tensor, Tensor]]
    ) -> StagedObject:
        keys = {layer: _raw(pair[0]) for layer, pair in layers.items()}
        values = {layer: _raw(pair[1]) for layer, pair in layers.items()}
        encoded = encode_object(metadata_of(what, group.name), group, what.tokens, keys, values)
        # Writable and aligned, as uploads from host memory want it.
        data = np.empty(encoded.size, np.uint8).data
        at = 0
        for part in encoded.parts:
            data[at : at + part.nbytes] = part.cast("B")
            at += part.nbytes
        return StagedObject(encoded.key, data)


def _raw(tensor: Tensor) -> memoryview:
    """A host tensor's values; bfloat16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    view: memoryview = tensor.numpy().data
    return view
