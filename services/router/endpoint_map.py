"""The desired endpoint map: followed at the catalog for ever, over reconnects.

Each message is the whole map, so a lost stream loses nothing. While the catalog is away the last map stands. A map read
at another catalog replica may be a little older than the last one; that does no harm, for a worker that is missing from
a map keeps its healthy tunnel for the grace period.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc
from libs.controller.catalog_facts import Endpoint
from libs.controller.wire_fields import from_proto
from libs.service.errors import StartError
from libs.service.logs import get_logger

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0

log = get_logger(__name__)


class CatalogAbsentError(StartError):
    """The catalog did not answer at the first start."""


@dataclass
class MapCounters:
    """Exported as metrics."""

    endpoints: int = field(default=0, metadata={"help": "Workers in the endpoint map", "kind": "gauge"})
    revision: int = field(default=0, metadata={"help": "Revision of the endpoint map", "kind": "gauge"})
    connected: int = field(default=0, metadata={"help": "1 while the map is followed", "kind": "gauge"})
    received: int = field(default=0, metadata={"help": "Endpoint maps received"})
    losses: int = field(default=0, metadata={"help": "Times the catalog's stream of maps ended or failed"})


class EndpointMap:
    """The map as last heard. `apply` is called with each one as it comes, and its revision."""

    def __init__(
        self, channel: grpc.aio.Channel, target: str, apply: Callable[[tuple[Endpoint, ...], int], None]
    ) -> None:
        self.counters = MapCounters()
        self.endpoints: tuple[Endpoint, ...] = ()
        self._stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._target = target
        self._apply = apply
        self._received = asyncio.Event()
        self._why = "no answer"

    @property
    def revision(self) -> int:
        """etcd's revision of the last map; 0 = none yet."""
        return self.counters.revision

    async def first(self, within_s: float) -> None:
        """Waits for the first map. Raises CatalogAbsentError."""
        try:
            async with asyncio.timeout(within_s):
                await self._received.wait()
        except TimeoutError:
            raise CatalogAbsentError(
                f"the catalog at {self._target} gave no endpoint map within {within_s:g} s ({self._why})",
                remedy="start the catalog first, or correct the setting `catalog`",
            ) from None

    async def run(self) -> None:
        """Follows the map until cancelled."""
        failures = 0
        while True:
            failures = 0 if await self._follow() else failures + 1
            self.counters.losses += 1
            longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(failures, 10))
            await asyncio.sleep(random.uniform(longest / 2, longest))  # noqa: S311

    async def _follow(self) -> bool:
        """One stream, to its end; whether a map came."""
        came = False
        try:
            async for newest in self._stub.WatchEndpoints(catalog_pb2.WatchEndpointsRequest()):
                if not came and self.counters.losses:
                    log.info("endpoint map is followed again", revision=newest.revision)
                came = True
                self._take(newest)
            self._why = "the catalog ended the stream"
        except grpc.aio.AioRpcError as error:
            self._why = f"{error.code().name}: {error.details()}"
        finally:
            self.counters.connected = 0
        if came or self.counters.losses == 0:
            log.warning("endpoint map is not followed: the last one stands", reason=self._why)
        return came

    def _take(self, newest: catalog_pb2.EndpointMap) -> None:
        counters = self.counters
        if newest.revision < counters.revision:
            log.warning("endpoint map is older than the last one", revision=newest.revision, last=counters.revision)
        self.endpoints = tuple(from_proto(Endpoint, endpoint) for endpoint in newest.endpoints)
        counters.endpoints, counters.revision, counters.connected = len(self.endpoints), newest.revision, 1
        counters.received += 1
        self._apply(self.endpoints, newest.revision)
        self._received.set()
