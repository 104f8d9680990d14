"""segue.v1.Catalog: protobuf to facts and back. Here workers, models and chains; the rest in its base classes."""

# ruff: noqa: N802 - the methods' names are the contract's
from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.calls import stopping
from services.catalog.decision_calls import DecisionCalls
from services.catalog.placement_calls import PlacementCalls
from services.catalog.upkeep_calls import UpkeepCalls


class CatalogServicer(PlacementCalls, UpkeepCalls, DecisionCalls):
    """The whole contract. Stateless."""

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        with self._call("Register"):
            done = await self._facts.workers.register(request.endpoint, request.models, request.names, request.epoch)
            return pb.RegisterResponse(
                epoch=done.epoch, lease_id=done.lease, ttl_ms=done.ttl_s * 1_000, revision=done.revision
            )

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Any) -> pb.KeepAliveResponse:
        with self._call("KeepAlive"):
            alive = await self._facts.workers.keep_alive(request.worker, request.epoch, request.lease_id)
            return pb.KeepAliveResponse(
                ttl_ms=alive.ttl_s * 1_000, latest_epoch=alive.latest_epoch, revision=alive.revision
            )

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
        with self._call("Deregister"):
            removed, revision = await self._facts.workers.deregister(request.worker, request.epoch)
            return pb.DeregisterResponse(removed=removed, revision=revision)

    async def WatchEndpoints(self, request: pb.WatchEndpointsRequest, context: Any) -> AsyncIterator[pb.EndpointMap]:
        with self._call("WatchEndpoints"), self._metrics.watchers.track_inprogress():
            async with aclosing(self._facts.endpoints.watch(self._first_map_within_s)) as maps:
                async for newest in maps:
                    yield newest
            raise stopping()

    async def ResolveName(self, request: pb.ResolveNameRequest, context: Any) -> pb.ResolveNameResponse:
        with self._call("ResolveName"):
            models, revision = await self._facts.models.resolve(request.name)
            return pb.ResolveNameResponse(models=models, revision=revision)

    async def SetName(self, request: pb.SetNameRequest, context: Any) -> pb.SetNameResponse:
        with self._call("SetName"):
            return pb.SetNameResponse(revision=await self._facts.models.set_name(request.name, request.fingerprints))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        with self._call("ListModels"):
            names, models, revision = await self._facts.models.list()
            return pb.ListModelsResponse(names=names, models=models, revision=revision)

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        with self._call("Lookup"):
            return await self._facts.lookups.longest(
                request.fingerprint, request.tenant_salt, request.after, request.tokens, request.start
            )

    async def Publish(self, request: pb.PublishRequest, context: Any) -> pb.PublishResponse:
        with self._call("Publish"):
            published, revision = await self._facts.publisher.publish(request.fingerprint, request.chunks, request.node)
            return pb.PublishResponse(chunks=published, revision=revision)

    async def SetReplica(self, request: pb.SetReplicaRequest, context: Any) -> pb.SetReplicaResponse:
        with self._call("SetReplica"):
            revision, unknown = await self._facts.replicas.set(request.updates)
            self._metrics.unknown_replicas(len(unknown))
            return pb.SetReplicaResponse(revision=revision, unknown=unknown)
