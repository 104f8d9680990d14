"""What the steps of one collection share: what it may touch, how it writes, what it has done so far."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.lock import Held
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import Comparison, Get, Operation, Outcome
from services.catalog.facts.errors import CollectionLostError
from services.catalog.facts.keys import Keys
from services.catalog.store import ObjectStore


class Step(Enum):
    """Every moment between two effects of a collection: what has just been done."""

    LOCKED = "locked"
    MARKED = "marked"
    FACTS_REMOVED = "facts-removed"
    ORPHANS_CONDEMNED = "orphans-condemned"
    DELETION_ANNOUNCED = "deletion-announced"
    OBJECT_DELETED = "object-deleted"
    DELETION_RECORDED = "deletion-recorded"
    RECORD_DROPPED = "record-dropped"
    DIRECTORIES_NOTED = "directories-noted"
    REPLICAS_REMOVED = "replicas-removed"
    DIRECTORY_FORGOTTEN = "directory-forgotten"
    DECISIONS_UNINDEXED = "decisions-unindexed"
    DECISIONS_DELETED = "decisions-deleted"
    UPLOAD_ABORTED = "upload-aborted"


Reached = Callable[[Step], Awaitable[None]]


async def unobserved(step: Step) -> None:
    """The hook of a collection that nobody watches."""


@dataclass(frozen=True, slots=True)
class Limits:
    """grace_ms: between the last fact's end and the bytes'; directory_days, decision_days: retention of those."""

    grace_ms: int
    directory_days: int
    decision_days: int


@dataclass(slots=True)
class Run:
    """One collection. now_ms: the cut-off, unix ms, read before anything is marked. In a dry run nothing is written."""

    etcd: EtcdClient
    keys: Keys
    store: ObjectStore
    limits: Limits
    held: Held | None
    now_ms: int
    dry: bool
    reached: Reached = unobserved
    totals: pb.CollectTotals = field(default_factory=pb.CollectTotals)
    fresh: list[pb.Collected] = field(default_factory=list)
    """Not yet reported."""
    would_go: set[tuple[str, str]] = field(default_factory=set)
    """In a dry run: the chunks (fingerprint, hash) that a run would have removed by now."""
    phase: str = ""

    def report(self) -> pb.CollectGarbageResponse:
        """What is new since the last report."""
        answer = pb.CollectGarbageResponse(phase=self.phase, collected=self.fresh, totals=self.totals)
        self.fresh = []
        return answer

    def check(self) -> None:
        """Raises CollectionLostError."""
        if self.held is not None:
            self.held.check()

    async def write(self, compare: Sequence[Comparison], operations: Sequence[Operation]) -> Outcome:
        """A transaction that is conditional on the lock too; not succeeded: one of `compare` did not hold.

        Raises CollectionLostError.
        """
        assert self.held is not None and not self.dry, "a dry run writes nothing"
        self.held.check()
        lock = self.held.comparison
        outcome = await self.etcd.transact(compare=[lock, *compare], success=operations, failure=[Get(lock.key)])
        if not outcome.succeeded:
            found = outcome.reads[0]
            if not found or found[0].mod_revision != lock.mod_revision:
                raise CollectionLostError("its lock was taken by another, or expired")
        return outcome
