"""A checkpointer that can be switched between rounds: off, to the local tier alone, to everything, or saturated.

What a route's prefill completes is held back until the round says go, so that all of it is captured while lanes decode.
Only the store and the catalog are stood in for, and only where the mode leaves them out; pages, staging, encoding,
hashing and files are the real ones.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from libs.chunks.tier import Parts, Stored, size_of
from libs.continuation.keys import ObjectKey
from services.worker.checkpoint.capture import largest_header
from services.worker.checkpoint.checkpointer import ChunkCheckpointer
from services.worker.checkpoint.mover import Mover
from services.worker.handlers import CheckpointCounts, CheckpointRange, PageLeases

_SLOW_PUT_S = 0.15


class Mode(enum.Enum):
    """Where checkpoints go in a round."""

    NONE = "none"
    LOCAL = "local"
    STORE = "store"
    SATURATED = "saturated"


class NoStore:
    """Takes every object at once, or after a while, and keeps none. As the mover uses an `ObjectStore`."""

    bucket = "none"

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s

    def put(self, key: ObjectKey, parts: Parts, *, within: float) -> Stored:
        """See ObjectStore.put."""
        time.sleep(min(self._after_s, within))
        return Stored(size_of(parts), "")


class NoFacts:
    """Knows of nothing and takes everything. As the checkpointer uses `CatalogFacts`."""

    async def standing(self, run: Sequence[CheckpointRange]) -> dict[str, frozenset[str]]:
        """See CatalogFacts."""
        return {}

    async def publish(self, batch: Sequence[object], node: str) -> None:
        """See CatalogFacts."""


@dataclass(frozen=True)
class _Ways:
    """What a checkpointer works with in one mode."""

    mover: Mover
    facts: object
    staging_bytes: int


class SwitchedCheckpointer:
    """Implements `handlers.Checkpointer` over the real one. `go` lets what was held back, and what follows, through."""

    def __init__(self, real: ChunkCheckpointer, leases: PageLeases) -> None:
        self._real, self._leases = real, leases
        self.mode = Mode.NONE
        self.held: list[CheckpointRange] = []
        self._open = False
        local, put_s = real._mover._local, real._settings.put_timeout_s
        layout = real._capturer._layout
        # One chunk and no more: the next one finds staging full until that one is through.
        one = 256 * layout.bytes_per_token + sum(4 * 256 + largest_header(group) for group in layout.groups)
        usual = real._settings.staging_bytes
        self._ways = {
            Mode.LOCAL: _Ways(Mover(None, local, NoStore(0.0), put_s), NoFacts(), usual),  # type: ignore[arg-type]
            Mode.STORE: _Ways(real._mover, real._facts, usual),
            Mode.SATURATED: _Ways(Mover(None, local, NoStore(_SLOW_PUT_S), put_s), NoFacts(), one + one // 2),  # type: ignore[arg-type]
        }

    def switch(self, mode: Mode) -> None:
        """For the round that begins; nothing may be pending."""
        self.mode, self._open = mode, False
        if mode is not Mode.NONE:
            ways = self._ways[mode]
            self._real._mover, self._real._facts = ways.mover, ways.facts  # type: ignore[assignment]
            self._real._settings = replace(self._real._settings, staging_bytes=ways.staging_bytes)

    def go(self) -> None:
        """Everything held back is offered now."""
        self._open = True
        held, self.held = self.held, []
        for what in held:
            self.offer(what)

    def offer(self, what: CheckpointRange) -> None:
        """See Checkpointer."""
        if not self._open:
            self.held.append(what)
        elif self.mode is Mode.NONE:
            self._leases.settled(what, durable=False)
        else:
            self._real.offer(what)

    def counts(self) -> CheckpointCounts:
        """See Checkpointer."""
        return self._real.counts()

    async def drain(self, seconds: float) -> int:
        """See Checkpointer."""
        self.go()
        return await self._real.drain(seconds)

    async def aclose(self) -> None:
        """See Checkpointer."""
        await self._real.aclose()
