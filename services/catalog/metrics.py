"""What the catalog measures. No label names a tenant, a worker or a chunk."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.contracts.segue.v1 import catalog_pb2 as pb

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class CatalogMetrics:
    """Registers itself in `registry`; the methods are the observers that the parts are given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._rpc = Histogram(
            "segue_catalog_rpc_seconds", "Duration of calls", ("method", "code"), registry=registry, buckets=_SECONDS
        )
        self._etcd = Histogram(
            "segue_catalog_etcd_seconds",
            "Duration of requests to etcd",
            ("operation", "answered"),
            registry=registry,
            buckets=_SECONDS,
        )
        self._store = Histogram(
            "segue_catalog_store_seconds",
            "Duration of requests to the object store, waiting for a thread included",
            ("operation", "answered"),
            registry=registry,
            buckets=_SECONDS,
        )
        self._watch = Counter(
            "segue_catalog_watch_events_total",
            "What happened to the watch of the endpoints: snapshot, changes, lost, resumed",
            ("event",),
            registry=registry,
        )
        self._conflicts = Counter(
            "segue_catalog_conflicts_total",
            "Chunks whose hash stands for other tokens than the caller's. Any is an alarm",
            ("where",),
            registry=registry,
        )
        self._unknown = Counter(
            "segue_catalog_replicas_of_unknown_chunks_total",
            "Chunks of replica updates that were left out because the chunk is no fact",
            registry=registry,
        )
        self.watchers = Gauge(
            "segue_catalog_endpoint_watchers", "Streams that follow the endpoint map", registry=registry
        )
        self._collected = Counter(
            "segue_catalog_collected_total",
            "What collections, purges and repairs removed, by reason",
            ("reason",),
            registry=registry,
        )
        self._collected_bytes = Counter(
            "segue_catalog_collected_bytes_total", "Bytes of the objects they removed", registry=registry
        )
        self._unreadable = Counter(
            "segue_catalog_unreadable_decisions_total",
            "Sealed batches of decisions that were missing or damaged when they were read",
            registry=registry,
        )
        # Series exist from the start, or a first conflict would be no increase.
        for where in ("publish", "lookup"):
            self._conflicts.labels(where)

    def rpc(self, method: str, code: str, seconds: float) -> None:
        self._rpc.labels(method, code).observe(seconds)

    def etcd(self, operation: str, seconds: float, answered: bool) -> None:
        self._etcd.labels(operation, str(answered).lower()).observe(seconds)

    def store(self, operation: str, seconds: float, answered: bool) -> None:
        self._store.labels(operation, str(answered).lower()).observe(seconds)

    def watch(self, event: str) -> None:
        self._watch.labels(event).inc()

    def conflict(self, where: str) -> None:
        self._conflicts.labels(where).inc()

    def unknown_replicas(self, count: int) -> None:
        self._unknown.inc(count)

    def collected(self, report: pb.CollectGarbageResponse | pb.PurgeResponse | pb.RepairResponse) -> None:
        for item in report.collected:
            self._collected.labels(pb.CollectReason.Name(item.reason).removeprefix("COLLECT_REASON_").lower()).inc()
            if item.key:
                self._collected_bytes.inc(item.bytes)

    def unreadable_decisions(self) -> None:
        self._unreadable.inc()

    def export_watch_lag(self, lag_s: Callable[[], float]) -> None:
        gauge = Gauge(
            "segue_catalog_watch_lag_seconds",
            "Time for which the endpoint map may have missed changes; 0 while the watch stands",
            registry=self._registry,
        )
        gauge.set_function(lag_s)
