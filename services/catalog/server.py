"""Assembly of a catalog process, and its start: wait for etcd and the object store, or say which is missing and why."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.errors import StartError
from libs.service.lifecycle import Service
from libs.service.logs import get_logger
from services.catalog.calls import Facts
from services.catalog.collect.collector import Collector
from services.catalog.collect.ownership import OF_ANOTHER
from services.catalog.collect.regular import collect_regularly
from services.catalog.collect.run import Limits, Reached, unobserved
from services.catalog.etcd.backoff import Backoff
from services.catalog.etcd.client import EtcdClient, Login, Tls
from services.catalog.etcd.errors import EtcdError, EtcdUnavailableError
from services.catalog.facts.decisions import Decisions
from services.catalog.facts.demand_map import DemandHub
from services.catalog.facts.demands import Demands
from services.catalog.facts.endpoints import EndpointHub
from services.catalog.facts.keys import Keys
from services.catalog.facts.listing import Listing
from services.catalog.facts.lookup import Lookups
from services.catalog.facts.models import Models
from services.catalog.facts.pins import Pins
from services.catalog.facts.publish import Publisher
from services.catalog.facts.replicas import Replicas
from services.catalog.facts.retentions import Keeping, Retentions
from services.catalog.facts.uses import Uses
from services.catalog.facts.workers import Workers
from services.catalog.metrics import CatalogMetrics
from services.catalog.rebuild import Rebuilder
from services.catalog.servicer import CatalogServicer
from services.catalog.settings import CatalogSettings
from services.catalog.store import ObjectStore, StoreError, StoreTarget, StoreUnavailableError

log = get_logger(__name__)


class DependencyError(StartError):
    """etcd or the object store is missing or refuses the catalog."""


@dataclass(frozen=True)
class Catalog:
    """The parts of one catalog process. `endpoints.run()` and `demands.run()` must be running for their maps to
    move."""

    etcd: EtcdClient
    store: ObjectStore
    endpoints: EndpointHub
    demands: DemandHub
    collector: Collector
    servicer: CatalogServicer


def unix_ms() -> int:
    return time.time_ns() // 1_000_000


def assemble(
    settings: CatalogSettings,
    metrics: CatalogMetrics,
    *,
    now_ms: Callable[[], int] = unix_ms,
    reached: Reached = unobserved,
) -> Catalog:
    """Inside the event loop; nothing connects yet. Raises StartError for unreadable files.

    reached: see Collector.
    """
    etcd = EtcdClient(
        settings.etcd_endpoint,
        timeout_s=settings.etcd_timeout_s,
        tls=_etcd_tls(settings),
        login=_etcd_login(settings),
        observe=metrics.etcd,
    )
    store = ObjectStore(_store_target(settings), metrics.store)
    keys = Keys(settings.etcd_prefix)
    endpoints = EndpointHub(etcd, keys, metrics.watch)
    metrics.export_watch_lag(lambda: endpoints.lag_s)

    def conflict(hash: str, where: str) -> None:
        metrics.conflict(where)
        log.error("conflict: a known hash stands for other tokens", hash=hash, where=where)

    def unreadable(key: str) -> None:
        metrics.unreadable_decisions()
        log.error("sealed decisions are missing or damaged", key=key)

    models = Models(etcd, keys)
    publisher = Publisher(etcd, keys, store, models, now_ms=now_ms, conflicted=conflict)
    retentions = Retentions(etcd, keys, Keeping(settings.gc_idle_days, settings.gc_max_age_days))
    collector = Collector(
        etcd,
        keys,
        store,
        retentions,
        Limits(round(settings.gc_grace_s * 1_000), settings.gc_directory_days, settings.decision_days),
        claimed=lambda: endpoints.nodes,
        now_ms=now_ms,
        holder=f"{socket.gethostname()} process {os.getpid()}",
        reached=reached,
    )
    demands = DemandHub(etcd, keys)
    facts = Facts(
        models=models,
        workers=Workers(etcd, keys, lease_ttl_s=settings.lease_ttl_s, now_ms=now_ms),
        endpoints=endpoints,
        lookups=Lookups(etcd, keys, claimed=lambda: endpoints.nodes, disagreed=conflict),
        publisher=publisher,
        replicas=Replicas(etcd, keys),
        demands=Demands(etcd, keys),
        demand_map=demands,
        pins=Pins(etcd, keys, now_ms=now_ms),
        uses=Uses(etcd, keys, now_ms=now_ms),
        listing=Listing(etcd, keys),
        retentions=retentions,
        decisions=Decisions(etcd, keys, store, now_ms=now_ms, unreadable=unreadable),
        collector=collector,
        rebuilder=Rebuilder(etcd, keys, store, publisher),
    )
    servicer = CatalogServicer(facts, metrics, first_map_within_s=settings.etcd_timeout_s)
    return Catalog(etcd, store, endpoints, demands, collector, servicer)


async def build(settings: CatalogSettings, service: Service) -> None:
    """What `libs.service.lifecycle.main` runs. Raises DependencyError."""
    metrics = CatalogMetrics(service.metrics.registry)
    catalog = assemble(settings, metrics)
    service.on_close("etcd client", catalog.etcd.close)
    service.on_close("object store client", catalog.store.close)

    wait_s = settings.startup_wait_s
    give_up_at = time.monotonic() + wait_s
    await _reach(lambda: catalog.etcd.read([]), give_up_at, wait_s, "etcd_endpoint, etcd_user, etcd_password")
    await _reach(
        lambda: catalog.store.ensure_bucket(settings.s3_create_bucket),
        give_up_at,
        wait_s,
        "s3_endpoint, s3_bucket, s3_access_key, s3_secret_key",
    )
    if not await catalog.collector.ownership.owned():
        log.warning(OF_ANOTHER, bucket=settings.s3_bucket)
    service.add(catalog.servicer, catalog_pb2_grpc.add_CatalogServicer_to_server, "segue.v1.Catalog")
    service.spawn(catalog.endpoints.run(), "endpoint map")
    service.spawn(catalog.demands.run(), "demand map")
    service.on_drain(lambda _seconds: catalog.endpoints.close())
    service.on_drain(lambda _seconds: catalog.demands.close())
    if settings.gc_interval_s:
        service.spawn(collect_regularly(catalog.collector, settings.gc_interval_s, metrics), "collection")
    # Not ready before the first map: an empty one would look like a cluster without workers.
    within = settings.etcd_timeout_s
    await _reach(lambda: catalog.endpoints.current(within), give_up_at, wait_s, "etcd_endpoint, etcd_user, etcd_prefix")


async def _reach(ask: Callable[[], Awaitable[object]], give_up_at: float, waited_s: float, knobs: str) -> None:
    """Asks until answered. What waiting cannot mend ends the start at once."""
    backoff = Backoff(first=0.2, limit=2.0)
    announced = False
    while True:
        try:
            await ask()
            return
        except (EtcdUnavailableError, StoreUnavailableError) as error:
            if time.monotonic() >= give_up_at:
                raise DependencyError(
                    f"{error}; no answer within {waited_s:g} s",
                    remedy=f"start it, or correct the settings {knobs}",
                ) from error
            if not announced:
                log.warning("waiting at start", error=str(error), give_up_after_s=waited_s)
                announced = True
            await backoff.pause()
        except (EtcdError, StoreError) as error:
            raise DependencyError(str(error), remedy=f"correct the settings {knobs}") from error


def _etcd_tls(settings: CatalogSettings) -> Tls | None:
    if settings.etcd_ca_file is None:
        return None
    return Tls(
        _pem(settings.etcd_ca_file, "etcd_ca_file"),
        _pem(settings.etcd_cert_file, "etcd_cert_file") if settings.etcd_cert_file else None,
        _pem(settings.etcd_key_file, "etcd_key_file") if settings.etcd_key_file else None,
    )


def _pem(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(
            f"{setting}: {path} cannot be read ({error.strerror})", remedy="give a readable PEM file"
        ) from None


def _etcd_login(settings: CatalogSettings) -> Login | None:
    if settings.etcd_user is None or settings.etcd_password is None:
        return None
    return Login(settings.etcd_user, settings.etcd_password.get_secret_value())


def _store_target(settings: CatalogSettings) -> StoreTarget:
    url = urlsplit(settings.s3_endpoint)
    return StoreTarget(
        endpoint=url.netloc,
        bucket=settings.s3_bucket,
        access_key=settings.s3_access_key,
        secret_key=settings.s3_secret_key.get_secret_value(),
        secure=url.scheme == "https",
        region=settings.s3_region,
        threads=settings.s3_threads,
        timeout_s=settings.s3_timeout_s,
    )
