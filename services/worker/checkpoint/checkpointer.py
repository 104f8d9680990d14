"""Runs the checkpoint pipeline: one task per step, each waking when the ledger changes.

    ask the catalog → capture (one thread, low priority) → file and object (few threads) → publish (batched)

Staging is admitted by bytes before a range is captured and given back when its objects are durable or nobody wants them
any more. A range that finds it full is skipped, counted, and stays the next to be tried: chains stay in order. While
store or catalog are away, each step tries again with backoff, until the range's patience is over. What was given up so
is offered once more by a drain: this worker may be the only one that has it.

Everything on the event loop is bookkeeping; copies, hashes, files and sockets are on the threads.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from libs.chunks.errors import TierError
from libs.continuation.keys import ObjectKey
from libs.continuation.layout import Layout
from services.worker.checkpoint.capture import Busy, Captured, Capturer
from services.worker.checkpoint.facts import CatalogAwayError, CatalogFacts, RefusedError
from services.worker.checkpoint.ledger import End, Entry, Ledger, Settlement, Stage
from services.worker.checkpoint.mover import Moved, Mover
from services.worker.checkpoint.settings import CheckpointMetrics, CheckpointSettings
from services.worker.checkpoint.spans import Spans
from services.worker.handlers import CheckpointCounts, CheckpointRange, PageLeases
from services.worker.threads import low_priority

T = TypeVar("T")

_TICK_S = 0.5
_BUSY_S = 0.005
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_COPIES_LIMIT = 256
_GIVEN_UP_LIMIT = 4_096
_GIVEN_UP = frozenset({End.TOO_LATE, End.ORPHAN, End.QUEUE_FULL})


class ChunkCheckpointer:
    """Implements `Checkpointer`. Made inside the event loop.

    node: UUID of the chunk directory, empty without one. kept: called for each object newly in it whose fact stands.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        capturer: Capturer,
        mover: Mover,
        facts: CatalogFacts,
        leases: PageLeases,
        node: str,
        kept: Callable[[ObjectKey], None],
        settings: CheckpointSettings,
        metrics: CheckpointMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = frozenset(group.name for group in layout.groups)
        self._capturer, self._mover, self._facts, self._leases = capturer, mover, facts, leases
        self._node, self._kept, self._settings, self._clock = node, kept, settings, clock
        self.metrics = metrics
        self._ledger = Ledger(settings.pending_ranges)
        self._captures = ThreadPoolExecutor(1, thread_name_prefix="capture", initializer=low_priority)
        self._uploads = ThreadPoolExecutor(settings.uploads, thread_name_prefix="upload", initializer=low_priority)
        self._spans = Spans()
        self._staged = 0
        self._moved: dict[str, Moved] = {}
        self._given_up: OrderedDict[str, CheckpointRange] = OrderedDict()
        self._copies: deque[CheckpointRange] = deque(maxlen=_COPIES_LIMIT)
        self._wakes = [asyncio.Event() for _ in range(3)]
        self._idle = asyncio.Event()
        self._idle.set()
        self._movers: set[asyncio.Task[None]] = set()
        self._closed = False
        self._steps = [
            asyncio.create_task(step(), name=f"checkpoint {step.__name__}")
            for step in (self._ask, self._capture, self._publish, self._expire)
        ]

    # ----------------------------------------------------------------------------------------------------- the protocol

    def offer(self, what: CheckpointRange) -> None:
        """See `Checkpointer.offer`."""
        self.metrics.offered += 1
        self._spans.offered(what)
        if self._closed:
            self._apply([Settlement(what, End.CLOSED)])
        else:
            self._apply(self._ledger.offer(what, self._clock()))

    def counts(self) -> CheckpointCounts:
        """See `Checkpointer.counts`."""
        return CheckpointCounts(self._ledger.offers, self.metrics.dropped, self.metrics.lost)

    async def drain(self, seconds: float) -> int:
        """See `Checkpointer.drain`."""
        again = deque(self._given_up.values())
        self._given_up.clear()
        lost = self.metrics.lost
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
                while again:
                    for _ in range(min(len(again), self._settings.pending_ranges)):
                        self.metrics.offered_again += 1
                        self.offer(again.popleft())
                    await self._idle.wait()
        return self._ledger.offers + self.metrics.lost - lost + len(again)

    async def aclose(self) -> None:
        """See `Checkpointer.aclose`. Objects being written are finished or fail within their timeout."""
        if self._closed:
            return
        self._closed = True
        tasks = [*self._steps, *self._movers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        for pool in (self._captures, self._uploads):
            pool.shutdown(wait=False, cancel_futures=True)
            await loop.run_in_executor(None, pool.shutdown)
        for entry in self._ledger.remaining():
            self._apply(self._ledger.settle(entry, End.CLOSED))

    # --------------------------------------------------------------------------------------------------------- settling

    def _apply(self, settlements: Sequence[Settlement]) -> None:
        metrics = self.metrics
        for settlement in settlements:
            end = settlement.end
            self._moved.pop(settlement.what.hash, None)
            self._spans.settled(settlement)
            self._remember(settlement)
            if end.durable:
                metrics.durable += 1
                metrics.known += end is End.KNOWN
            else:
                metrics.lost += 1
                metrics.lost_not_resident += end is End.NOT_RESIDENT
                metrics.lost_too_late += end is End.TOO_LATE
                metrics.lost_refused += end is End.REFUSED
                metrics.lost_orphans += end is End.ORPHAN
                metrics.lost_queue_full += end is End.QUEUE_FULL
            self._leases.settled(settlement.what, durable=end.durable)
        self._wake()

    def _remember(self, settlement: Settlement) -> None:
        """What a drain should offer again: bounded, the oldest chains first out."""
        what = settlement.what
        if settlement.end in _GIVEN_UP:
            self._given_up[what.hash] = what
            if len(self._given_up) > _GIVEN_UP_LIMIT:
                self._given_up.popitem(last=False)
        elif settlement.end.durable:
            self._given_up.pop(what.hash, None)

    def _wake(self) -> None:
        self.metrics.pending = len(self._ledger)
        self.metrics.staged_bytes = self._staged
        if len(self._ledger):
            self._idle.clear()
        else:
            self._idle.set()
        for wake in self._wakes:
            wake.set()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for entry in self._ledger.late(self._clock() - self._settings.patience_s):
                self._apply(self._ledger.settle(entry, End.TOO_LATE))

    # -------------------------------------------------------------------------------------------------------------- ask

    async def _ask(self) -> None:
        pause = _Pause()
        while True:
            run = self._ledger.to_ask(self._settings.batch)
            if not run:
                await _woken(self._wakes[0])
                continue
            try:
                standing = await self._facts.standing([entry.what for entry in run])
            except CatalogAwayError as error:
                self.metrics.catalog_failed += 1
                self._ledger.back(run)
                await pause.wait(error.retry_after_s)
                continue
            except RefusedError:
                # It cannot say; then what is offered is uploaded, and publishing finds out.
                self.metrics.unasked += len(run)
                standing = {}
            except asyncio.CancelledError:
                self._ledger.back(run)
                raise
            pause.reset()
            for entry in run:
                settlements = self._ledger.asked(entry, standing.get(entry.what.hash, ()), self._groups)
                if settlements and self._mover.keeps:
                    self._copies.append(entry.what)
                self._apply(settlements)
            self._wake()

    # ---------------------------------------------------------------------------------------------------------- capture

    async def _capture(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            entry = self._ledger.next_wanted()
            if entry is None:
                if self._copies and not len(self._ledger):
                    await self._copy_only(self._copies.popleft())
                else:
                    await _woken(self._wakes[1])
                continue
            need = self._capturer.size(entry.what, entry.standing)
            if self._staged + need > self._settings.staging_bytes:
                self.metrics.dropped += self._ledger.skip(entry)
                await _woken(self._wakes[1])
                continue
            entry.stage = Stage.CAPTURING
            self._staged += need
            work = loop.run_in_executor(self._captures, self._capturer.capture, entry.what, entry.standing)
            try:
                captured = await _finished(work)
            except BaseException:
                self._staged -= need
                raise
            self._captured(entry, captured, need)
            if isinstance(captured, Busy):
                await asyncio.sleep(_BUSY_S)

    def _captured(self, entry: Entry, captured: Captured | Busy | None, need: int) -> None:
        if isinstance(captured, Captured) and captured.objects:
            self.metrics.captured_bytes += captured.bytes
            self._staged += captured.bytes - need
            entry.stage = Stage.MOVING
            task = asyncio.create_task(self._move(entry, captured), name=f"checkpoint {entry.what.hash[:12]}")
            self._movers.add(task)
            task.add_done_callback(self._movers.discard)
            self._wake()
            return
        self._staged -= need
        if isinstance(captured, Busy):
            self._ledger.back([entry])
        else:
            # Nothing to add to a fact that stands is as good as having added it.
            end = End.NOT_RESIDENT if captured is None or not entry.standing else End.KNOWN
            self._apply(self._ledger.settle(entry, end))

    async def _copy_only(self, what: CheckpointRange) -> None:
        """The fact stands, by somebody else: a copy in our directory spares the next restore the object store."""
        need = self._capturer.size(what)
        if self._staged + need > self._settings.staging_bytes:
            return
        loop = asyncio.get_running_loop()
        self._staged += need
        try:
            captured = await _finished(loop.run_in_executor(self._captures, self._capturer.capture, what, ()))
            if isinstance(captured, Captured):
                for key in await _finished(loop.run_in_executor(self._uploads, self._mover.keep, captured)):
                    self._kept(key)
        finally:
            self._staged -= need
            self._wake()

    # ------------------------------------------------------------------------------------------------------------- move

    async def _move(self, entry: Entry, captured: Captured) -> None:
        loop, pause = asyncio.get_running_loop(), _Pause()
        self._spans.captured(entry.what, captured.bytes)
        try:
            local = await _finished(loop.run_in_executor(self._uploads, self._mover.keep, captured))
            if self._node:
                self.metrics.local_failed += len(captured.objects) - len(local)
            while not entry.settled:
                try:
                    receipts = await _finished(loop.run_in_executor(self._uploads, self._mover.upload, captured))
                except TierError:
                    self.metrics.put_failed += 1
                    await pause.wait(None)
                    continue
                if not entry.settled:
                    entry.stage = Stage.MOVED
                    small = Captured(captured.what, captured.tokens_sha256, ())
                    self._moved[entry.what.hash] = Moved(small, receipts, local)
                return
        finally:
            self._staged -= captured.bytes
            self._wake()

    # ---------------------------------------------------------------------------------------------------------- publish

    async def _publish(self) -> None:
        pause = _Pause()
        while True:
            batch = self._ledger.to_publish(self._settings.batch)
            if not batch:
                await _woken(self._wakes[2])
                continue
            try:
                await self._publish_all(batch)
            except CatalogAwayError as error:
                self.metrics.catalog_failed += 1
                self._ledger.back(batch)
                await pause.wait(error.retry_after_s)
            except asyncio.CancelledError:
                self._ledger.back(batch)
                raise
            else:
                pause.reset()

    async def _publish_all(self, batch: Sequence[Entry]) -> None:
        try:
            await self._publish_some(batch)
            return
        except RefusedError:
            if len(batch) == 1:
                self._apply(self._ledger.settle(batch[0], End.REFUSED))
                return
        # One of them is at fault; those before it need not suffer for it.
        for entry in batch:
            if entry.settled:
                continue
            try:
                await self._publish_some([entry])
            except RefusedError:
                self._apply(self._ledger.settle(entry, End.REFUSED))

    async def _publish_some(self, batch: Sequence[Entry]) -> None:
        moved = [self._moved[entry.what.hash] for entry in batch if not entry.settled]
        if not moved:
            return
        whole = all(len(found.local) == len(found.receipts) for found in moved)
        await self._facts.publish(moved, self._node if whole else "")
        for found in () if whole else moved:
            for key in found.local:
                self._kept(key)
        for entry in batch:
            self._apply(self._ledger.settle(entry, End.PUBLISHED))


class _Pause:
    """Backoff with jitter between attempts of one step."""

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE_S

    def reset(self) -> None:
        self._next = _FIRST_PAUSE_S

    async def wait(self, advised: float | None) -> None:
        spread = random.uniform(0.5, 1.0)  # noqa: S311
        await asyncio.sleep(min(_LONGEST_PAUSE_S, max(self._next * spread, advised or 0.0)))
        self._next = min(_LONGEST_PAUSE_S, self._next * 2)


async def _woken(event: asyncio.Event) -> None:
    await event.wait()
    event.clear()


async def _finished(work: asyncio.Future[T]) -> T:
    """The thread's result. Cancelled, it still waits for the thread: what the thread uses must stay."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise
