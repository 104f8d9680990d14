"""A cluster's tunnel pool, as its first router shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio

from libs.contracts.segue.v1 import pool_pb2, router_pb2, router_pb2_grpc
from prove.stage import Stage

WITHIN_S = 60.0
CALL_S = 30.0
_PAUSE_S = 0.01


@asynccontextmanager
async def router_of(stage: Stage) -> AsyncIterator[router_pb2_grpc.RouterStub]:
    """Its first router."""
    async with grpc.aio.insecure_channel(stage.cluster.router_target) as channel:
        yield router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]


async def shown(router: router_pb2_grpc.RouterStub) -> pool_pb2.PoolStatus:
    """Now."""
    found: pool_pb2.PoolStatus = (await router.GetPool(router_pb2.GetPoolRequest(), timeout=CALL_S)).pool
    return found


async def until(
    router: router_pb2_grpc.RouterStub, holds: Callable[[pool_pb2.PoolStatus], bool], within: float = WITHIN_S
) -> pool_pb2.PoolStatus:
    """Raises TimeoutError. (A pool tells nobody that it has changed.)"""
    async with asyncio.timeout(within):
        while not holds(found := await shown(router)):  # noqa: ASYNC110 - see above
            await asyncio.sleep(_PAUSE_S)
        return found
