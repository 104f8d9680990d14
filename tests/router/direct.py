"""A worker by script that is reached by calls of their own alone, round the tunnel pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from libs.contracts.segue.v1 import worker_pb2, worker_pb2_grpc
from libs.service.transport import Transport
from tests.router.fake_worker import token
from tests.router.pki import bind


class OnlyByHand(worker_pb2_grpc.WorkerServicer):
    """A worker that takes no tunnels: `Generate` alone."""

    def __init__(self) -> None:
        self.asked: list[worker_pb2.WorkerGenerateRequest] = []

    async def Attach(self, frames: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no tunnels")
        yield

    async def Generate(self, asked: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        self.asked.append(asked)
        wanted = asked.request
        assignment = {"request_id": wanted.request_id, "attempt": asked.attempt}
        answer = worker_pb2.WorkerGenerateResponse()
        answer.accepted.assignment.MergeFrom(type(answer.accepted.assignment)(**assignment))
        answer.accepted.epoch, answer.accepted.accepted = 1, True
        yield answer
        at = len(wanted.tokens) - wanted.output_start
        answer = worker_pb2.WorkerGenerateResponse()
        answer.delta.assignment.MergeFrom(type(answer.delta.assignment)(**assignment))
        answer.delta.epoch, answer.delta.index = 1, at
        answer.delta.tokens.extend(token(at + i) for i in range(2 if len(self.asked) == 1 else wanted.max_new_tokens))
        yield answer
        if len(self.asked) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken in mid-stream")
        answer = worker_pb2.WorkerGenerateResponse()
        answer.result.assignment.MergeFrom(type(answer.result.assignment)(**assignment))
        answer.result.epoch = 1
        answer.result.status = worker_pb2.ResultStatus.RESULT_STATUS_COMPLETED
        answer.result.usage.generated_tokens = wanted.max_new_tokens
        answer.result.usage.prompt_tokens = wanted.output_start
        yield answer


@asynccontextmanager
async def by_hand(transport: Transport | None = None) -> AsyncIterator[tuple[OnlyByHand, str]]:
    """One, and where it listens."""
    server = grpc.aio.server()
    servicer = OnlyByHand()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call, unused-ignore]
    port = bind(server, "127.0.0.1:0", transport or Transport())
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
