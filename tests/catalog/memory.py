"""etcd and an object store in memory, for properties that need thousands of runs and faults between any two requests.

They do what `EtcdClient` and `ObjectStore` of the catalog do, at once and one request at a time, and tell a hook before
each request: it may raise (a crash) or let others work in between (a race). test_collect_crash.py holds the same code
against real servers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from services.catalog.etcd.client import Reads
from services.catalog.etcd.transaction import (
    MAX_OPERATIONS,
    Comparison,
    Delete,
    DeletePrefix,
    Exists,
    Get,
    GetPrefix,
    GetRange,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Read,
    Unchanged,
    UnchangedSince,
    prefix_end,
)
from services.catalog.store import Listed, Stat, StoreTarget, Upload

Hook = Callable[[], Awaitable[None]]


async def quiet() -> None:
    """A hook that does nothing."""


@dataclass
class Cluster:
    """What every client of one etcd shares."""

    keys: dict[bytes, KeyValue] = field(default_factory=dict)
    revision: int = 1
    history: dict[int, dict[bytes, KeyValue]] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    granted: int = 0

    def expire(self) -> None:
        """Every lease there is."""
        self.leases.clear()
        self._commit({key: None for key, kv in self.keys.items() if kv.lease})

    def _commit(self, changes: dict[bytes, KeyValue | None]) -> None:
        if not changes:
            return
        self.history[self.revision] = dict(self.keys)
        self.revision += 1
        for key, kv in changes.items():
            if kv is None:
                self.keys.pop(key, None)
            else:
                self.keys[key] = kv

    def transact(
        self, compare: Sequence[Comparison], success: Sequence[Operation], failure: Sequence[Operation]
    ) -> Outcome:
        assert max(len(compare), len(success), len(failure)) <= MAX_OPERATIONS
        succeeded = all(self._holds(comparison) for comparison in compare)
        reads: list[tuple[KeyValue, ...]] = []
        changes: dict[bytes, KeyValue | None] = {}
        for operation in success if succeeded else failure:
            reads.append(())
            match operation:
                case Put(key, value, lease):
                    assert key not in changes or changes[key] is None, "etcd refuses a key put twice"
                    before = self.keys.get(key)
                    created = before.create_revision if before else self.revision + 1
                    changes[key] = KeyValue(key, value, created, self.revision + 1, lease)
                case Delete(key):
                    if key in self.keys:
                        changes.setdefault(key, None)
                case DeletePrefix(prefix):
                    changes |= {key: None for key in self.keys if key.startswith(prefix)}
                case _:
                    reads[-1] = self._read(operation)
        self._commit(changes)
        return Outcome(succeeded, self.revision, tuple(reads))

    def _holds(self, comparison: Comparison) -> bool:
        match comparison:
            case Unchanged(key, revision):
                found = self.keys.get(key)
                return (found.mod_revision if found else 0) == revision
            case Exists(key):
                return key in self.keys
            case UnchangedSince(prefix, revision):
                return all(kv.mod_revision <= revision for key, kv in self.keys.items() if key.startswith(prefix))

    def _read(self, read: Read) -> tuple[KeyValue, ...]:
        keys = self.keys
        match read:
            case Get(key):
                return (keys[key],) if key in keys else ()
            case GetPrefix(prefix):
                return tuple(keys[key] for key in sorted(keys) if key.startswith(prefix))
            case GetRange(start, end, limit, descending, at_revision):
                if at_revision and at_revision != self.revision:
                    keys = self.history[at_revision]
                found = sorted((key for key in keys if start <= key < end), reverse=descending)
                return tuple(keys[key] for key in found[:limit])


@dataclass
class MemoryEtcd:
    """One client. blind: kinds of keys whose comparisons it forgets to send, a planted bug."""

    cluster: Cluster
    hook: Hook = quiet
    blind: frozenset[str] = frozenset()
    endpoint: str = "memory"

    async def transact(
        self,
        *,
        compare: Sequence[Comparison] = (),
        success: Sequence[Operation] = (),
        failure: Sequence[Operation] = (),
    ) -> Outcome:
        await self.hook()
        seen = [c for c in compare if _kind(c) not in self.blind]
        return self.cluster.transact(seen, tuple(success), tuple(failure))

    async def read(self, reads: Sequence[Read]) -> Reads:
        blocks = [reads[i : i + MAX_OPERATIONS] for i in range(0, len(reads), MAX_OPERATIONS)] or [()]
        outcomes = [await self.transact(success=block) for block in blocks]
        return Reads(tuple(r for o in outcomes for r in o.reads), min(o.revision for o in outcomes))

    async def scan(
        self, prefix: bytes, *, at_revision: int = 0, after: bytes = b"", page: int = 3
    ) -> AsyncGenerator[tuple[KeyValue, ...]]:
        start = after + b"\0" if after else prefix
        while True:
            read = GetRange(start, prefix_end(prefix), page, at_revision=at_revision)
            (found,) = (await self.transact(success=(read,))).reads
            if found:
                yield found
            if len(found) < page:
                return
            start = found[-1].key + b"\0"

    async def grant_lease(self, ttl_s: int) -> tuple[int, int]:
        await self.hook()
        self.cluster.granted += 1
        self.cluster.leases.add(self.cluster.granted)
        return self.cluster.granted, ttl_s

    async def extend_lease(self, lease: int) -> int:
        return 15 if lease in self.cluster.leases else 0

    async def revoke_lease(self, lease: int) -> None:
        await self.hook()
        self.cluster.leases.discard(lease)
        self.cluster._commit({key: None for key, kv in self.cluster.keys.items() if kv.lease == lease})


@dataclass
class MemoryStore:
    """One client of the shared `objects`: key → (body, modified in unix ms)."""

    objects: dict[str, tuple[bytes, int]]
    now_ms: Callable[[], int]
    hook: Hook = quiet
    target: StoreTarget = field(default_factory=lambda: StoreTarget("memory", "segue", "", ""))

    async def stat(self, key: str) -> Stat | None:
        await self.hook()
        return Stat(len(self.objects[key][0]), "etag") if key in self.objects else None

    async def read(self, key: str, offset: int = 0, length: int = 0) -> bytes | None:
        await self.hook()
        if key not in self.objects:
            return None
        body = self.objects[key][0]
        return body[offset : offset + length] if length else body[offset:]

    async def list(self, prefix: str) -> AsyncGenerator[tuple[Listed, ...]]:
        after = ""
        while True:
            await self.hook()
            keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)[:4]
            if keys:
                yield tuple(Listed(key, len(self.objects[key][0]), self.objects[key][1]) for key in keys)
            if len(keys) < 4:
                return
            after = keys[-1]

    async def uploads(self, prefix: str) -> AsyncGenerator[tuple[Upload, ...]]:
        """None are under way in this world."""
        await self.hook()
        for _ in ():
            yield ()

    async def remove(self, key: str) -> None:
        await self.hook()
        self.objects.pop(key, None)

    async def put(self, key: str, body: bytes) -> None:
        await self.hook()
        self.objects[key] = (body, self.now_ms())

    async def put_if_absent(self, key: str, body: bytes) -> None:
        await self.hook()
        self.objects.setdefault(key, (body, self.now_ms()))


def _kind(comparison: Comparison) -> str:
    key = comparison.prefix if isinstance(comparison, UnchangedSince) else comparison.key
    return key.decode().split("/")[1]
