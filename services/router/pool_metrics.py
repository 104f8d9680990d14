"""The tunnel pool's telemetry as metrics: one snapshot for each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from libs.pool.contours import Contour
from libs.pool.pool import PoolStatus
from libs.pool.telemetry import PoolSnapshot

_PREFIX = "segue_router_pool_"

Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(_PREFIX + name, text, labels=labels), samples)


def _counter(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(_PREFIX + name, text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _by(counts: Mapping[str, int]) -> Samples:
    return [((name,), float(count)) for name, count in sorted(counts.items())]


def _one(number: float) -> Samples:
    return [((), float(number))]


class PoolCollector(Collector):
    """Register it once; `read` is called at scrape time."""

    def __init__(self, read: Callable[[], PoolStatus]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return iter(())  # a snapshot would be taken for the names alone

    def collect(self) -> Iterator[Metric]:
        status = self._read()
        yield from _writers(status.pool)
        yield from _coverage(status.pool)
        yield from _generations(status.pool)
        yield from _history(status.pool)
        yield _gauge("held", "Assignments that wait for a tunnel", (), _one(status.held))
        yield _gauge("routes", "Assignments on tunnels", (), _one(status.routes))
        yield _counter("dropped", "Messages of workers without a route, by why", ("why",), _by(status.dropped))


def _writers(pool: PoolSnapshot) -> Iterator[Metric]:
    contours = {contour.value: pool.by_contour.get(contour, 0) for contour in Contour if contour is not Contour.GONE}
    yield _gauge("writers", "Tunnels to workers, by contour", ("contour",), _by(contours))
    endpoints = [
        ((one.key.worker, one.key.address), float(one.active), float(one.floor), one.reason.value)
        for one in pool.endpoints
    ]
    where = ("worker", "address")
    yield _gauge(
        "endpoint_writers", "Active tunnels of an endpoint", where, [(key, active) for key, active, *_ in endpoints]
    )
    yield _gauge(
        "endpoint_floor",
        "Tunnels that an endpoint should have, and why so many",
        (*where, "reason"),
        [((*key, reason), floor) for key, _, floor, reason in endpoints],
    )
    yield _gauge("bound", "Assignments on published tunnels", (), _one(pool.bound))
    yield _gauge("idle", "Active tunnels without assignments", (), _one(pool.idle))
    yield _gauge("degraded", "Degraded tunnels, by reason", ("reason",), _by(pool.degraded))
    phases = {"preparing": pool.preparing, "retiring": pool.retiring}
    yield _gauge("replacements", "Tunnels that are being replaced, by phase", ("phase",), _by(phases))
    yield _gauge("orphan_warm", "Warm tunnels of no current generation", (), _one(pool.orphan_warm))


def _coverage(pool: PoolSnapshot) -> Iterator[Metric]:
    yield _gauge(
        "ready", "1 while traffic may come", ("state",), [((pool.readiness.state.value,), pool.readiness.ready)]
    )
    yield _gauge("cell_writers", "Tunnels that serve a cell", ("cell",), _by(pool.by_cell))
    yield _gauge("family_writers", "Tunnels that serve, by address family", ("family",), _by(pool.by_family))
    yield _gauge(
        "missing_cells", "Required cells without their minimum of tunnels", (), _one(len(pool.readiness.missing))
    )
    yield _gauge("missing_cell_families", "Cell-families without a tunnel", (), _one(len(pool.missing_groups)))
    yield _gauge(
        "left_missing", "Of them, left to older tunnels by the last generation", (), _one(len(pool.left_missing))
    )
    states = {
        "listed": sum(one.listed for one in pool.endpoints),
        "vanished": sum(not one.listed for one in pool.endpoints),
        "drained": sum(one.drained for one in pool.endpoints),
        "quarantined": pool.quarantined,
        "dialled": sum(bool(one.dialling) for one in pool.endpoints),
    }
    yield _gauge("endpoints", "Endpoints in effect, by state; one may be in several", ("state",), _by(states))


def _generations(pool: PoolSnapshot) -> Iterator[Metric]:
    found, pending = pool.map, pool.pending
    yield _gauge("generation", "The active generation", (), _one(pool.generation))
    yield _gauge("pending_writers", "Tunnels of the pending generation", (), _one(pending.writers if pending else 0))
    yield _gauge("pending_deficit", "Tunnels that it lacks", (), _one(pending.deficit if pending else 0))
    yield _gauge(
        "pending_seconds",
        "Time for which a generation has been wanted and none committed",
        (),
        _one(pending.wanted_s if pending else 0.0),
    )
    revisions = {"read": found.revision_read, "taken": found.revision, "committed": found.committed_revision}
    yield _gauge("map_revision", "Revision of the endpoint map, by how far it has come", ("stage",), _by(revisions))
    yield _gauge(
        "map_current",
        "1 while the committed map is the taken one; with their hashes",
        ("taken", "committed"),
        [((found.hash[:16], found.committed_hash[:16]), float(found.hash == found.committed_hash))],
    )
    yield _gauge("map_seconds", "Age of the taken map", (), _one(found.age_s))
    yield _gauge("map_read_seconds", "Time since a map was read", (), _one(found.read_age_s or 0.0))
    yield _gauge(
        "map_empty_refused_seconds",
        "Time for which an empty map has been refused, for there are live tunnels",
        (),
        _one(found.empty_refused_s or 0.0),
    )


def _history(pool: PoolSnapshot) -> Iterator[Metric]:
    for name, text, number in (
        ("dials", "Dials", pool.dials),
        ("dial_failures", "Dials that failed", pool.dial_failures),
        ("dials_stale", "Dials that came too late: their generation or endpoint was no more", pool.dials_stale),
        ("flaps", "Tunnels that broke young", pool.flaps),
        ("quarantines", "Quarantines of endpoints", pool.quarantines),
        ("probes", "Probes of endpoints", pool.probes),
        ("connects", "Tunnels that came up", pool.connects),
        ("reconnects", "Of them, to an endpoint that had lost one", pool.reconnects),
        ("floor_switches", "Changes of a cell between idle and busy", pool.floor_switches),
        ("generations_expired", "Pending generations that expired", pool.pendings_expired),
        ("generations_superseded", "Pending generations that another map replaced", pool.pendings_superseded),
    ):
        yield _counter(name, text, (), _one(number))
    yield _counter(
        "removals",
        "Tunnels that ended, by why",
        ("why",),
        [((move.value,), float(count)) for move, count in pool.removals.items()],
    )
    yield _counter("commits", "Generations committed, by what wanted them", ("trigger",), _by(pool.commits))
    yield _counter(
        "commits_refused",
        "Commits that found something changed",
        ("why",),
        [((obstacle.value,), float(count)) for obstacle, count in pool.commits_refused.items()],
    )
    yield _gauge(
        "churn_per_writer_hour", "Reconnects and removals of a tunnel in an hour", (), _one(pool.churn_per_writer_hour)
    )
