"""The calls about recorded decisions."""

# ruff: noqa: N802 - the methods' names are the contract's
from __future__ import annotations

from typing import Any

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.calls import Calls
from services.catalog.facts.decisions import Query


class DecisionCalls(Calls):
    """Recorded decisions."""

    async def AppendDecisions(self, request: pb.AppendDecisionsRequest, context: Any) -> pb.AppendDecisionsResponse:
        with self._call("AppendDecisions"):
            key, size, revision = await self._facts.decisions.append(request.records)
            return pb.AppendDecisionsResponse(key=key, size=size, revision=revision)

    async def ListDecisions(self, request: pb.ListDecisionsRequest, context: Any) -> pb.ListDecisionsResponse:
        with self._call("ListDecisions"):
            query = Query(
                request_id=request.request_id,
                from_ms=request.from_ms,
                until_ms=request.until_ms,
                worker=request.worker,
                outcome=request.outcome,
                decline=request.decline,
                model=request.model,
            )
            records, token, revision = await self._facts.decisions.find(query, request.page_size, request.page_token)
            return pb.ListDecisionsResponse(records=records, next_page_token=token, revision=revision)

    async def GetDecision(self, request: pb.GetDecisionRequest, context: Any) -> pb.GetDecisionResponse:
        with self._call("GetDecision"):
            records, revision = await self._facts.decisions.of_request(request.request_id)
            return pb.GetDecisionResponse(records=records, revision=revision)
