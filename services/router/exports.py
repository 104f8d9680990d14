"""Numbers that the router's parts keep for themselves, exported as metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from libs.service.metrics import Metrics
from libs.tunnel import Registry
from services.router.metrics import RouterMetrics, by_name
from services.router.names import Names
from services.router.pool_metrics import PoolCollector

if TYPE_CHECKING:
    from services.router.server import Router


def export(router: Router, names: Names, service: Metrics, metrics: RouterMetrics) -> None:
    """Registers everything."""
    machine, observatory = router.shell.machine, router.observatory
    service.registry.register(PoolCollector(router.workers.pool.status))
    service.export("attach", router.attach.counters)
    service.export("map", router.endpoints.counters)
    service.export("names", names.counters)
    service.export("decisions", router.batches.counters)
    metrics.gauge("uncovered", "Requests held because no worker can be reached", lambda: len(router.uncovered))
    metrics.counts(
        "uncovered_refused", "Requests refused for that", (), lambda: [((), float(router.uncovered.refused))]
    )
    metrics.counts(
        "direct_calls", "Assignments that went round the tunnel pool", (), lambda: [((), float(router.direct.made))]
    )
    metrics.gauge("queue_length", "Requests that wait for capacity", lambda: machine.waiting)
    metrics.gauges(
        "active",
        "Requests under way, by phase",
        ("phase",),
        lambda: [((phase.value,), count) for phase, count in machine.phases().items() if phase.value != "done"],
    )
    metrics.gauge("workers", "Workers whose heartbeats are heard", lambda: len(observatory.fleet.views()))
    metrics.gauge("resident_prefixes", "Prefix boundaries known to be resident", lambda: len(observatory.fleet.index))
    metrics.gauge("facts", "Chunk facts remembered", lambda: len(router.lookups.cache))
    metrics.gauge("decisions_kept", "Decisions in memory", lambda: len(router.decisions.newest))
    metrics.counts(
        "fenced",
        "Events that changed nothing: late, repeated or foreign",
        ("event", "reason"),
        lambda: [((event, fence.value), count) for (event, fence), count in machine.fence.counts.items()],
    )
    metrics.counts(
        "worker_losses",
        "Worker processes that became unavailable, by how",
        ("loss",),
        lambda: by_name(observatory.losses),
    )
    metrics.counts(
        "rejected_heartbeats",
        "Heartbeats and tunnel events that changed nothing, by reason",
        ("reason",),
        lambda: [((reason.value,), count) for reason, count in observatory.registry.rejected.items()],
    )
    metrics.counts(
        "wire",
        "Messages refused or passed over, by peer and reason",
        ("peer", "reason"),
        lambda: [
            ((peer, reason), count)
            for peer, counts in (("worker", observatory.codec.counts), ("ingress", router.attach.codec.counts))
            for reason, count in counts.items()
        ],
    )
    sides = {"ingress": router.upstream, "worker": router.downstream}
    metrics.counts("routes_closed", "Routes that ended, by peer and reason", ("peer", "reason"), lambda: _routes(sides))
    metrics.counts(
        "tunnels_closed", "Tunnels that ended, by peer and reason", ("peer", "reason"), lambda: _tunnels(sides)
    )


def _routes(sides: dict[str, Registry]) -> list[tuple[tuple[str, ...], float]]:
    return _of({peer: registry.counters.routes_closed for peer, registry in sides.items()})


def _tunnels(sides: dict[str, Registry]) -> list[tuple[tuple[str, ...], float]]:
    return _of({peer: registry.counters.tunnels_closed for peer, registry in sides.items()})


def _of(counts: dict[str, Counter[str]]) -> list[tuple[tuple[str, ...], float]]:
    return [((peer, reason), float(number)) for peer, one in counts.items() for reason, number in one.items()]
