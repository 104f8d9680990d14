"""The calls about where chunks should be and which are still wanted: demands, removals, pins, uses, listing."""

# ruff: noqa: N802 - the methods' names are the contract's
from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.calls import Calls, stopping


class PlacementCalls(Calls):
    """Demands, removals, pins, uses, listing."""

    async def SetDemands(self, request: pb.SetDemandsRequest, context: Any) -> pb.SetDemandsResponse:
        with self._call("SetDemands"):
            written, ttl_s = await self._facts.demands.set(request.demands, request.ttl_ms)
            return pb.SetDemandsResponse(ttl_ms=ttl_s * 1_000, unknown=written.unknown, revision=written.revision)

    async def RemoveDemands(self, request: pb.RemoveDemandsRequest, context: Any) -> pb.RemoveDemandsResponse:
        with self._call("RemoveDemands"):
            removed, revision = await self._facts.demands.remove(request.demands)
            return pb.RemoveDemandsResponse(removed=removed, revision=revision)

    async def ListDemands(self, request: pb.ListDemandsRequest, context: Any) -> pb.ListDemandsResponse:
        with self._call("ListDemands"):
            found = await self._facts.demands.list(request.node, request.page_size, request.page_token)
            demands, token, revision = found
            return pb.ListDemandsResponse(demands=demands, next_page_token=token, revision=revision)

    async def WatchDemands(self, request: pb.WatchDemandsRequest, context: Any) -> AsyncIterator[pb.DemandMap]:
        with self._call("WatchDemands"):
            async with aclosing(self._facts.demand_map.watch(request.node, self._first_map_within_s)) as maps:
                async for newest in maps:
                    yield newest
            raise stopping()

    async def ConfirmRemovals(self, request: pb.ConfirmRemovalsRequest, context: Any) -> pb.ConfirmRemovalsResponse:
        with self._call("ConfirmRemovals"):
            revision = await self._facts.demands.confirm(request.node, request.chunks)
            return pb.ConfirmRemovalsResponse(revision=revision)

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        with self._call("Pin"):
            written = await self._facts.pins.pin(request.chunks, request.who, request.why)
            return pb.PinResponse(unknown=written.unknown, revision=written.revision)

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        with self._call("Unpin"):
            removed, revision = await self._facts.pins.unpin(request.chunks)
            return pb.UnpinResponse(removed=removed, revision=revision)

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        with self._call("ListPins"):
            found = await self._facts.pins.list(request.fingerprint, request.page_size, request.page_token)
            pins, token, revision = found
            return pb.ListPinsResponse(pins=pins, next_page_token=token, revision=revision)

    async def RecordUse(self, request: pb.RecordUseRequest, context: Any) -> pb.RecordUseResponse:
        with self._call("RecordUse"):
            written = await self._facts.uses.record(request.chunks)
            return pb.RecordUseResponse(written=written.count, revision=written.revision)

    async def ListChunks(self, request: pb.ListChunksRequest, context: Any) -> pb.ListChunksResponse:
        with self._call("ListChunks"):
            chunks, token, revision = await self._facts.listing.page(
                request.fingerprint, request.owner, request.hash_prefix, request.page_size, request.page_token
            )
            return pb.ListChunksResponse(chunks=chunks, next_page_token=token, revision=revision)
