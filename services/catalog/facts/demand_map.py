"""What each chunk directory should hold and drop: two etcd watches per replica, any number of watchers.

As with the endpoint map, a watcher waits until its directory's part has changed since it last looked and gets the
newest there is; a slow one skips states and holds no queue. While etcd is away the last state stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.errors import EtcdError, EtcdUnavailableError
from services.catalog.etcd.transaction import Get, KeyValue
from services.catalog.etcd.watch import Changes, Lost, Resumed, Snapshot, watch_prefix
from services.catalog.facts.demands import unpack_demand
from services.catalog.facts.keys import Keys, check_node
from services.catalog.facts.values import unpack
from services.catalog.parallel import gather

MOST_DEMANDS = 256
MOST_REMOVALS = 1_000


class _Following:
    """One prefix, by node: key → what it says. node_of: from a key's parts."""

    def __init__(self, prefix: bytes, node_of: Callable[[bytes], str]) -> None:
        self.prefix, self.node_of = prefix, node_of
        self.by_node: dict[str, dict[bytes, KeyValue]] = {}
        self.revision = 0

    def replace(self, found: Iterable[KeyValue], revision: int) -> set[str]:
        """The nodes there were or are."""
        touched = set(self.by_node)
        self.by_node = {}
        for kv in found:
            self.by_node.setdefault(self.node_of(kv.key), {})[kv.key] = kv
        self.revision = revision
        return touched | set(self.by_node)

    def change(self, events: Iterable[tuple[bytes, KeyValue | None]], revision: int) -> set[str]:
        """The nodes touched."""
        touched = set()
        for key, kv in events:
            node = self.node_of(key)
            touched.add(node)
            if kv is not None:
                self.by_node.setdefault(node, {})[key] = kv
            elif node in self.by_node:
                self.by_node[node].pop(key, None)
                if not self.by_node[node]:
                    del self.by_node[node]
        self.revision = revision
        return touched


class DemandHub:
    """Owner of this replica's demand map. `run()` must be running for anything to move."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._demands = _Following(keys.demands, lambda key: keys.relative(key)[3])
        self._removals = _Following(keys.removals(), lambda key: keys.relative(key)[1])
        self._versions: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._closed = False
        self.last_error: EtcdError | None = None

    async def run(self) -> None:
        """Follows etcd until cancelled."""
        try:
            await gather(self._follow(part) for part in (self._demands, self._removals))
        finally:
            await self.close()

    async def close(self) -> None:
        """Ends every watcher."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()

    async def watch(self, node: str, first_within_s: float) -> AsyncGenerator[pb.DemandMap]:
        """The newest map of one directory, then the newest after each change; ends when the hub closes.

        Raises InvalidRequestError; EtcdUnavailableError if nothing was ever read within that time.
        """
        check_node(node)
        try:
            async with asyncio.timeout(first_within_s), self._changed:
                await self._changed.wait_for(lambda: self._loaded or self._closed)
        except TimeoutError:
            raise self.last_error or EtcdUnavailableError(self._etcd.endpoint, "demands not read yet") from None
        sent: bytes | None = None
        while not self._closed:
            seen = self._versions.get(node, 0)
            newest = await self._map(node)
            content = newest.SerializeToString(deterministic=True)
            if content != sent:
                sent = content
                newest.revision = self._revision
                yield newest
            await self._later_than(node, seen)

    async def _later_than(self, node: str, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._versions.get(node, 0) != seen)

    @property
    def _loaded(self) -> bool:
        return bool(self._demands.revision and self._removals.revision)

    @property
    def _revision(self) -> int:
        return min(self._demands.revision, self._removals.revision)

    async def _map(self, node: str) -> pb.DemandMap:
        """Without its revision."""
        keys = self._keys
        demands = [
            (-(demand := unpack_demand(keys.relative(kv.key), kv.value)).priority, kv.create_revision, demand)
            for kv in self._demands.by_node.get(node, {}).values()
        ]
        best = [demand for *_, demand in sorted(demands, key=lambda found: found[:2])[:MOST_DEMANDS]]
        answer = pb.DemandMap()
        for demand, chunk in zip(best, await self._chunks(best), strict=True):
            if chunk is not None:
                demand.chunk.CopyFrom(chunk)
            answer.demands.append(demand)
        removals = self._removals.by_node.get(node, {})
        for key in sorted(removals)[:MOST_REMOVALS]:
            _, _, fingerprint, hash = keys.relative(key)
            answer.removals.add(fingerprint=fingerprint, owner=removals[key].value.decode(), hash=hash)
        return answer

    async def _chunks(self, demands: list[pb.Demand]) -> list[pb.Chunk | None]:
        """None: not known, or etcd is away; the worker looks it up itself."""
        if not demands:
            return []
        try:
            reads = await self._etcd.read([Get(self._keys.chunk(d.fingerprint, d.hash)) for d in demands])
        except EtcdError:
            return [None] * len(demands)
        return [unpack(pb.Chunk, kvs[0].value) if kvs else None for kvs in reads.found]

    async def _follow(self, part: _Following) -> None:
        async with aclosing(watch_prefix(self._etcd, part.prefix)) as events:
            async for event in events:
                match event:
                    case Snapshot(found, revision):
                        await self._touch(part.replace(found, revision))
                    case Changes(changes, revision):
                        await self._touch(part.change(changes, revision))
                    case Lost(error):
                        self.last_error = error
                    case Resumed():
                        self.last_error = None

    async def _touch(self, nodes: set[str]) -> None:
        for node in nodes:
            self._versions[node] = self._versions.get(node, 0) + 1
        async with self._changed:
            self._changed.notify_all()
