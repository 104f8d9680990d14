"""What lies in host memory, as a numbered journal for heartbeats.

A chunk is advertised with the layer groups of which memory holds an object; what its groups are is in the hash's facts
and in the object itself. The journal is fed from any thread and read on the event loop: `since(version)` tells what
came (or changed) and went after a version that a router has heard, or everything where that is too long ago.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from libs.chunks.memory import HostMemory
from libs.continuation.errors import ObjectError
from libs.continuation.keys import ObjectKey
from libs.continuation.layout import Layout
from libs.continuation.objects import view_object
from services.worker.handlers import InMemory, MemoryChanges

_JOURNAL_LENGTH = 16_384


class MemoryJournal:
    """Implements `MemoryResidency`. Thread-safe. `here` and `gone` are HostMemory's listeners."""

    def __init__(self, layout: Layout) -> None:
        self._groups = tuple(group.name for group in layout.groups)
        self._lock = threading.Lock()
        self._objects: dict[str, dict[ObjectKey, int]] = {}
        self._journal: deque[tuple[int, str]] = deque()
        self._version = 0
        self._came: Callable[[], None] | None = None

    def listen(self, came: Callable[[], None]) -> None:
        """See MemoryResidency."""
        self._came = came

    def here(self, memory: HostMemory, key: ObjectKey) -> None:
        """An object came into memory. One that cannot be read is not advertised."""
        data = memory.peek(key)
        if data is None:
            return
        try:
            with view_object(data) as view:
                end = view.metadata.end
        except ObjectError:
            return
        with self._lock:
            if not memory.holds(key):
                return
            self._objects.setdefault(key.hash, {})[key] = end
            self._note(key.hash)
        if self._came is not None:
            self._came()

    def gone(self, key: ObjectKey) -> None:
        """An object left memory."""
        with self._lock:
            objects = self._objects.get(key.hash)
            if objects is None or objects.pop(key, None) is None:
                return
            if not objects:
                del self._objects[key.hash]
            self._note(key.hash)

    def _note(self, digest: str) -> None:
        self._version += 1
        self._journal.append((self._version, digest))
        if len(self._journal) > _JOURNAL_LENGTH:
            self._journal.popleft()

    def since(self, version: int | None) -> MemoryChanges:
        """What changed after `version`; a snapshot where None, or where that is too long ago."""
        with self._lock:
            oldest = self._journal[0][0] if self._journal else self._version + 1
            if version is None or version < oldest - 1 or version > self._version:
                came = {digest: self._of(objects) for digest, objects in self._objects.items()}
                return MemoryChanges(self._version, came, (), snapshot=True)
            changed = {digest for at, digest in self._journal if at > version}
            came = {digest: self._of(self._objects[digest]) for digest in changed if digest in self._objects}
            return MemoryChanges(
                self._version, came, tuple(sorted(changed - came.keys())), snapshot=False
            )  # fmt: skip

    def _of(self, objects: dict[ObjectKey, int]) -> InMemory:
        held = {key.group for key in objects}
        key, end = next(iter(objects.items()))
        whole = held.issuperset(self._groups)
        return InMemory(end, key.fingerprint, () if whole else tuple(name for name in self._groups if name in held))
