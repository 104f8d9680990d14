"""The calls of segue.v1.Router made by hand; `Attach` is served raw beside them (see `attach`).

All of them go through the same machine and planner as what comes over the tunnels.
"""

# ruff: noqa: N802 - the methods' names are the contract's
from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc

from libs.continuation.errors import IdentityError
from libs.contracts.segue.v1 import router_pb2, router_pb2_grpc
from libs.controller.protocol import (
    ErrorDelivery,
    GenerationRequest,
    Submission,
    TokensDelivery,
)
from libs.controller.router import RouterMachine
from libs.controller.router_events import RequestCancelled, RouterEvent
from libs.controller.router_table import Phase
from libs.controller.wire import delivery_to_proto
from libs.controller.wire_fields import from_proto
from libs.service.errors import ServiceError
from services.router import views
from services.router.direct import DirectSink
from services.router.names import CatalogAwayError
from services.router.planner import Planner
from services.router.pool_calls import PoolCalls
from services.router.requests import NO_TENANT, Requests

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class NotActiveError(ServiceError):
    """A request that is not under way at this router."""

    code = grpc.StatusCode.NOT_FOUND


class UnknownModelError(ServiceError):
    """A served name the catalog does not know."""

    code = grpc.StatusCode.NOT_FOUND


class CatalogUnavailableError(ServiceError):
    """The catalog is away and what was asked is not remembered."""

    code = grpc.StatusCode.UNAVAILABLE


class InvalidRequestError(ServiceError):
    """A field that cannot be so."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class StoppingError(ServiceError):
    """The router takes no new requests."""

    code = grpc.StatusCode.UNAVAILABLE


class RouterServicer(router_pb2_grpc.RouterServicer):
    """Runs under `libs.service`, whose interceptor turns ServiceError into status and details."""

    def __init__(
        self,
        machine: RouterMachine,
        feed: Callable[[RouterEvent], None],
        requests: Requests,
        planner: Planner,
        list_workers: Callable[[], router_pb2.ListWorkersResponse],
        pool: PoolCalls,
    ) -> None:
        self._machine = machine
        self._feed = feed
        self._requests = requests
        self._planner = planner
        self._list_workers = list_workers
        self._pool = pool
        self.draining = False

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[router_pb2.Delivery]:
        if self.draining:
            raise StoppingError("this router is shutting down", remedy="ask another router", retry_after_s=1.0)
        sink = DirectSink()
        origin = self._requests.submit(_by_hand(from_proto(Submission, request), context.time_remaining()), sink)
        try:
            while True:
                delivery = await sink.receive()
                yield delivery_to_proto(delivery)
                if isinstance(delivery, ErrorDelivery):
                    await context.abort(_CODES[delivery.code.value], delivery.message)
                if not isinstance(delivery, TokensDelivery):
                    return
        finally:
            self._requests.cancel(origin)

    async def Cancel(self, request: router_pb2.CancelRequest, context: Any) -> router_pb2.CancelResponse:
        request_id = request.request_id
        if self._machine.phase(request_id) is Phase.DONE:
            raise NotActiveError(
                f"request {request_id!r} is not under way at this router",
                remedy="it has ended, or runs at another router",
                values={"request_id": request_id},
            )
        self._feed(RequestCancelled(request_id))
        return router_pb2.CancelResponse()

    async def Explain(self, request: router_pb2.ExplainRequest, context: Any) -> router_pb2.ExplainResponse:
        if not request.tokens:
            raise InvalidRequestError("tokens is empty", remedy="give at least one token id")
        tokens = tuple(request.tokens)
        asked = GenerationRequest(
            request_id="explain",
            model=request.model,
            tokens=tokens,
            output_start=len(tokens),
            max_new_tokens=request.max_new_tokens,
            tenant_salt=request.tenant_salt or NO_TENANT,
        )
        try:
            explanation = await self._planner.explain(asked)
        except CatalogAwayError as error:
            raise CatalogUnavailableError(str(error), remedy="start the catalog", retry_after_s=1.0) from None
        except IdentityError as error:
            raise InvalidRequestError(str(error), remedy="give 64 hex digits, or none") from None
        if not explanation.variants:
            raise UnknownModelError(
                f"model {request.model!r} is not known",
                remedy="Catalog/ListModels shows the served names",
                values={"model": request.model},
            )
        return views.explained(explanation)

    async def ListWorkers(self, request: router_pb2.ListWorkersRequest, context: Any) -> router_pb2.ListWorkersResponse:
        return self._list_workers()

    async def GetPool(self, request: router_pb2.GetPoolRequest, context: Any) -> router_pb2.GetPoolResponse:
        return self._pool.get()

    async def DrainEndpoint(
        self, request: router_pb2.DrainEndpointRequest, context: Any
    ) -> router_pb2.DrainEndpointResponse:
        return self._pool.drain(request)

    async def SwapGeneration(
        self, request: router_pb2.SwapGenerationRequest, context: Any
    ) -> router_pb2.SwapGenerationResponse:
        if self.draining:
            raise StoppingError("this router is shutting down", remedy="its tunnels are closing", retry_after_s=1.0)
        return self._pool.swap()

    async def SetPoolPolicy(
        self, request: router_pb2.SetPoolPolicyRequest, context: Any
    ) -> router_pb2.SetPoolPolicyResponse:
        return self._pool.set_policy(request)


def _by_hand(submission: Submission, time_remaining_s: float | None) -> Submission:
    """What a caller by hand may leave out: the id, where output begins, and the deadline, which is then the call's."""
    request = submission.request
    if not request.request_id:
        request = replace(request, request_id=f"hand-{secrets.token_hex(8)}")
    if not request.output_start:
        request = replace(request, output_start=max(0, len(request.tokens) - submission.delivered))
    if not request.deadline_ms and time_remaining_s is not None:
        request = replace(request, deadline_ms=max(1, min(math.floor(time_remaining_s * 1_000), 86_400_000)))
    return replace(submission, request=request)
