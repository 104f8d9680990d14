"""The endpoint map of this replica: one etcd watch, any number of watchers.

`EndpointHub.run` follows `workers/` and keeps the newest map. Watchers wait for a map other than the last they saw and
get the newest there is: a slow one skips maps, never the newest state, and holds no queue. While etcd is away the last
map stands (with its revision): what it lists may have gone, which a dead connection shows sooner than any lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from blake3 import blake3

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.errors import EtcdError, EtcdUnavailableError
from services.catalog.etcd.watch import Changes, Lost, Resumed, Snapshot, watch_prefix
from services.catalog.facts.keys import Keys
from services.catalog.facts.values import pack, unpack

_ENDPOINT = b"/endpoint"


class WatchObserver(Protocol):
    """Told what happens to the watch: snapshot, changes, lost, resumed."""

    def __call__(self, event: str) -> None: ...


class EndpointHub:
    """Owner of this replica's endpoint map. `run()` must be running for anything to move."""

    def __init__(self, etcd: EtcdClient, keys: Keys, observe: WatchObserver | None = None) -> None:
        self._etcd, self._prefix = etcd, keys.workers
        self._observe = observe or (lambda event: None)
        self._endpoints: dict[bytes, pb.Endpoint] = {}
        self._map: pb.EndpointMap | None = None
        self._nodes: frozenset[str] = frozenset()
        self._changed = asyncio.Condition()
        self._closed = False
        self._lost_at: float | None = time.monotonic()
        self.last_error: EtcdError | None = None

    @property
    def nodes(self) -> frozenset[str]:
        """Chunk directories that a registered worker claims."""
        return self._nodes

    @property
    def lag_s(self) -> float:
        """Seconds for which the map may have missed changes; 0 while the watch stands."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    async def run(self) -> None:
        """Follows etcd until cancelled."""
        try:
            async with aclosing(watch_prefix(self._etcd, self._prefix)) as events:
                async for event in events:
                    self._observe(type(event).__name__.lower())
                    match event:
                        case Snapshot(found, revision):
                            self._endpoints = {
                                kv.key: unpack(pb.Endpoint, kv.value) for kv in found if kv.key.endswith(_ENDPOINT)
                            }
                            await self._publish(revision)
                        case Changes(changes, revision):
                            for key, kv in changes:
                                if not key.endswith(_ENDPOINT):
                                    continue
                                if kv is None:
                                    self._endpoints.pop(key, None)
                                else:
                                    self._endpoints[key] = unpack(pb.Endpoint, kv.value)
                            await self._publish(revision)
                        case Lost(error):
                            self.last_error = error
                            if self._lost_at is None:
                                self._lost_at = time.monotonic()
                        case Resumed():
                            self._lost_at = self.last_error = None
        finally:
            await self.close()

    async def close(self) -> None:
        """Ends every watcher."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()

    async def current(self, within_s: float) -> pb.EndpointMap:
        """The newest map. Raises EtcdUnavailableError if none was ever read within that time."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: self._map is not None or self._closed)
        except TimeoutError:
            raise self.last_error or EtcdUnavailableError(self._etcd.endpoint, "endpoint map not read yet") from None
        if self._map is None:
            raise EtcdUnavailableError(self._etcd.endpoint, "shutting down")
        return self._map

    async def watch(self, first_within_s: float) -> AsyncGenerator[pb.EndpointMap]:
        """The newest map, then the newest after each change; ends when the hub closes. Raises as `current`."""
        seen: pb.EndpointMap | None = await self.current(first_within_s)
        while seen is not None:
            yield seen
            seen = await self._other_than(seen)

    async def _other_than(self, seen: pb.EndpointMap) -> pb.EndpointMap | None:
        """The newest map, once it is another one; None when the hub has closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._map is not seen)
        return None if self._closed else self._map

    async def _publish(self, revision: int) -> None:
        endpoints = [self._endpoints[key] for key in sorted(self._endpoints)]
        digest = map_hash(endpoints)
        if self._map is not None and self._map.hash == digest:
            return
        self._map = pb.EndpointMap(endpoints=endpoints, hash=digest, revision=revision)
        self._nodes = frozenset(endpoint.node for endpoint in endpoints if endpoint.node)
        async with self._changed:
            self._changed.notify_all()


def map_hash(endpoints: list[pb.Endpoint]) -> str:
    """Hex BLAKE3 over the deterministic serialization of the endpoints, each length-prefixed."""
    hasher = blake3()
    for endpoint in endpoints:
        packed = pack(endpoint)
        hasher.update(len(packed).to_bytes(4, "little"))
        hasher.update(packed)
    return hasher.hexdigest()
