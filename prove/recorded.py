"""What the recorded decisions say of a request's attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from libs.contracts.segue.v1 import catalog_pb2
from prove.stage import Stage

_CALL_S = 5.0
_PAUSE_S = 0.1

Attempts = Sequence[catalog_pb2.DecisionAttempt]


async def attempts(stage: Stage, request_id: str, enough: Callable[[Attempts], bool], within: float) -> Attempts:
    """All of them once there are enough, or what is recorded when the time is over. (The catalog tells nobody that a
    batch of decisions came.)
    """
    asked, found = catalog_pb2.GetDecisionRequest(request_id=request_id), list[catalog_pb2.DecisionAttempt]()
    give_up = asyncio.get_running_loop().time() + within
    while not enough(found) and asyncio.get_running_loop().time() < give_up:
        await asyncio.sleep(_PAUSE_S)
        try:
            reply = await stage.facts.catalog.GetDecision(asked, timeout=_CALL_S)
        except grpc.aio.AioRpcError:
            continue
        found = [attempt for record in reply.records for attempt in record.attempts]
    return found
