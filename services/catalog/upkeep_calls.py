"""The calls that keep house: retention, collection, purge, rebuild, repair."""

# ruff: noqa: N802 - the methods' names are the contract's
from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.calls import Calls


class UpkeepCalls(Calls):
    """Retention, collection, purge, rebuild, repair."""

    async def SetRetention(self, request: pb.SetRetentionRequest, context: Any) -> pb.SetRetentionResponse:
        with self._call("SetRetention"):
            revision = await self._facts.retentions.set(request.retention, request.reset)
            return pb.SetRetentionResponse(revision=revision)

    async def ListRetentions(self, request: pb.ListRetentionsRequest, context: Any) -> pb.ListRetentionsResponse:
        with self._call("ListRetentions"):
            owners, revision = await self._facts.retentions.read()
            standard = self._facts.retentions.standard
            answer = pb.ListRetentionsResponse(revision=revision)
            answer.standard.idle_days, answer.standard.max_age_days = standard.idle_days, standard.max_age_days
            for owner, keeping in sorted(owners.items()):
                answer.owners.add(owner=owner, idle_days=keeping.idle_days, max_age_days=keeping.max_age_days)
            return answer

    async def CollectGarbage(
        self, request: pb.CollectGarbageRequest, context: Any
    ) -> AsyncIterator[pb.CollectGarbageResponse]:
        with self._call("CollectGarbage"):
            async with aclosing(self._facts.collector.collect(request.dry_run)) as progress:
                async for report in progress:
                    if not request.dry_run:
                        self._metrics.collected(report)
                    yield report

    async def Purge(self, request: pb.PurgeRequest, context: Any) -> AsyncIterator[pb.PurgeResponse]:
        with self._call("Purge"):
            purge = self._facts.collector.purge(request.owner, request.dry_run, request.include_pinned)
            async with aclosing(purge) as progress:
                async for report in progress:
                    if not request.dry_run:
                        self._metrics.collected(report)
                    yield report

    async def Rebuild(self, request: pb.RebuildRequest, context: Any) -> AsyncIterator[pb.RebuildResponse]:
        with self._call("Rebuild"):
            async with aclosing(self._facts.rebuilder.run(request.fingerprint, request.dry_run)) as progress:
                async for report in progress:
                    yield report

    async def Repair(self, request: pb.RepairRequest, context: Any) -> AsyncIterator[pb.RepairResponse]:
        with self._call("Repair"):
            repair = self._facts.collector.repair(request.fingerprint, request.owner, request.dry_run)
            async with aclosing(repair) as progress:
                async for report in progress:
                    if not request.dry_run:
                        self._metrics.collected(report)
                    yield report
