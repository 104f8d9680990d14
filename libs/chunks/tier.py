"""The interface every chunk tier has, and the values that cross it.

A `Source` can be read; a `Tier` can be written too (a peer is a source alone: what lies there is its own business).

Contract (tests/chunks/conformance.py holds each tier to it). `get` returns the bytes as they lie there, unchecked,
and raises MissingObjectError where there are none; reading while the same key is being written finds nothing or the
whole. `put` makes the whole object visible at once, durable when it returns, and leaves an existing one alone
(`created` False): keys end in the content id, so two writers of one key mean the same bytes. Every call ends within
`within` seconds, give or take one stalled system call, with one of the typed errors. All of it is thread-safe.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from libs.chunks.cost import CostMeter
from libs.continuation.errors import ObjectError
from libs.continuation.hashing import Tokens
from libs.continuation.keys import ObjectKey
from libs.continuation.layout import LayerGroup
from libs.continuation.object_format import ObjectMetadata, object_format
from libs.continuation.objects import object_key

Parts = Sequence[memoryview]
"""The bytes of an object in order; each part C-contiguous."""


class TierKind(enum.Enum):
    """Which medium; the worker translates into the protocol's Tier."""

    RAM = "ram"
    SSD = "ssd"
    PEER = "peer"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Stored:
    """What lies under a key. `etag` as the store answered, empty elsewhere; `created`: this call wrote it."""

    size: int
    etag: str = ""
    created: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """The object a restore asks for: its name, its shape, its content id, and the prompt's own tokens."""

    metadata: ObjectMetadata
    group: LayerGroup
    content: str
    tokens: Tokens = field(repr=False)

    @property
    def key(self) -> ObjectKey:
        return object_key(self.metadata, self.content)

    @property
    def size(self) -> int:
        """Bytes of the whole file: a function of metadata and layers alone."""
        return object_format(self.metadata, self.group).size


class Transfer(threading.Event):
    """One read under way, seen from outside. Set: nobody wants the bytes any more, the read ends with AbortedError.

    `moved`: bytes that have come, also of a read that failed or was ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self._hooks: list[Callable[[], object]] = []
        self._guard = threading.Lock()

    def came(self, count: int) -> None:
        """So many bytes more."""
        with self._guard:
            self.moved += count

    def set(self) -> None:
        """Ends the read. Idempotent."""
        super().set()
        with self._guard:
            hooks = list(self._hooks)
        for hook in hooks:
            hook()

    @contextmanager
    def ending(self, hook: Callable[[], object]) -> Iterator[None]:
        """Within the block, `hook` is called (from any thread, perhaps more than once) when the read is to end."""
        with self._guard:
            self._hooks.append(hook)
        try:
            if self.is_set():
                hook()
            yield
        finally:
            with self._guard:
                self._hooks.remove(hook)


class Held(Protocol):
    """Bytes in place. They neither move nor change before `release`, which is idempotent."""

    @property
    def data(self) -> memoryview: ...

    @property
    def verified(self) -> bool:
        """These very bytes were found good before in this process."""
        ...

    def mark_verified(self) -> None: ...

    def release(self) -> None: ...


class MemoryHeld:
    """Bytes in this process's memory alone."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.verified = False

    def mark_verified(self) -> None:
        self.verified = True

    def release(self) -> None:
        """Memory goes when the last view of it goes."""


class Source(Protocol):
    """What can be read. See the module."""

    @property
    def kind(self) -> TierKind: ...

    def get(self, key: ObjectKey, size: int, *, within: float, abort: Transfer | None = None) -> Held:
        """The object's bytes; `size` is what the caller expects. `abort`: see Transfer."""
        ...

    def stat(self, key: ObjectKey, *, within: float) -> Stored | None:
        """None: not there."""
        ...

    def reject(self, key: ObjectKey, error: ObjectError) -> None:
        """The bytes under `key` are damaged: counted, and moved aside where the tier can."""
        ...

    @property
    def meter(self) -> CostMeter:
        """What reading costs; `open_verified` feeds it."""
        ...

    def close(self) -> None:
        """Idempotent; later calls raise TierClosedError."""
        ...


class Tier(Source, Protocol):
    """What can be written too. See the module."""

    def put(self, key: ObjectKey, parts: Parts, *, within: float) -> Stored:
        """Makes the object durable (as far as the medium goes) unless it is there. TierFullError without room."""
        ...

    def remove(self, key: ObjectKey, *, within: float) -> None:
        """Idempotent. Held bytes stay valid."""
        ...


def size_of(parts: Parts) -> int:
    """Bytes of all parts."""
    return sum(part.nbytes for part in parts)
