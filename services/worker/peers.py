"""Which worker claims which chunk directory now: the catalog's endpoint map, watched, as the way to peers.

A replica fact names a directory by its UUID; whoever serves it is the worker that has registered it, under its address
and epoch. While the catalog is away the last map holds: an address that is another process by now refuses by epoch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import grpc

from libs.chunks.errors import TierError
from libs.chunks.peer import Peer, PeerClient
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.logs import get_logger

log = get_logger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_PROBED = 4
"""Peers tried for a first price, when a map brings new ones."""


class PeerBook:
    """`own`: UUID of this worker's directory, which is no peer's. `run` watches until cancelled."""

    def __init__(self, catalog: grpc.aio.Channel, client: PeerClient, own: str) -> None:
        self._stub = catalog_pb2_grpc.CatalogStub(catalog)  # type: ignore[no-untyped-call, unused-ignore]
        self._client, self._own = client, own
        self._peers: Mapping[str, Peer] = {}

    def peer_of(self, node: str) -> Peer | None:
        """The worker that claims the directory."""
        return self._peers.get(node)

    def __len__(self) -> int:
        return len(self._peers)

    def learn(self, endpoints: pb.EndpointMap) -> list[Peer]:
        """Takes a whole map; returns the peers it brought."""
        peers: dict[str, Peer] = {}
        new: list[Peer] = []
        for endpoint in endpoints.endpoints:
            if not endpoint.node or endpoint.node == self._own:
                continue
            known = self._peers.get(endpoint.node)
            if known is None or (known.address, known.epoch) != (endpoint.address, endpoint.epoch):
                known = self._client.peer(endpoint.address, endpoint.epoch)
                new.append(known)
            peers[endpoint.node] = known
        self._peers = peers
        return new

    async def run(self) -> None:
        """Watches; tries again with jitter, for ever."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async for found in self._stub.WatchEndpoints(pb.WatchEndpointsRequest()):
                    pause = _FIRST_PAUSE_S
                    await self._measure(self.learn(found))
            except grpc.aio.AioRpcError as error:
                log.debug("the endpoint map is not watched", error=error.code().name)
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause)  # noqa: S311 - spread
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    async def _measure(self, new: list[Peer]) -> None:
        """A price, so that routers hear that there is a way to peers and what it costs."""
        for peer in new[:_PROBED]:
            if self._client.meter.price().samples:
                return
            try:
                await self._client.probe(peer)
            except TierError as error:
                log.debug("a peer was not measured", peer=peer.address, error=error.message)
