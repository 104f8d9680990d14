"""Tells the catalog what lies in this worker's chunk directory: batched, late, and off every path.

Facts may lag behind the directory, never the other way round for long: a file that is gone is reported as soon as the
catalog can be reached, and a restore looks into the directory itself anyway. While the catalog is away the last word
about each object is kept, up to a bound, beyond which the oldest are forgotten, counted.

A claim about a chunk that is no fact (its worker stopped between file and fact, or it was collected) is dropped,
counted: repeating it is of no use. Should that chunk become a fact here, its publication records the replica; if
another worker was faster, the copy that is kept then is announced.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from libs.continuation.keys import ObjectKey
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.worker.checkpoint.facts import REPLICA_BATCH, CatalogAwayError, CatalogFacts, RefusedError

_LIMIT = 100_000
_GATHER_S = 0.25
_LONGEST_PAUSE_S = 5.0

_Place = tuple[str, str, str]


@dataclass
class ReplicaCounts:
    """Counters of replica facts."""

    sent: int = field(default=0, metadata={"help": "Replica facts recorded in the catalog"})
    waiting: int = field(default=0, metadata={"help": "Replica facts not yet sent", "kind": "gauge"})
    unknown: int = field(default=0, metadata={"help": "Replica facts dropped: of chunks the catalog does not know"})
    forgotten: int = field(default=0, metadata={"help": "Replica facts given up: too many waiting, or refused"})


async def _whole(call: Coroutine[object, object, frozenset[str]]) -> frozenset[str]:
    """The call's result. Cancelled, it is still waited for, to its deadline: one that is given up half-way may be
    carried out after the next one, and then an old word about an object would stand.
    """
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


class ReplicaReporter:
    """`present` and `gone` may be called from any thread. `run` is the task that sends."""

    def __init__(self, facts: CatalogFacts, node: str, others: Callable[[ObjectKey], Iterable[ObjectKey]]) -> None:
        self._facts, self._node, self._others = facts, node, others
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: OrderedDict[_Place, tuple[str, pb.ReplicaState]] = OrderedDict()
        self._wake = asyncio.Event()
        self._signalled = False
        self.counts = ReplicaCounts()

    def present(self, key: ObjectKey) -> None:
        """The object lies in the directory, synced."""
        self._note((key.fingerprint, key.hash, key.group), key.content_id, pb.REPLICA_STATE_READY)

    def copying(self, key: ObjectKey) -> None:
        """It is being written to meet a demand."""
        self._note((key.fingerprint, key.hash, key.group), key.content_id, pb.REPLICA_STATE_COPYING)

    def failed(self, key: ObjectKey) -> None:
        """That did not succeed."""
        self._note((key.fingerprint, key.hash, key.group), key.content_id, pb.REPLICA_STATE_FAILED)

    def gone(self, key: ObjectKey) -> None:
        """It does not any more; another computation's may still."""
        other = next(iter(self._others(key)), None)
        if other is not None:
            self.present(other)
        else:
            self._note((key.fingerprint, key.hash, key.group), key.content_id, pb.REPLICA_STATE_REMOVED)

    def _note(self, place: _Place, content: str, state: pb.ReplicaState) -> None:
        with self._lock:
            self._put(place, content, state)
            signal, self._signalled = not self._signalled, True
        if signal and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def announce(self, keys: Iterable[ObjectKey]) -> None:
        """Many objects that are there, at once."""
        for key in keys:
            self.present(key)

    def _put(self, place: _Place, content: str, state: pb.ReplicaState) -> None:
        self._waiting[place] = (content, state)
        self._waiting.move_to_end(place)
        if len(self._waiting) > _LIMIT:
            self._waiting.popitem(last=False)
            self.counts.forgotten += 1
        self.counts.waiting = len(self._waiting)

    async def run(self) -> None:
        """Sends until cancelled."""
        pause = _GATHER_S
        while True:
            await self._wake.wait()
            await asyncio.sleep(pause)
            spread = random.uniform(0.5, 1.0)  # noqa: S311
            pause = _GATHER_S if await self.flush() else min(_LONGEST_PAUSE_S, 2 * (pause + _GATHER_S) * spread)

    async def flush(self) -> bool:
        """Sends what waits; False: the catalog is away, and what was not sent waits on."""
        while batch := self._take():
            updates = [
                pb.ReplicaUpdate(
                    fingerprint=fingerprint,
                    hash=hash,
                    replica=pb.Replica(node=self._node, group=group, state=state, content_id=content),
                )
                for (fingerprint, hash, group), (content, state) in batch.items()
            ]
            try:
                unknown = await _whole(self._facts.set_replicas(updates))
            except RefusedError:
                self.counts.forgotten += len(updates)
            except (CatalogAwayError, asyncio.CancelledError) as error:
                self._put_back(batch)
                if isinstance(error, asyncio.CancelledError):
                    raise
                return False
            else:
                dropped = sum(update.hash in unknown for update in updates)
                self.counts.unknown += dropped
                self.counts.sent += len(updates) - dropped
        return True

    def _take(self) -> dict[_Place, tuple[str, pb.ReplicaState]]:
        with self._lock:
            batch: dict[_Place, tuple[str, pb.ReplicaState]] = {}
            while self._waiting and len(batch) < REPLICA_BATCH:
                place, state = self._waiting.popitem(last=False)
                batch[place] = state
            if not self._waiting:
                self._wake.clear()
                self._signalled = False
            self.counts.waiting = len(self._waiting)
            return batch

    def _put_back(self, batch: dict[_Place, tuple[str, pb.ReplicaState]]) -> None:
        with self._lock:
            for place, state in reversed(batch.items()):
                if place not in self._waiting:  # a later word has precedence
                    self._waiting[place] = state
                    self._waiting.move_to_end(place, last=False)
            self.counts.waiting = len(self._waiting)
            self._signalled = True
        self._wake.set()
