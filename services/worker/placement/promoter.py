"""The promoter: brings what demands say to this worker's chunk directory, and drops what has no facts any more.

It watches its directory's demands in the catalog; each map replaces the one before it. Highest priority first, few at a
time, on threads of low priority and bounded by bytes: never on the token path. A copy is taken from host memory or the
object store, verified by its key (content id, names, and that its tokens hash to its name), written and synced; only
then is its replica *ready*. Before that it is *copying*, after a fault *failed*, and the demand rests before the next
try. A demand whose every object is there is withdrawn; so is one whose chunk is no fact any more. Absence of demand
deletes nothing: only what the catalog names as collected goes, and is then confirmed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

from libs.chunks.errors import TierError
from libs.chunks.gate import ByteGate
from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.chunks.object_store import ObjectStore
from libs.chunks.tier import Source, Transfer
from libs.continuation.errors import IdentityError, ObjectError
from libs.continuation.keys import ObjectKey, parse_key
from libs.continuation.objects import open_by_key
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.logs import get_logger
from services.worker.checkpoint.replicas import ReplicaReporter
from services.worker.placement.settings import PlacementCounts, PromoterSettings
from services.worker.threads import low_priority

log = get_logger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_MOST_CONFIRMED = 1_000

_Chunk = tuple[str, str]
"""(fingerprint, hash)."""


class Promoter:
    """Made inside the event loop. `run` works until cancelled, then waits for the copies under way."""

    def __init__(
        self,
        catalog: grpc.aio.Channel,
        local: LocalDirectory,
        memory: HostMemory | None,
        store: ObjectStore,
        reporter: ReplicaReporter,
        settings: PromoterSettings,
        counts: PlacementCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stub = catalog_pb2_grpc.CatalogStub(catalog)  # type: ignore[no-untyped-call, unused-ignore]
        self._local, self._memory, self._store, self._reporter = local, memory, store, reporter
        self._settings, self.counts, self._clock = settings, counts, clock
        self._gate = ByteGate(settings.limit)
        self._pool = ThreadPoolExecutor(settings.copies, thread_name_prefix="promote", initializer=low_priority)
        self._wanted: dict[_Chunk, pb.Demand] = {}
        self._removals: dict[_Chunk, pb.Removal] = {}
        self._resting: dict[_Chunk, float] = {}
        self._busy: set[_Chunk] = set()
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Watches and copies."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(), name="demands")
                tasks.create_task(self._remove(), name="removals")
                for number in range(self._settings.copies):
                    tasks.create_task(self._work(), name=f"promoter {number}")
        finally:
            await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)

    # --- what is wanted ---

    async def _watch(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async for found in self._stub.WatchDemands(pb.WatchDemandsRequest(node=self._local.node)):
                    pause = _FIRST_PAUSE_S
                    await self.learn(found)
            except grpc.aio.AioRpcError as error:
                log.debug("demands are not watched", error=error.code().name)
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause)  # noqa: S311 - spread
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    async def learn(self, found: pb.DemandMap) -> None:
        """Takes a whole map."""
        self._wanted = {(demand.fingerprint, demand.hash): demand for demand in found.demands}
        self._removals = {(gone.fingerprint, gone.hash): gone for gone in found.removals}
        self._resting = {chunk: until for chunk, until in self._resting.items() if chunk in self._wanted}
        self.counts.demands = len(self._wanted)
        async with self._changed:
            self._changed.notify_all()

    # --- copying ---

    async def _work(self) -> None:
        while True:
            demand = self._next()
            if demand is None:
                async with self._changed:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._until_rested()):
                            await self._changed.wait()
                continue
            chunk = demand.fingerprint, demand.hash
            self._busy.add(chunk)
            try:
                await self._meet(demand)
            finally:
                self._busy.discard(chunk)

    def _next(self) -> pb.Demand | None:
        now = self._clock()
        for chunk, demand in self._wanted.items():
            if chunk not in self._busy and self._resting.get(chunk, 0.0) <= now:
                return demand
        return None

    def _until_rested(self) -> float:
        """Seconds until a demand that rests may be tried again; bounded, so that a clock that jumps does no harm."""
        return min([1.0, *(max(0.01, until - self._clock()) for until in self._resting.values())])

    async def _meet(self, demand: pb.Demand) -> None:
        chunk = demand.fingerprint, demand.hash
        if not demand.HasField("chunk"):
            self.counts.unmeetable += 1
            await self._withdraw(demand)
            return
        missing = [
            receipt
            for receipt in demand.chunk.receipts
            if not self._local.find(demand.fingerprint, demand.chunk.owner, demand.hash, receipt.group)
        ]
        brought = [await self._bring(demand, receipt) for receipt in missing]
        if all(brought):
            self.counts.met += bool(missing)
            self.counts.complete += not missing
            await self._withdraw(demand)
        else:
            self.counts.failed += 1
            self._resting[chunk] = self._clock() + self._settings.retry_s

    async def _bring(self, demand: pb.Demand, receipt: pb.Receipt) -> bool:
        """One object; whether it lies here now."""
        try:
            key = parse_key(receipt.key)
        except IdentityError as error:
            log.warning("a demand's receipt names no object", key=receipt.key, error=str(error))
            return False
        if (key.fingerprint, key.hash, key.group) != (demand.fingerprint, demand.hash, receipt.group):
            log.warning("a demand's receipt names another object", key=receipt.key)
            return False
        await self._gate.acquire(receipt.size)
        self.counts.copying += 1
        self.counts.copying_bytes = self._gate.used
        self._reporter.copying(key)
        try:
            await self._finished(key, receipt.size)
        except (TierError, ObjectError) as error:
            self._reporter.failed(key)
            log.warning("a demand is not met", chunk=demand.hash[:16], group=receipt.group, error=str(error))
            return False
        except BaseException:
            # Ended in the middle; the copy may have got there all the same.
            if self._local.find(key.fingerprint, key.owner, key.hash, key.group):
                self._reporter.present(key)
            else:
                self._reporter.failed(key)
            raise
        finally:
            self._gate.release(receipt.size)
            self.counts.copying -= 1
            self.counts.copying_bytes = self._gate.used
        self._reporter.present(key)
        self.counts.copied += 1
        self.counts.copied_bytes += receipt.size
        return True

    async def _finished(self, key: ObjectKey, size: int) -> None:
        """The copy's thread; cancelled, it is ended and waited for."""
        transfer = Transfer()
        copy = asyncio.get_running_loop().run_in_executor(self._pool, self._copy, key, size, transfer)
        try:
            await asyncio.shield(copy)
        except asyncio.CancelledError:
            transfer.set()
            while not copy.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([copy])
            raise

    def _copy(self, key: ObjectKey, size: int, transfer: Transfer) -> None:
        """From the first source that has it whole. Raises TierError, ObjectError."""
        sources: Sequence[Source] = [source for source in (self._memory, self._store) if source is not None]
        for source in sources:
            try:
                self._copy_from(source, key, size, transfer)
                return
            except (TierError, ObjectError):
                if source is sources[-1] or transfer.is_set():
                    raise

    def _copy_from(self, source: Source, key: ObjectKey, size: int, transfer: Transfer) -> None:
        held = source.get(key, size, within=self._settings.copy_timeout_s, abort=transfer)
        try:
            try:
                open_by_key(held.data, key).release()
            except ObjectError as error:
                self.counts.damaged += 1
                source.reject(key, error)
                raise
            self._local.put(key, [held.data], within=self._settings.copy_timeout_s)
        finally:
            held.release()

    async def _withdraw(self, demand: pb.Demand) -> None:
        """What cannot be withdrawn now lapses with its lease. A map from before the withdrawal may bring it once more:
        then it is found complete, at no cost.
        """
        self._wanted.pop((demand.fingerprint, demand.hash), None)
        self.counts.demands = len(self._wanted)
        one = pb.DemandId(fingerprint=demand.fingerprint, hash=demand.hash, node=self._local.node)
        with suppress(grpc.aio.AioRpcError):
            await self._stub.RemoveDemands(
                pb.RemoveDemandsRequest(demands=[one]), timeout=self._settings.call_timeout_s
            )

    # --- removing ---

    async def _remove(self) -> None:
        while True:
            if not self._removals:
                async with self._changed:
                    await self._changed.wait()
                continue
            removals = list(self._removals.values())[:_MOST_CONFIRMED]
            dropping = asyncio.get_running_loop().run_in_executor(self._pool, self._drop, removals)
            self.counts.removed += await dropping
            chunks = [pb.ChunkId(fingerprint=gone.fingerprint, hash=gone.hash) for gone in removals]
            try:
                await self._stub.ConfirmRemovals(
                    pb.ConfirmRemovalsRequest(node=self._local.node, chunks=chunks),
                    timeout=self._settings.call_timeout_s,
                )
            except grpc.aio.AioRpcError:
                await asyncio.sleep(random.uniform(0.5, 1.0) * _LONGEST_PAUSE_S)  # noqa: S311 - spread
                continue
            for gone in removals:
                self._removals.pop((gone.fingerprint, gone.hash), None)

    def _drop(self, removals: Sequence[pb.Removal]) -> int:
        names = {(gone.fingerprint, gone.owner, gone.hash) for gone in removals}
        dropped = 0
        for tier in (self._memory, self._local):
            for key in tier.objects() if tier is not None else ():
                if (key.fingerprint, key.owner, key.hash) in names and tier is not None:
                    with suppress(TierError):
                        tier.remove(key, within=self._settings.call_timeout_s)
                        dropped += 1
        return dropped
