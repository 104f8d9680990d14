from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolStatus(_message.Message):
    __slots__ = ("readiness", "missing_cells", "generation", "map", "pending", "next_reinit_ms", "missing", "left_missing", "writers", "endpoints", "cells", "counters", "routes", "bindings", "permits", "held", "policy")
    class CellsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PolicyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    READINESS_FIELD_NUMBER: _ClassVar[int]
    MISSING_CELLS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    NEXT_REINIT_MS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LEFT_MISSING_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    PERMITS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    readiness: str
    missing_cells: _containers.RepeatedScalarFieldContainer[str]
    generation: int
    map: MapCurrency
    pending: PendingGeneration
    next_reinit_ms: int
    missing: _containers.RepeatedCompositeFieldContainer[CellFamily]
    left_missing: _containers.RepeatedCompositeFieldContainer[CellFamily]
    writers: _containers.RepeatedCompositeFieldContainer[PoolWriter]
    endpoints: _containers.RepeatedCompositeFieldContainer[PoolEndpoint]
    cells: _containers.ScalarMap[str, int]
    counters: PoolCounters
    routes: int
    bindings: int
    permits: int
    held: int
    policy: _containers.ScalarMap[str, str]
    def __init__(self, readiness: _Optional[str] = ..., missing_cells: _Optional[_Iterable[str]] = ..., generation: _Optional[int] = ..., map: _Optional[_Union[MapCurrency, _Mapping]] = ..., pending: _Optional[_Union[PendingGeneration, _Mapping]] = ..., next_reinit_ms: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[CellFamily, _Mapping]]] = ..., left_missing: _Optional[_Iterable[_Union[CellFamily, _Mapping]]] = ..., writers: _Optional[_Iterable[_Union[PoolWriter, _Mapping]]] = ..., endpoints: _Optional[_Iterable[_Union[PoolEndpoint, _Mapping]]] = ..., cells: _Optional[_Mapping[str, int]] = ..., counters: _Optional[_Union[PoolCounters, _Mapping]] = ..., routes: _Optional[int] = ..., bindings: _Optional[int] = ..., permits: _Optional[int] = ..., held: _Optional[int] = ..., policy: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MapCurrency(_message.Message):
    __slots__ = ("hash", "revision", "age_ms", "committed_hash", "committed_revision", "revision_read", "read_age_ms", "empty_refused_ms")
    HASH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_HASH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    REVISION_READ_FIELD_NUMBER: _ClassVar[int]
    READ_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_REFUSED_MS_FIELD_NUMBER: _ClassVar[int]
    hash: str
    revision: int
    age_ms: int
    committed_hash: str
    committed_revision: int
    revision_read: int
    read_age_ms: int
    empty_refused_ms: int
    def __init__(self, hash: _Optional[str] = ..., revision: _Optional[int] = ..., age_ms: _Optional[int] = ..., committed_hash: _Optional[str] = ..., committed_revision: _Optional[int] = ..., revision_read: _Optional[int] = ..., read_age_ms: _Optional[int] = ..., empty_refused_ms: _Optional[int] = ...) -> None: ...

class PendingGeneration(_message.Message):
    __slots__ = ("generation", "fresh", "triggers", "age_ms", "wanted_ms", "writers", "deficit", "ratio", "missing", "obstacle")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    TRIGGERS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    WANTED_MS_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    DEFICIT_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    fresh: bool
    triggers: _containers.RepeatedScalarFieldContainer[str]
    age_ms: int
    wanted_ms: int
    writers: int
    deficit: int
    ratio: float
    missing: _containers.RepeatedCompositeFieldContainer[CellFamily]
    obstacle: str
    def __init__(self, generation: _Optional[int] = ..., fresh: _Optional[bool] = ..., triggers: _Optional[_Iterable[str]] = ..., age_ms: _Optional[int] = ..., wanted_ms: _Optional[int] = ..., writers: _Optional[int] = ..., deficit: _Optional[int] = ..., ratio: _Optional[float] = ..., missing: _Optional[_Iterable[_Union[CellFamily, _Mapping]]] = ..., obstacle: _Optional[str] = ...) -> None: ...

class CellFamily(_message.Message):
    __slots__ = ("cell", "family")
    CELL_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    cell: str
    family: str
    def __init__(self, cell: _Optional[str] = ..., family: _Optional[str] = ...) -> None: ...

class PoolWriter(_message.Message):
    __slots__ = ("id", "worker", "address", "family", "cells", "contour", "generation", "epoch", "age_ms", "contour_ms", "routes", "idle_ms", "degraded", "replacement", "fallback", "closing")
    ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    CONTOUR_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    CONTOUR_MS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    id: int
    worker: str
    address: str
    family: str
    cells: _containers.RepeatedScalarFieldContainer[str]
    contour: str
    generation: int
    epoch: int
    age_ms: int
    contour_ms: int
    routes: int
    idle_ms: int
    degraded: _containers.RepeatedScalarFieldContainer[str]
    replacement: str
    fallback: bool
    closing: str
    def __init__(self, id: _Optional[int] = ..., worker: _Optional[str] = ..., address: _Optional[str] = ..., family: _Optional[str] = ..., cells: _Optional[_Iterable[str]] = ..., contour: _Optional[str] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., age_ms: _Optional[int] = ..., contour_ms: _Optional[int] = ..., routes: _Optional[int] = ..., idle_ms: _Optional[int] = ..., degraded: _Optional[_Iterable[str]] = ..., replacement: _Optional[str] = ..., fallback: _Optional[bool] = ..., closing: _Optional[str] = ...) -> None: ...

class PoolEndpoint(_message.Message):
    __slots__ = ("worker", "address", "cells", "listed", "vanished_ms", "drained", "floor", "floor_reason", "active", "dialling", "failures", "quarantined")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    VANISHED_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    FLOOR_REASON_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    DIALLING_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    address: str
    cells: _containers.RepeatedScalarFieldContainer[str]
    listed: bool
    vanished_ms: int
    drained: bool
    floor: int
    floor_reason: str
    active: int
    dialling: int
    failures: int
    quarantined: bool
    def __init__(self, worker: _Optional[str] = ..., address: _Optional[str] = ..., cells: _Optional[_Iterable[str]] = ..., listed: _Optional[bool] = ..., vanished_ms: _Optional[int] = ..., drained: _Optional[bool] = ..., floor: _Optional[int] = ..., floor_reason: _Optional[str] = ..., active: _Optional[int] = ..., dialling: _Optional[int] = ..., failures: _Optional[int] = ..., quarantined: _Optional[bool] = ...) -> None: ...

class PoolCounters(_message.Message):
    __slots__ = ("dials", "dial_failures", "dials_stale", "flaps", "quarantines", "probes", "connects", "reconnects", "floor_switches", "generations_expired", "generations_superseded", "churn_per_writer_hour", "removals", "commits", "commits_refused", "route_ends", "dropped")
    class RemovalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CommitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CommitsRefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RouteEndsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DIALS_FIELD_NUMBER: _ClassVar[int]
    DIAL_FAILURES_FIELD_NUMBER: _ClassVar[int]
    DIALS_STALE_FIELD_NUMBER: _ClassVar[int]
    FLAPS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    CONNECTS_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_SWITCHES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    CHURN_PER_WRITER_HOUR_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    ROUTE_ENDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dials: int
    dial_failures: int
    dials_stale: int
    flaps: int
    quarantines: int
    probes: int
    connects: int
    reconnects: int
    floor_switches: int
    generations_expired: int
    generations_superseded: int
    churn_per_writer_hour: float
    removals: _containers.ScalarMap[str, int]
    commits: _containers.ScalarMap[str, int]
    commits_refused: _containers.ScalarMap[str, int]
    route_ends: _containers.ScalarMap[str, int]
    dropped: _containers.ScalarMap[str, int]
    def __init__(self, dials: _Optional[int] = ..., dial_failures: _Optional[int] = ..., dials_stale: _Optional[int] = ..., flaps: _Optional[int] = ..., quarantines: _Optional[int] = ..., probes: _Optional[int] = ..., connects: _Optional[int] = ..., reconnects: _Optional[int] = ..., floor_switches: _Optional[int] = ..., generations_expired: _Optional[int] = ..., generations_superseded: _Optional[int] = ..., churn_per_writer_hour: _Optional[float] = ..., removals: _Optional[_Mapping[str, int]] = ..., commits: _Optional[_Mapping[str, int]] = ..., commits_refused: _Optional[_Mapping[str, int]] = ..., route_ends: _Optional[_Mapping[str, int]] = ..., dropped: _Optional[_Mapping[str, int]] = ...) -> None: ...
