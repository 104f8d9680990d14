"""A cluster's tunnel pool, as its first router shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from libs.contracts.segue.v1 import pool_pb2, router_pb2, router_pb2_grpc
from prove.stage import Stage

WITHIN_S = 60.0


@asynccontextmanager
async def router_of(stage: Stage) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(stage.cluster.router_target) as channel:
        yield router_pb2_grpc.RouterStub(channel)


async def shown(router: Any) -> pool_pb2.PoolStatus:
    found: pool_pb2.PoolStatus = (await router.GetPool(router_pb2.GetPoolRequest(), timeout=30)).pool
    return found


async def until(router: Any, holds: Callable[[pool_pb2.PoolStatus], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            if holds(await shown(router)):
                return
            await asyncio.sleep(0.02)
