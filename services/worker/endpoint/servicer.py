"""The calls of segue.v1.Worker, but `Attach`, which the tunnel serves raw (see `attach`)."""

# ruff: noqa: N802 - the methods' names are the contract's
from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from libs.contracts.segue.v1 import worker_pb2 as pb
from libs.contracts.segue.v1 import worker_pb2_grpc
from libs.controller.catalog_facts import Node
from libs.controller.protocol import AssignmentId, Candidate, GenerationRequest, Offer, Tier
from libs.controller.wire_fields import from_proto
from services.worker.endpoint.draining import Draining
from services.worker.endpoint.errors import (
    DeclinedError,
    InvalidRequestError,
    NotReadyError,
)
from services.worker.endpoint.fetching import fetch_chunk
from services.worker.endpoint.interpreter import Interpreter
from services.worker.endpoint.outlets import DirectOutlet
from services.worker.endpoint.requests import NO_TENANT, fault
from services.worker.handlers import LocalChunks
from services.worker.observation import Observer

_DEFAULT_DEADLINE_MS = 600_000
_RETRY_AFTER_S = 1.0


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Runs under `libs.service`, whose interceptor turns ServiceError into status and details."""

    def __init__(self, interpreter: Interpreter, observer: Observer, draining: Draining, chunks: LocalChunks) -> None:
        self._interpreter, self._observer, self._draining, self._chunks = interpreter, observer, draining, chunks
        # Direct calls are their own tunnels; tunnels count up from 1.
        self._calls = itertools.count(-1, -1)

    async def Generate(
        self, request: pb.WorkerGenerateRequest, context: Any
    ) -> AsyncIterator[pb.WorkerGenerateResponse]:
        if not self._interpreter.machine.epoch:
            raise NotReadyError
        offer = self._offer(request, context.time_remaining())
        outlet = DirectOutlet()
        self._interpreter.offer(offer, next(self._calls), outlet)
        if (declined := outlet.declined) is not None:
            raise DeclinedError(declined.reason, declined.detail, _RETRY_AFTER_S)
        try:
            while (event := await outlet.receive()) is not None:
                yield event
        finally:
            # The caller has gone, or its deadline is over. After a result this finds nothing.
            self._interpreter.abandoned(offer.assignment, outlet)

    def _offer(self, message: pb.WorkerGenerateRequest, remaining_s: float | None) -> Offer:
        request = from_proto(GenerationRequest, message.request)
        deadline_ms = request.deadline_ms or _DEFAULT_DEADLINE_MS
        if remaining_s is not None:
            deadline_ms = min(deadline_ms, int(remaining_s * 1e3))
        request = replace(
            request,
            deadline_ms=deadline_ms,
            tenant_salt=request.tenant_salt or NO_TENANT,
            output_start=request.output_start or len(request.tokens),
        )
        if (problem := fault(request)) is not None:
            raise InvalidRequestError(problem[0], remedy=problem[1], values={"request_id": request.request_id})
        identity = self._observer.identity
        fingerprint = message.fingerprint or identity.model.fingerprint
        chain = tuple(from_proto(Node, node) for node in message.chain)
        tier = Tier.OBJECT if chain else Tier.NONE
        queue_ms = self._interpreter.runtime.queue().ms
        epoch = self._interpreter.machine.epoch
        candidate = Candidate(identity.worker, epoch, fingerprint, tier, queue_ms=queue_ms)
        assignment = AssignmentId(request.request_id, message.attempt or 1)
        return Offer(assignment, epoch, request, fingerprint, candidate, chain)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return self._observer.describe(self._interpreter, self._chunks)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        end = await self._draining.drain(request.grace_ms / 1e3 if request.grace_ms else None)
        return pb.DrainResponse(clean=end.clean, cancelled=end.cancelled, unpublished=end.unpublished)

    async def FetchChunk(self, request: pb.FetchChunkRequest, context: Any) -> AsyncIterator[pb.FetchChunkResponse]:
        async with aclosing(fetch_chunk(request, self._interpreter.machine.epoch, self._chunks)) as pieces:
            async for piece in pieces:
                yield piece
