"""What the pool tells about itself: one typed snapshot, for metrics, for operators, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from . import swaps
from .books import Books
from .contours import Contour, Move
from .floor import Reason
from .generation import Obstacle
from .inventory import WriterRecord
from .model import Cell, EndpointKey, Family, Group, WriterId
from .readiness import Readiness
from .replacement import Phase


@dataclass(frozen=True, slots=True)
class WriterView:
    """One writer."""

    writer: WriterId
    worker: str
    address: str
    family: Family
    cells: tuple[Cell, ...]
    contour: Contour
    generation: int
    incarnation: int
    age_s: float
    contour_age_s: float
    bound: int
    idle_s: float | None
    degraded: tuple[str, ...]
    replacement: Phase
    fallback: bool
    closing: Move | None


@dataclass(frozen=True, slots=True)
class EndpointView:
    """One endpoint in effect."""

    key: EndpointKey
    cells: tuple[Cell, ...]
    listed: bool
    vanished_s: float | None  # since it left the map
    drained: bool
    floor: int
    reason: Reason
    active: int
    dialling: int
    failures: int
    quarantined: bool


@dataclass(frozen=True, slots=True)
class MapView:
    """Map currency: what was read, what was taken, what is committed."""

    hash: str
    revision: int
    age_s: float
    committed_hash: str
    committed_revision: int
    revision_read: int
    read_age_s: float | None
    empty_refused_s: float | None  # since when an empty map is being refused


@dataclass(frozen=True, slots=True)
class PendingView:
    """The generation in warmup."""

    generation: int
    fresh: bool
    triggers: tuple[str, ...]
    age_s: float
    wanted_s: float  # since a generation has been wanted without one being committed
    writers: int
    deficit: int
    ratio: float
    missing_groups: tuple[Group, ...]
    missing_endpoints: tuple[EndpointKey, ...]
    obstacle: Obstacle


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """All of it, at one moment. Counters are monotonic."""

    readiness: Readiness
    stage: str
    generation: int
    map: MapView
    pending: PendingView | None
    next_reinit_s: float | None
    left_missing: tuple[Group, ...]  # cell-families that the last commit left to stale writers, still uncovered
    missing_groups: tuple[Group, ...]  # cell-families of endpoints in effect without a serving writer
    writers: tuple[WriterView, ...]
    endpoints: tuple[EndpointView, ...]
    by_contour: Mapping[Contour, int]
    by_cell: Mapping[Cell, int]  # serving writers
    by_family: Mapping[Family, int]
    orphan_warm: int  # Warm writers of no current generation
    preparing: int
    retiring: int
    bound: int
    idle: int  # Active writers without routes
    degraded: Mapping[str, int]
    dials: int
    dial_failures: int
    dials_stale: int
    flaps: int
    quarantines: int
    quarantined: int
    probes: int
    connects: int
    reconnects: int
    removals: Mapping[Move, int]
    churn_per_writer_hour: float  # reconnects and removals
    floor_switches: int
    commits: Mapping[str, int]
    commits_refused: Mapping[Obstacle, int]
    pendings_expired: int
    pendings_superseded: int


def snapshot(books: Books, now: float) -> PoolSnapshot:
    """Of the books as they are."""
    inventory, generations, refill = books.inventory, books.generations, books.refill
    writers = tuple(_writer(books, record, now) for record in inventory)
    serving = books.cover()
    pending = generations.pending
    current = {generations.active, *([pending.key.generation] if pending else [])}
    phases = Counter(books.replacements.phases().values())
    churn = inventory.churn
    lived = churn.writer_seconds + sum(view.age_s for view in writers)
    groups = {group for endpoint in books.roster.dialable() for group in endpoint.groups}
    return PoolSnapshot(
        readiness=books.gate.now,
        stage=books.shutdown.stage.value,
        generation=generations.active,
        map=_map(books, now),
        pending=_pending(books, now),
        next_reinit_s=None if generations.reinit_at is None else generations.reinit_at - now,
        left_missing=tuple(sorted(generations.left_missing)),
        missing_groups=tuple(sorted(group for group in groups if not serving.groups[group])),
        writers=writers,
        endpoints=_endpoints(books, now),
        by_contour=Counter(view.contour for view in writers),
        by_cell=+serving.cells,
        by_family=Counter(record.endpoint.family for record in inventory if record.serving),
        orphan_warm=sum(r.contour is Contour.WARM and r.generation not in current for r in inventory),
        preparing=phases[Phase.PREPARING],
        retiring=phases[Phase.RETIRING],
        bound=inventory.bound(),
        idle=sum(record.active and not record.bound for record in inventory),
        degraded=Counter(reason for record in inventory for reason in record.degraded),
        dials=refill.counts.dials,
        dial_failures=refill.counts.failures,
        dials_stale=refill.counts.stale,
        flaps=refill.counts.flaps,
        quarantines=refill.counts.quarantines,
        quarantined=sum(refill.quarantined(entry.endpoint.key, now) for entry in books.roster),
        probes=books.probes.done,
        connects=churn.connects,
        reconnects=churn.reconnects,
        removals=dict(churn.removals),
        churn_per_writer_hour=3600 * (churn.reconnects + sum(churn.removals.values())) / lived if lived else 0.0,
        floor_switches=books.floors.switches,
        commits={trigger.value: count for trigger, count in generations.commits.items()},
        commits_refused=dict(generations.refused),
        pendings_expired=generations.expired,
        pendings_superseded=generations.superseded,
    )


def _writer(books: Books, record: WriterRecord, now: float) -> WriterView:
    return WriterView(
        record.writer,
        record.key.worker,
        record.key.address,
        record.endpoint.family,
        record.endpoint.cells,
        record.contour,
        record.generation,
        record.incarnation,
        now - record.opened_at,
        now - record.since,
        record.bound,
        None if record.idle_since is None else now - record.idle_since,
        tuple(sorted(record.degraded)),
        books.replacements.phase(record.writer),
        record.fallback,
        record.closing,
    )


def _endpoints(books: Books, now: float) -> tuple[EndpointView, ...]:
    views = []
    for entry in books.roster:
        key = entry.endpoint.key
        target = books.targets.get(key)
        views.append(
            EndpointView(
                key,
                entry.endpoint.cells,
                entry.listed,
                None if entry.vanished_at is None else now - entry.vanished_at,
                entry.drained,
                target.count if target else 0,
                target.reason if target else Reason.STATIC,
                sum(record.active for record in books.inventory.of_endpoint(key)),
                len(books.refill.of_endpoint(key)),
                books.refill.failures(key),
                books.refill.quarantined(key, now),
            )
        )
    return tuple(views)


def _map(books: Books, now: float) -> MapView:
    desired, committed = books.desired, books.generations.committed
    taken = desired.taken
    return MapView(
        taken.hash if taken else "",
        taken.revision if taken else 0,
        now - desired.taken_at if taken else 0.0,
        committed.hash if committed else "",
        committed.revision if committed else 0,
        desired.revision_read,
        None if desired.read_at is None else now - desired.read_at,
        None if desired.empty_since is None else now - desired.empty_since,
    )


def _pending(books: Books, now: float) -> PendingView | None:
    pending, found = books.generations.pending, swaps.assessment(books)
    if pending is None or found is None:
        return None
    number = pending.key.generation
    own = [record for record in books.inventory if record.generation == number and record.live]
    deficit = 0
    for key in pending.map.by_key:
        target = books.targets.get(key)
        deficit += max(0, (target.count if target else 0) - found.fresh.endpoints[key])
    return PendingView(
        number,
        pending.fresh,
        tuple(sorted(trigger.value for trigger in pending.triggers)),
        now - pending.created_at,
        now - pending.wanted_since,
        len(own),
        deficit,
        found.ratio,
        tuple(sorted(found.missing_groups)),
        tuple(sorted(found.missing_endpoints)),
        found.obstacle,
    )
