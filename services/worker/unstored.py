"""A worker without chunk bytes: nothing to restore from, nothing to checkpoint to, nothing for peers.

The echo worker's handlers. They keep the contract: a restore ends where it began, an offered range is settled as given
up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from libs.contracts.segue.v1 import worker_pb2
from libs.controller.protocol import TierCost
from services.worker.handlers import (
    CheckpointCounts,
    CheckpointRange,
    DiskUse,
    LandedNode,
    MemoryChanges,
    PageLeases,
    RestoreEnd,
    RestoreOutcome,
    RestorePlan,
)


class NoRestorer:
    """Every chunk is gone."""

    async def restore(
        self, plan: RestorePlan, landed: Callable[[LandedNode], None], stop: asyncio.Event
    ) -> RestoreOutcome:
        """See Restorer."""
        return RestoreOutcome(RestoreEnd.GONE, plan.nodes[0].node.chunk.start, "this worker keeps no chunks")

    async def aclose(self) -> None:
        """See Restorer."""


class NoCheckpointer:
    """Gives up every range at once, so that resident routes may be evicted."""

    def __init__(self, leases: PageLeases) -> None:
        self._leases = leases

    def offer(self, what: CheckpointRange) -> None:
        """See Checkpointer."""
        self._leases.settled(what, durable=False)

    def counts(self) -> CheckpointCounts:
        """Nothing is ever pending, dropped or lost: there was never a place for it."""
        return CheckpointCounts(0, 0, 0)

    async def drain(self, seconds: float) -> int:
        """See Checkpointer."""
        return 0

    async def aclose(self) -> None:
        """See Checkpointer."""


class NoChunks:
    """No local tier."""

    @property
    def node(self) -> str:
        """See LocalChunks."""
        return ""

    async def open(self, wanted: worker_pb2.FetchChunkRequest) -> AsyncGenerator[worker_pb2.FetchChunkResponse, None]:
        """See LocalChunks."""
        raise KeyError(wanted.hash)
        yield worker_pb2.FetchChunkResponse()

    def disk(self) -> DiskUse:
        """See LocalChunks."""
        return DiskUse(0, 0)


class NoMemory:
    """Nothing in host memory."""

    def since(self, version: int | None) -> MemoryChanges:
        """See MemoryResidency."""
        return MemoryChanges(0, {}, (), snapshot=version is None)

    def listen(self, came: Callable[[], None]) -> None:
        """See MemoryResidency."""


class NoTiers:
    """Nothing measured."""

    def tiers(self) -> Sequence[TierCost]:
        """See TierMeasurements."""
        return ()
