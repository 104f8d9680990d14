"""What this machine has kept of ranges whose pages are gone: the way out for those that never became durable.

A range that was captured while the store was away, and given up in the end, may still lie in host memory or in the
chunk directory. A drain offers it once more, and this is where its bytes come from then. They are checked against their
key like any others, so that nothing damaged becomes a durable fact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from libs.chunks.errors import TierError
from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.continuation.errors import ObjectError
from libs.continuation.keys import ObjectKey
from libs.continuation.objects import open_by_key
from services.worker.handlers import CheckpointRange

_WITHIN_S = 10.0


class KeptObjects:
    """Thread-safe. None = there is no such tier."""

    def __init__(self, memory: HostMemory | None, local: LocalDirectory | None) -> None:
        self._tiers = [tier for tier in (memory, local) if tier is not None]

    def objects(self, what: CheckpointRange, groups: Collection[str]) -> Iterator[tuple[ObjectKey, memoryview]]:
        """Those of the named groups that lie here whole, each a copy."""
        for group in groups:
            found = self._object(what, group)
            if found is not None:
                yield found

    def _object(self, what: CheckpointRange, group: str) -> tuple[ObjectKey, memoryview] | None:
        for tier in self._tiers:
            for key in tier.find(what.fingerprint, what.owner, what.hash, group):
                try:
                    held = tier.get(key, 0, within=_WITHIN_S)
                except TierError:
                    continue
                try:
                    open_by_key(held.data, key).release()
                    data = np.empty(held.data.nbytes, np.uint8).data
                    data[:] = held.data
                    return key, data
                except ObjectError as error:
                    tier.reject(key, error)
                finally:
                    held.release()
        return None
