"""The ten calls of segue.v1.Catalog: protobuf to facts and back, errors to status codes, durations to metrics."""

# ruff: noqa: N802 - the methods' names are the contract's
from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.errors import ServiceError
from services.catalog.etcd.errors import EtcdError, EtcdFullError, EtcdUnavailableError
from services.catalog.facts.endpoints import EndpointHub
from services.catalog.facts.errors import CatalogBrokenError, CatalogFullError, CatalogUnavailableError
from services.catalog.facts.lookup import Lookups
from services.catalog.facts.models import Models
from services.catalog.facts.publish import Publisher
from services.catalog.facts.replicas import Replicas
from services.catalog.facts.workers import Workers
from services.catalog.metrics import CatalogMetrics
from services.catalog.store import StoreError, StoreUnavailableError

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Facts:
    """Every kind of fact, each by its owner."""

    models: Models
    workers: Workers
    endpoints: EndpointHub
    lookups: Lookups
    publisher: Publisher
    replicas: Replicas


def refusal(error: EtcdError | StoreError) -> ServiceError:
    """What a caller is told when a dependency fails. The retry hint is spread, so that callers do not come in step."""
    if isinstance(error, EtcdUnavailableError | StoreUnavailableError):
        return CatalogUnavailableError(str(error), _RETRY_AFTER_S * random.uniform(0.5, 1.5))  # noqa: S311 - spread
    if isinstance(error, EtcdFullError):
        return CatalogFullError(str(error))
    return CatalogBrokenError(str(error))


class CatalogServicer(catalog_pb2_grpc.CatalogServicer):
    """Stateless; runs under `libs.service`, whose interceptor turns ServiceError into status and details."""

    def __init__(self, facts: Facts, metrics: CatalogMetrics, *, first_map_within_s: float) -> None:
        self._facts, self._metrics = facts, metrics
        self._first_map_within_s = first_map_within_s

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
            raise CatalogUnavailableError("this catalog is stopping", _RETRY_AFTER_S)

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
            prefix = await self._facts.lookups.longest(
                request.fingerprint, request.tenant_salt, request.after, request.tokens, request.start
            )
            return pb.LookupResponse(nodes=prefix.nodes, tail=prefix.tail, revision=prefix.revision)

    async def Publish(self, request: pb.PublishRequest, context: Any) -> pb.PublishResponse:
        with self._call("Publish"):
            published, revision = await self._facts.publisher.publish(request.fingerprint, request.chunks, request.node)
            return pb.PublishResponse(chunks=published, revision=revision)

    async def SetReplica(self, request: pb.SetReplicaRequest, context: Any) -> pb.SetReplicaResponse:
        with self._call("SetReplica"):
            revision, unknown = await self._facts.replicas.set(request.updates)
            self._metrics.unknown_replicas(len(unknown))
            return pb.SetReplicaResponse(revision=revision, unknown=unknown)

    @contextmanager
    def _call(self, method: str) -> Iterator[None]:
        began, code = time.monotonic(), grpc.StatusCode.OK
        try:
            yield
        except (EtcdError, StoreError) as error:
            refused = refusal(error)
            code = refused.code
            raise refused from error
        except ServiceError as error:
            code = error.code
            raise
        except BaseException as error:
            code = grpc.StatusCode.INTERNAL if isinstance(error, Exception) else grpc.StatusCode.CANCELLED
            raise
        finally:
            self._metrics.rpc(method, code.name, time.monotonic() - began)
