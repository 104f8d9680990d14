"""From staging to durable: host memory and file first, then the object. Runs on upload threads.

Memory takes the staged buffer itself, where it has room. The file is a convenience (the next restore here is local), so
that failing to write it is counted and no more; the object is what the fact is about.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from libs.chunks.errors import TierError
from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.chunks.object_store import ObjectStore
from libs.continuation.keys import ObjectKey
from libs.controller.catalog_facts import Receipt
from services.worker.checkpoint.capture import Captured

_FILE_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Moved:
    """`receipts` of every object of the range, `local`: those that lie in the chunk directory too."""

    captured: Captured
    receipts: tuple[Receipt, ...]
    local: tuple[ObjectKey, ...]


class Mover:
    """Thread-safe."""

    def __init__(
        self, memory: HostMemory | None, local: LocalDirectory | None, store: ObjectStore, put_timeout_s: float
    ) -> None:
        self._memory, self._local, self._store, self._put_timeout_s = memory, local, store, put_timeout_s

    @property
    def keeps(self) -> bool:
        """Whether anything is kept on this machine."""
        return self._memory is not None or self._local is not None

    def keep(self, captured: Captured) -> tuple[ObjectKey, ...]:
        """Fills memory and writes the files; returns the keys that are in the directory now."""
        kept: list[ObjectKey] = []
        if self._memory is not None:
            for found in captured.objects:
                # Hashed where it was encoded. No room is no fault: it is counted there.
                with suppress(TierError):
                    self._memory.adopt(found.key, found.data, verified=True)
        for found in captured.objects if self._local is not None else ():
            assert self._local is not None
            try:
                self._local.put(found.key, [found.data], within=_FILE_WITHIN_S)
            except TierError:
                continue
            kept.append(found.key)
        return tuple(kept)

    def upload(self, captured: Captured) -> tuple[Receipt, ...]:
        """Puts the objects. Raises TierError; what was put is found there the next time."""
        receipts: list[Receipt] = []
        for found in captured.objects:
            stored = self._store.put(found.key, [found.data], within=self._put_timeout_s)
            receipts.append(
                Receipt(
                    found.key.group,
                    self._store.bucket,
                    found.key.text,
                    stored.etag,
                    found.data.nbytes,
                    found.key.content_id,
                )
            )
        return tuple(receipts)
