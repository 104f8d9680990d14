"""The catalog's endpoint map, as a router follows it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc


async def followed(catalog: catalog_pb2_grpc.CatalogStub, within_s: float) -> AsyncIterator[dict[str, int]]:
    """Each map as it comes, for so long: epochs by worker. Close it. Raises grpc.aio.AioRpcError."""
    call = catalog.WatchEndpoints(catalog_pb2.WatchEndpointsRequest(), timeout=within_s)
    try:
        async for now in call:
            yield {one.worker: one.epoch for one in now.endpoints}
    finally:
        call.cancel()


async def newest(catalog: catalog_pb2_grpc.CatalogStub, within_s: float = 10.0) -> dict[str, int]:
    """The map now. Raises grpc.aio.AioRpcError."""
    async with aclosing(followed(catalog, within_s)) as maps:
        async for now in maps:
            return now
    return {}
