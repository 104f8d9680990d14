"""What every group of the contract's calls shares: the facts, errors to status codes, durations to metrics."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.errors import ServiceError
from services.catalog.collect.collector import Collector
from services.catalog.etcd.errors import EtcdError, EtcdFullError, EtcdUnavailableError
from services.catalog.facts.decisions import Decisions
from services.catalog.facts.demand_map import DemandHub
from services.catalog.facts.demands import Demands
from services.catalog.facts.endpoints import EndpointHub
from services.catalog.facts.errors import CatalogBrokenError, CatalogFullError, CatalogUnavailableError
from services.catalog.facts.listing import Listing
from services.catalog.facts.lookup import Lookups
from services.catalog.facts.models import Models
from services.catalog.facts.pins import Pins
from services.catalog.facts.publish import Publisher
from services.catalog.facts.replicas import Replicas
from services.catalog.facts.retentions import Retentions
from services.catalog.facts.uses import Uses
from services.catalog.facts.workers import Workers
from services.catalog.metrics import CatalogMetrics
from services.catalog.rebuild import Rebuilder
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
    demands: Demands
    demand_map: DemandHub
    pins: Pins
    uses: Uses
    listing: Listing
    retentions: Retentions
    decisions: Decisions
    collector: Collector
    rebuilder: Rebuilder


def refusal(error: EtcdError | StoreError) -> ServiceError:
    """What a caller is told when a dependency fails. The retry hint is spread, so that callers do not come in step."""
    if isinstance(error, EtcdUnavailableError | StoreUnavailableError):
        return CatalogUnavailableError(str(error), _RETRY_AFTER_S * random.uniform(0.5, 1.5))  # noqa: S311 - spread
    if isinstance(error, EtcdFullError):
        return CatalogFullError(str(error))
    return CatalogBrokenError(str(error))


def stopping() -> ServiceError:
    """Ends a stream that would go on for ever."""
    return CatalogUnavailableError("this catalog is stopping", _RETRY_AFTER_S)


class Calls(catalog_pb2_grpc.CatalogServicer):
    """Base of the groups of calls. Runs under `libs.service`, whose interceptor turns ServiceError into status."""

    def __init__(self, facts: Facts, metrics: CatalogMetrics, *, first_map_within_s: float) -> None:
        self._facts, self._metrics = facts, metrics
        self._first_map_within_s = first_map_within_s

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
