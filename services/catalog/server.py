"""Assembly of a catalog process, and its start: wait for etcd and the object store, or say which is missing and why."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from libs.contracts.segue.v1 import catalog_pb2_grpc
from libs.service.errors import StartError
from libs.service.lifecycle import Service
from libs.service.logs import get_logger
from services.catalog.etcd.backoff import Backoff
from services.catalog.etcd.client import EtcdClient, Login, Tls
from services.catalog.etcd.errors import EtcdError, EtcdUnavailableError
from services.catalog.facts.endpoints import EndpointHub
from services.catalog.facts.keys import Keys
from services.catalog.facts.lookup import Lookups
from services.catalog.facts.models import Models
from services.catalog.facts.publish import Publisher
from services.catalog.facts.replicas import Replicas
from services.catalog.facts.workers import Workers
from services.catalog.metrics import CatalogMetrics
from services.catalog.servicer import CatalogServicer, Facts
from services.catalog.settings import CatalogSettings
from services.catalog.store import ObjectStore, StoreError, StoreTarget, StoreUnavailableError

log = get_logger(__name__)


class DependencyError(StartError):
    """etcd or the object store is missing or refuses the catalog."""


@dataclass(frozen=True)
class Catalog:
    """The parts of one catalog process. `endpoints.run()` must be running for the endpoint map to move."""

    etcd: EtcdClient
    store: ObjectStore
    endpoints: EndpointHub
    servicer: CatalogServicer


def assemble(settings: CatalogSettings, metrics: CatalogMetrics) -> Catalog:
    """Inside the event loop; nothing connects yet. Raises StartError for unreadable files."""
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

    models = Models(etcd, keys)
    facts = Facts(
        models=models,
        workers=Workers(etcd, keys, lease_ttl_s=settings.lease_ttl_s, now_ms=unix_ms),
        endpoints=endpoints,
        lookups=Lookups(etcd, keys, claimed=lambda: endpoints.nodes, disagreed=conflict),
        publisher=Publisher(etcd, keys, store, models, now_ms=unix_ms, conflicted=conflict),
        replicas=Replicas(etcd, keys),
    )
    return Catalog(etcd, store, endpoints, CatalogServicer(facts, metrics, first_map_within_s=settings.etcd_timeout_s))


async def build(settings: CatalogSettings, service: Service) -> None:
    """What `libs.service.lifecycle.main` runs. Raises DependencyError."""
    catalog = assemble(settings, CatalogMetrics(service.metrics.registry))
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
    service.add(catalog.servicer, catalog_pb2_grpc.add_CatalogServicer_to_server, "segue.v1.Catalog")
    service.spawn(catalog.endpoints.run(), "endpoint map")
    service.on_drain(lambda _seconds: catalog.endpoints.close())
    # Not ready before the first map: an empty one would look like a cluster without workers.
    within = settings.etcd_timeout_s
    await _reach(lambda: catalog.endpoints.current(within), give_up_at, wait_s, "etcd_endpoint, etcd_user, etcd_prefix")


def unix_ms() -> int:
    return time.time_ns() // 1_000_000


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
