"""Decisions on their way to the catalog: a bounded queue, one owned task, batches by count, size and time.

Nothing here is waited for by a request. `add` is a few instructions; what costs (a message with up to 64 candidates) is
done by the task, a record at a time between other work. While the catalog is away the batch in hand is offered again
with growing, jittered pauses and the queue behind it fills; when it is full the oldest decision goes, counted. A batch
the catalog took but whose answer was lost is sealed again under the same name: the same records are the same object.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass, field

import grpc

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc
from libs.controller.router_effects import Decision
from libs.service.logs import get_logger
from services.router.clock import now_ms
from services.router.decision_records import record_of

_BATCH_RECORDS = 500
_BATCH_BYTES = 1 << 20
"""Of the messages; the last record of a batch may exceed it."""
_QUEUED_CANDIDATES = 64_000
"""Ranked candidates in the queue, all decisions together: some 50 MiB."""
_CALL_S = 5.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0

_REFUSED = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})
"""Answers that will be the same next time."""

log = get_logger(__name__)


@dataclass
class BatchCounters:
    """Exported as metrics."""

    waiting: int = field(default=0, metadata={"help": "Decisions not yet appended", "kind": "gauge"})
    appended: int = field(default=0, metadata={"help": "Decisions the catalog has sealed"})
    batches: int = field(default=0, metadata={"help": "Batches the catalog has sealed"})
    dropped: int = field(default=0, metadata={"help": "Decisions never appended: the queue was full, or the end came"})
    refused: int = field(default=0, metadata={"help": "Decisions the catalog refused as malformed"})
    failures: int = field(default=0, metadata={"help": "Calls to append a batch that failed and were repeated"})


@dataclass(frozen=True, slots=True)
class _Waiting:
    decision: Decision
    added_s: float  # of the loop
    decided_ms: int  # unix


class DecisionBatches:
    """See the module. `queue`: decisions that may wait, 0 = none is appended. `interval_s`: longest wait of one."""

    def __init__(self, channel: grpc.aio.Channel, router: str, queue: int, interval_s: float) -> None:
        self.counters = BatchCounters()
        self._stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._router = router
        self._limit, self._interval_s = queue, interval_s
        self._queue: deque[_Waiting] = deque()
        self._candidates = 0
        self._batch: list[catalog_pb2.DecisionRecord] = []
        self._wake = asyncio.Event()
        self._ending = asyncio.Event()
        self._done = asyncio.Event()

    def add(self, decision: Decision) -> None:
        """Never waits."""
        if not self._limit:
            return
        decided_ms = round(time.time() * 1_000 - (now_ms() - decision.decided_ms))
        self._queue.append(_Waiting(decision, asyncio.get_running_loop().time(), decided_ms))
        self._candidates += len(decision.ranked)
        while len(self._queue) > self._limit or self._candidates > _QUEUED_CANDIDATES:
            self._pop()
            self.counters.dropped += 1
        self._count()
        if len(self._queue) == 1 or len(self._queue) >= _BATCH_RECORDS:
            self._wake.set()

    async def run(self) -> None:
        """Until `flush` has emptied it, or cancelled."""
        failures = 0
        while True:
            if not self._batch:
                await self._due()
                if not self._queue:
                    break
                await self._fill()
            if await self._append():
                failures = 0
                continue
            failures += 1
            await self._pause(failures)
        self._done.set()

    async def flush(self, within_s: float) -> None:
        """Sends what waits, for so long; what is left then is dropped. Nothing added later is sent."""
        self._ending.set()
        self._wake.set()
        try:
            async with asyncio.timeout(within_s):
                await self._done.wait()
        except TimeoutError:
            left = len(self._batch) + len(self._queue)
            self.counters.dropped += left
            log.warning("decisions are dropped at the end: the catalog did not take them in time", decisions=left)
            self._batch, self._candidates = [], 0
            self._queue.clear()
        self._limit = 0
        self._count()

    async def _due(self) -> None:
        """Waits until a batch is full or its oldest decision old enough; at the end for nothing."""
        loop = asyncio.get_running_loop()
        while not self._ending.is_set() and len(self._queue) < _BATCH_RECORDS:
            left = self._queue[0].added_s + self._interval_s - loop.time() if self._queue else None
            if left is not None and left <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _fill(self) -> None:
        """Takes the oldest decisions into a batch, letting others run between any two."""
        size = 0
        while self._queue and len(self._batch) < _BATCH_RECORDS and size < _BATCH_BYTES:
            oldest = self._pop()
            record = record_of(oldest.decision, self._router, oldest.decided_ms)
            size += record.ByteSize()
            self._batch.append(record)
            await asyncio.sleep(0)

    async def _append(self) -> bool:
        """Whether the batch in hand is done with."""
        count = len(self._batch)
        try:
            await self._stub.AppendDecisions(catalog_pb2.AppendDecisionsRequest(records=self._batch), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSED:
                self.counters.failures += 1
                log.debug("decisions are not appended yet", code=error.code().name, detail=error.details())
                return False
            self.counters.refused += count
            log.error("the catalog refused decisions", decisions=count, detail=error.details())
        else:
            self.counters.appended += count
            self.counters.batches += 1
        self._batch = []
        self._count()
        return True

    async def _pause(self, failures: int) -> None:
        longest = _FIRST_PAUSE_S if self._ending.is_set() else _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16)
        longest = min(_LONGEST_PAUSE_S, longest)
        seconds = random.uniform(longest / 2, longest)  # noqa: S311 - it spreads, it guards nothing
        if self._ending.is_set():
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        except TimeoutError:
            return

    def _pop(self) -> _Waiting:
        oldest = self._queue.popleft()
        self._candidates -= len(oldest.decision.ranked)
        return oldest

    def _count(self) -> None:
        self.counters.waiting = len(self._queue) + len(self._batch)
