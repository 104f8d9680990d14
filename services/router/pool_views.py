"""The pool's telemetry as a message of the router's contract."""

from __future__ import annotations

from collections.abc import Iterable

from libs.contracts.segue.v1 import pool_pb2
from libs.pool.knobs import PoolPolicy
from libs.pool.model import Group
from libs.pool.pool import PoolStatus
from libs.pool.telemetry import EndpointView, MapView, PendingView, PoolSnapshot, WriterView
from services.router.pool_knobs import spelled


def shown(status: PoolStatus, policy: PoolPolicy) -> pool_pb2.PoolStatus:
    """All of it."""
    pool = status.pool
    return pool_pb2.PoolStatus(
        readiness=pool.readiness.state.value,
        missing_cells=pool.readiness.missing,
        generation=pool.generation,
        map=_map(pool.map),
        pending=_pending(pool.pending) if pool.pending is not None else None,
        next_reinit_ms=_ms(pool.next_reinit_s),
        missing=_groups(pool.missing_groups),
        left_missing=_groups(pool.left_missing),
        writers=map(_writer, pool.writers),
        endpoints=map(_endpoint, pool.endpoints),
        cells=dict(pool.by_cell),
        counters=_counters(status),
        routes=status.routes,
        bindings=status.bindings,
        permits=status.permits,
        held=status.held,
        policy=spelled(policy),
    )


def _ms(seconds: float | None) -> int:
    """At least 1 where there is a time, for 0 says that there is none."""
    return 0 if seconds is None else max(1, round(seconds * 1_000))


def _groups(groups: Iterable[Group]) -> list[pool_pb2.CellFamily]:
    return [pool_pb2.CellFamily(cell=group.cell, family=group.family) for group in groups]


def _map(view: MapView) -> pool_pb2.MapCurrency:
    return pool_pb2.MapCurrency(
        hash=view.hash,
        revision=view.revision,
        age_ms=_ms(view.age_s),
        committed_hash=view.committed_hash,
        committed_revision=view.committed_revision,
        revision_read=view.revision_read,
        read_age_ms=_ms(view.read_age_s),
        empty_refused_ms=_ms(view.empty_refused_s),
    )


def _pending(view: PendingView) -> pool_pb2.PendingGeneration:
    return pool_pb2.PendingGeneration(
        generation=view.generation,
        fresh=view.fresh,
        triggers=view.triggers,
        age_ms=_ms(view.age_s),
        wanted_ms=_ms(view.wanted_s),
        writers=view.writers,
        deficit=view.deficit,
        ratio=view.ratio,
        missing=_groups(view.missing_groups),
        obstacle=view.obstacle.value,
    )


def _writer(view: WriterView) -> pool_pb2.PoolWriter:
    return pool_pb2.PoolWriter(
        id=view.writer,
        worker=view.worker,
        address=view.address,
        family=view.family,
        cells=view.cells,
        contour=view.contour.value,
        generation=view.generation,
        epoch=view.incarnation,
        age_ms=_ms(view.age_s),
        contour_ms=_ms(view.contour_age_s),
        routes=view.bound,
        idle_ms=_ms(view.idle_s),
        degraded=view.degraded,
        replacement=view.replacement.value,
        fallback=view.fallback,
        closing=view.closing.value if view.closing is not None else "",
    )


def _endpoint(view: EndpointView) -> pool_pb2.PoolEndpoint:
    return pool_pb2.PoolEndpoint(
        worker=view.key.worker,
        address=view.key.address,
        cells=view.cells,
        listed=view.listed,
        vanished_ms=_ms(view.vanished_s),
        drained=view.drained,
        floor=view.floor,
        floor_reason=view.reason.value,
        active=view.active,
        dialling=view.dialling,
        failures=view.failures,
        quarantined=view.quarantined,
    )


def _counters(status: PoolStatus) -> pool_pb2.PoolCounters:
    pool: PoolSnapshot = status.pool
    return pool_pb2.PoolCounters(
        dials=pool.dials,
        dial_failures=pool.dial_failures,
        dials_stale=pool.dials_stale,
        flaps=pool.flaps,
        quarantines=pool.quarantines,
        probes=pool.probes,
        connects=pool.connects,
        reconnects=pool.reconnects,
        floor_switches=pool.floor_switches,
        generations_expired=pool.pendings_expired,
        generations_superseded=pool.pendings_superseded,
        churn_per_writer_hour=pool.churn_per_writer_hour,
        removals={move.value: count for move, count in pool.removals.items()},
        commits=dict(pool.commits),
        commits_refused={obstacle.value: count for obstacle, count in pool.commits_refused.items()},
        route_ends=status.route_ends,
        dropped=status.dropped,
    )
