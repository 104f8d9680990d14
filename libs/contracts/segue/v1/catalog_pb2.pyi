from libs.contracts.segue.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_COPYING: _ClassVar[ReplicaState]
    REPLICA_STATE_READY: _ClassVar[ReplicaState]
    REPLICA_STATE_FAILED: _ClassVar[ReplicaState]
    REPLICA_STATE_REMOVED: _ClassVar[ReplicaState]

class CollectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COLLECT_REASON_UNSPECIFIED: _ClassVar[CollectReason]
    COLLECT_REASON_IDLE: _ClassVar[CollectReason]
    COLLECT_REASON_AGE: _ClassVar[CollectReason]
    COLLECT_REASON_SUPERSEDED: _ClassVar[CollectReason]
    COLLECT_REASON_PURGED: _ClassVar[CollectReason]
    COLLECT_REASON_UNNAMED: _ClassVar[CollectReason]
    COLLECT_REASON_UNCLAIMED: _ClassVar[CollectReason]
    COLLECT_REASON_OLD_DECISIONS: _ClassVar[CollectReason]
    COLLECT_REASON_BYTES_GONE: _ClassVar[CollectReason]
    COLLECT_REASON_UNFINISHED_UPLOAD: _ClassVar[CollectReason]

class AttemptOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTEMPT_OUTCOME_UNSPECIFIED: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_COMPLETED: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_DECLINED: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_TIMED_OUT: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_WORKER_LOST: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_WORKER_RETIRED: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_ROUTE_DROPPED: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_FAILED: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_CANCELLED: _ClassVar[AttemptOutcome]
    ATTEMPT_OUTCOME_DEADLINE: _ClassVar[AttemptOutcome]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_COPYING: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_FAILED: ReplicaState
REPLICA_STATE_REMOVED: ReplicaState
COLLECT_REASON_UNSPECIFIED: CollectReason
COLLECT_REASON_IDLE: CollectReason
COLLECT_REASON_AGE: CollectReason
COLLECT_REASON_SUPERSEDED: CollectReason
COLLECT_REASON_PURGED: CollectReason
COLLECT_REASON_UNNAMED: CollectReason
COLLECT_REASON_UNCLAIMED: CollectReason
COLLECT_REASON_OLD_DECISIONS: CollectReason
COLLECT_REASON_BYTES_GONE: CollectReason
COLLECT_REASON_UNFINISHED_UPLOAD: CollectReason
ATTEMPT_OUTCOME_UNSPECIFIED: AttemptOutcome
ATTEMPT_OUTCOME_COMPLETED: AttemptOutcome
ATTEMPT_OUTCOME_DECLINED: AttemptOutcome
ATTEMPT_OUTCOME_TIMED_OUT: AttemptOutcome
ATTEMPT_OUTCOME_WORKER_LOST: AttemptOutcome
ATTEMPT_OUTCOME_WORKER_RETIRED: AttemptOutcome
ATTEMPT_OUTCOME_ROUTE_DROPPED: AttemptOutcome
ATTEMPT_OUTCOME_FAILED: AttemptOutcome
ATTEMPT_OUTCOME_CANCELLED: AttemptOutcome
ATTEMPT_OUTCOME_DEADLINE: AttemptOutcome

class LayerGroup(_message.Message):
    __slots__ = ("name", "layers", "window", "kv_heads", "head_dim", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    window: int
    kv_heads: int
    head_dim: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., window: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("fingerprint", "groups", "chunk_tokens", "weights", "variant", "max_context", "chat_template_hash", "vocab_size")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    chunk_tokens: int
    weights: str
    variant: str
    max_context: int
    chat_template_hash: str
    vocab_size: int
    def __init__(self, fingerprint: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., chunk_tokens: _Optional[int] = ..., weights: _Optional[str] = ..., variant: _Optional[str] = ..., max_context: _Optional[int] = ..., chat_template_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("worker", "epoch", "address", "zone", "family", "models", "capacity_pages", "node")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_PAGES_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: int
    address: str
    zone: str
    family: str
    models: _containers.RepeatedScalarFieldContainer[str]
    capacity_pages: int
    node: str
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., zone: _Optional[str] = ..., family: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., capacity_pages: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("endpoint", "models", "names", "epoch")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    endpoint: Endpoint
    models: _containers.RepeatedCompositeFieldContainer[Model]
    names: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    def __init__(self, endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., names: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("epoch", "lease_id", "ttl_ms", "revision")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_id: int
    ttl_ms: int
    revision: int
    def __init__(self, epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("worker", "epoch", "lease_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: int
    lease_id: int
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("ttl_ms", "latest_epoch", "revision")
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LATEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    latest_epoch: int
    revision: int
    def __init__(self, ttl_ms: _Optional[int] = ..., latest_epoch: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker", "epoch")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: int
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ("removed", "revision")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    revision: int
    def __init__(self, removed: _Optional[bool] = ..., revision: _Optional[int] = ...) -> None: ...

class WatchEndpointsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndpointMap(_message.Message):
    __slots__ = ("endpoints", "hash", "revision")
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    hash: str
    revision: int
    def __init__(self, endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., hash: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class ResolveNameRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ResolveNameResponse(_message.Message):
    __slots__ = ("models", "revision")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    revision: int
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class SetNameRequest(_message.Message):
    __slots__ = ("name", "fingerprints")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., fingerprints: _Optional[_Iterable[str]] = ...) -> None: ...

class SetNameResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServedName(_message.Message):
    __slots__ = ("name", "fingerprints")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., fingerprints: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("names", "models", "revision")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedCompositeFieldContainer[ServedName]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    revision: int
    def __init__(self, names: _Optional[_Iterable[_Union[ServedName, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("fingerprint", "tenant_salt", "after", "tokens", "start")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    tenant_salt: str
    after: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    start: int
    def __init__(self, fingerprint: _Optional[str] = ..., tenant_salt: _Optional[str] = ..., after: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("group", "bucket", "key", "etag", "size", "content_id")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    group: str
    bucket: str
    key: str
    etag: str
    size: int
    content_id: str
    def __init__(self, group: _Optional[str] = ..., bucket: _Optional[str] = ..., key: _Optional[str] = ..., etag: _Optional[str] = ..., size: _Optional[int] = ..., content_id: _Optional[str] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("node", "group", "state", "content_id")
    NODE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    node: str
    group: str
    state: ReplicaState
    content_id: str
    def __init__(self, node: _Optional[str] = ..., group: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., content_id: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("hash", "parent", "start", "end", "tokens_sha256", "owner", "receipts", "created_ms", "tail")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SHA256_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    hash: str
    parent: str
    start: int
    end: int
    tokens_sha256: str
    owner: str
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    created_ms: int
    tail: bool
    def __init__(self, hash: _Optional[str] = ..., parent: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., tokens_sha256: _Optional[str] = ..., owner: _Optional[str] = ..., receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., created_ms: _Optional[int] = ..., tail: _Optional[bool] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("chunk", "replicas")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("nodes", "tail", "revision")
    NODES_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    tail: Node
    revision: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., tail: _Optional[_Union[Node, _Mapping]] = ..., revision: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("fingerprint", "chunks", "node")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    node: str
    def __init__(self, fingerprint: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., node: _Optional[str] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("hash", "created", "receipts")
    HASH_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    hash: str
    created: bool
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    def __init__(self, hash: _Optional[str] = ..., created: _Optional[bool] = ..., receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("chunks", "revision")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Published]
    revision: int
    def __init__(self, chunks: _Optional[_Iterable[_Union[Published, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class ReplicaUpdate(_message.Message):
    __slots__ = ("fingerprint", "hash", "replica")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    hash: str
    replica: Replica
    def __init__(self, fingerprint: _Optional[str] = ..., hash: _Optional[str] = ..., replica: _Optional[_Union[Replica, _Mapping]] = ...) -> None: ...

class SetReplicaRequest(_message.Message):
    __slots__ = ("updates",)
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[ReplicaUpdate]
    def __init__(self, updates: _Optional[_Iterable[_Union[ReplicaUpdate, _Mapping]]] = ...) -> None: ...

class SetReplicaResponse(_message.Message):
    __slots__ = ("revision", "unknown")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    revision: int
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class ChunkId(_message.Message):
    __slots__ = ("fingerprint", "hash")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    hash: str
    def __init__(self, fingerprint: _Optional[str] = ..., hash: _Optional[str] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("fingerprint", "hash", "node", "priority", "requester", "chunk")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    hash: str
    node: str
    priority: int
    requester: str
    chunk: Chunk
    def __init__(self, fingerprint: _Optional[str] = ..., hash: _Optional[str] = ..., node: _Optional[str] = ..., priority: _Optional[int] = ..., requester: _Optional[str] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class SetDemandsRequest(_message.Message):
    __slots__ = ("demands", "ttl_ms")
    DEMANDS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    demands: _containers.RepeatedCompositeFieldContainer[Demand]
    ttl_ms: int
    def __init__(self, demands: _Optional[_Iterable[_Union[Demand, _Mapping]]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class SetDemandsResponse(_message.Message):
    __slots__ = ("ttl_ms", "unknown", "revision")
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    unknown: _containers.RepeatedScalarFieldContainer[str]
    revision: int
    def __init__(self, ttl_ms: _Optional[int] = ..., unknown: _Optional[_Iterable[str]] = ..., revision: _Optional[int] = ...) -> None: ...

class DemandId(_message.Message):
    __slots__ = ("fingerprint", "hash", "node")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    hash: str
    node: str
    def __init__(self, fingerprint: _Optional[str] = ..., hash: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class RemoveDemandsRequest(_message.Message):
    __slots__ = ("demands",)
    DEMANDS_FIELD_NUMBER: _ClassVar[int]
    demands: _containers.RepeatedCompositeFieldContainer[DemandId]
    def __init__(self, demands: _Optional[_Iterable[_Union[DemandId, _Mapping]]] = ...) -> None: ...

class RemoveDemandsResponse(_message.Message):
    __slots__ = ("revision", "removed")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    revision: int
    removed: int
    def __init__(self, revision: _Optional[int] = ..., removed: _Optional[int] = ...) -> None: ...

class ListDemandsRequest(_message.Message):
    __slots__ = ("node", "page_size", "page_token")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    node: str
    page_size: int
    page_token: str
    def __init__(self, node: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDemandsResponse(_message.Message):
    __slots__ = ("demands", "next_page_token", "revision")
    DEMANDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    demands: _containers.RepeatedCompositeFieldContainer[Demand]
    next_page_token: str
    revision: int
    def __init__(self, demands: _Optional[_Iterable[_Union[Demand, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class WatchDemandsRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class Removal(_message.Message):
    __slots__ = ("fingerprint", "owner", "hash")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    owner: str
    hash: str
    def __init__(self, fingerprint: _Optional[str] = ..., owner: _Optional[str] = ..., hash: _Optional[str] = ...) -> None: ...

class DemandMap(_message.Message):
    __slots__ = ("demands", "removals", "revision")
    DEMANDS_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    demands: _containers.RepeatedCompositeFieldContainer[Demand]
    removals: _containers.RepeatedCompositeFieldContainer[Removal]
    revision: int
    def __init__(self, demands: _Optional[_Iterable[_Union[Demand, _Mapping]]] = ..., removals: _Optional[_Iterable[_Union[Removal, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class ConfirmRemovalsRequest(_message.Message):
    __slots__ = ("node", "chunks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    node: str
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkId]
    def __init__(self, node: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[ChunkId, _Mapping]]] = ...) -> None: ...

class ConfirmRemovalsResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class PinFact(_message.Message):
    __slots__ = ("fingerprint", "hash", "who", "why", "pinned_ms")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PINNED_MS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    hash: str
    who: str
    why: str
    pinned_ms: int
    def __init__(self, fingerprint: _Optional[str] = ..., hash: _Optional[str] = ..., who: _Optional[str] = ..., why: _Optional[str] = ..., pinned_ms: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("chunks", "who", "why")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkId]
    who: str
    why: str
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkId, _Mapping]]] = ..., who: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("unknown", "revision")
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    revision: int
    def __init__(self, unknown: _Optional[_Iterable[str]] = ..., revision: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkId]
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkId, _Mapping]]] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("removed", "revision")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    removed: int
    revision: int
    def __init__(self, removed: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ("fingerprint", "page_size", "page_token")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    page_size: int
    page_token: str
    def __init__(self, fingerprint: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins", "next_page_token", "revision")
    PINS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinFact]
    next_page_token: str
    revision: int
    def __init__(self, pins: _Optional[_Iterable[_Union[PinFact, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class RecordUseRequest(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkId]
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkId, _Mapping]]] = ...) -> None: ...

class RecordUseResponse(_message.Message):
    __slots__ = ("written", "revision")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    written: int
    revision: int
    def __init__(self, written: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class ListChunksRequest(_message.Message):
    __slots__ = ("fingerprint", "owner", "hash_prefix", "page_size", "page_token")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HASH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    owner: str
    hash_prefix: str
    page_size: int
    page_token: str
    def __init__(self, fingerprint: _Optional[str] = ..., owner: _Optional[str] = ..., hash_prefix: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListedChunk(_message.Message):
    __slots__ = ("fingerprint", "chunk", "replicas", "pin", "last_use_day", "use_days")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_DAY_FIELD_NUMBER: _ClassVar[int]
    USE_DAYS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    chunk: Chunk
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    pin: PinFact
    last_use_day: int
    use_days: int
    def __init__(self, fingerprint: _Optional[str] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., pin: _Optional[_Union[PinFact, _Mapping]] = ..., last_use_day: _Optional[int] = ..., use_days: _Optional[int] = ...) -> None: ...

class ListChunksResponse(_message.Message):
    __slots__ = ("chunks", "next_page_token", "revision")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ListedChunk]
    next_page_token: str
    revision: int
    def __init__(self, chunks: _Optional[_Iterable[_Union[ListedChunk, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("owner", "idle_days", "max_age_days")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    IDLE_DAYS_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_DAYS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    idle_days: int
    max_age_days: int
    def __init__(self, owner: _Optional[str] = ..., idle_days: _Optional[int] = ..., max_age_days: _Optional[int] = ...) -> None: ...

class SetRetentionRequest(_message.Message):
    __slots__ = ("retention", "reset")
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    retention: Retention
    reset: bool
    def __init__(self, retention: _Optional[_Union[Retention, _Mapping]] = ..., reset: _Optional[bool] = ...) -> None: ...

class SetRetentionResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class ListRetentionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRetentionsResponse(_message.Message):
    __slots__ = ("standard", "owners", "revision")
    STANDARD_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    standard: Retention
    owners: _containers.RepeatedCompositeFieldContainer[Retention]
    revision: int
    def __init__(self, standard: _Optional[_Union[Retention, _Mapping]] = ..., owners: _Optional[_Iterable[_Union[Retention, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class Collected(_message.Message):
    __slots__ = ("reason", "fingerprint", "hash", "owner", "key", "node", "bytes")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    reason: CollectReason
    fingerprint: str
    hash: str
    owner: str
    key: str
    node: str
    bytes: int
    def __init__(self, reason: _Optional[_Union[CollectReason, str]] = ..., fingerprint: _Optional[str] = ..., hash: _Optional[str] = ..., owner: _Optional[str] = ..., key: _Optional[str] = ..., node: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class CollectTotals(_message.Message):
    __slots__ = ("chunks_examined", "chunks_removed", "bytes_condemned", "objects_examined", "objects_removed", "bytes_removed", "objects_waiting", "replicas_removed", "decisions_removed", "raced", "foreign", "uploads_aborted", "uploads_waiting")
    CHUNKS_EXAMINED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_CONDEMNED_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_EXAMINED_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_REMOVED_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    RACED_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_WAITING_FIELD_NUMBER: _ClassVar[int]
    chunks_examined: int
    chunks_removed: int
    bytes_condemned: int
    objects_examined: int
    objects_removed: int
    bytes_removed: int
    objects_waiting: int
    replicas_removed: int
    decisions_removed: int
    raced: int
    foreign: int
    uploads_aborted: int
    uploads_waiting: int
    def __init__(self, chunks_examined: _Optional[int] = ..., chunks_removed: _Optional[int] = ..., bytes_condemned: _Optional[int] = ..., objects_examined: _Optional[int] = ..., objects_removed: _Optional[int] = ..., bytes_removed: _Optional[int] = ..., objects_waiting: _Optional[int] = ..., replicas_removed: _Optional[int] = ..., decisions_removed: _Optional[int] = ..., raced: _Optional[int] = ..., foreign: _Optional[int] = ..., uploads_aborted: _Optional[int] = ..., uploads_waiting: _Optional[int] = ...) -> None: ...

class CollectGarbageRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: _Optional[bool] = ...) -> None: ...

class CollectGarbageResponse(_message.Message):
    __slots__ = ("phase", "collected", "totals", "done", "revision", "bucket_of_another")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BUCKET_OF_ANOTHER_FIELD_NUMBER: _ClassVar[int]
    phase: str
    collected: _containers.RepeatedCompositeFieldContainer[Collected]
    totals: CollectTotals
    done: bool
    revision: int
    bucket_of_another: bool
    def __init__(self, phase: _Optional[str] = ..., collected: _Optional[_Iterable[_Union[Collected, _Mapping]]] = ..., totals: _Optional[_Union[CollectTotals, _Mapping]] = ..., done: _Optional[bool] = ..., revision: _Optional[int] = ..., bucket_of_another: _Optional[bool] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("owner", "dry_run", "include_pinned")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_PINNED_FIELD_NUMBER: _ClassVar[int]
    owner: str
    dry_run: bool
    include_pinned: bool
    def __init__(self, owner: _Optional[str] = ..., dry_run: _Optional[bool] = ..., include_pinned: _Optional[bool] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("phase", "collected", "totals", "done", "pinned", "nodes", "revision")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    phase: str
    collected: _containers.RepeatedCompositeFieldContainer[Collected]
    totals: CollectTotals
    done: bool
    pinned: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    revision: int
    def __init__(self, phase: _Optional[str] = ..., collected: _Optional[_Iterable[_Union[Collected, _Mapping]]] = ..., totals: _Optional[_Union[CollectTotals, _Mapping]] = ..., done: _Optional[bool] = ..., pinned: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ..., revision: _Optional[int] = ...) -> None: ...

class RepairRequest(_message.Message):
    __slots__ = ("fingerprint", "owner", "dry_run")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    owner: str
    dry_run: bool
    def __init__(self, fingerprint: _Optional[str] = ..., owner: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class MissingObject(_message.Message):
    __slots__ = ("fingerprint", "hash", "group", "key")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    hash: str
    group: str
    key: str
    def __init__(self, fingerprint: _Optional[str] = ..., hash: _Optional[str] = ..., group: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class RepairResponse(_message.Message):
    __slots__ = ("phase", "missing", "collected", "totals", "done", "pinned", "revision")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    phase: str
    missing: _containers.RepeatedCompositeFieldContainer[MissingObject]
    collected: _containers.RepeatedCompositeFieldContainer[Collected]
    totals: CollectTotals
    done: bool
    pinned: int
    revision: int
    def __init__(self, phase: _Optional[str] = ..., missing: _Optional[_Iterable[_Union[MissingObject, _Mapping]]] = ..., collected: _Optional[_Iterable[_Union[Collected, _Mapping]]] = ..., totals: _Optional[_Union[CollectTotals, _Mapping]] = ..., done: _Optional[bool] = ..., pinned: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class RebuildRequest(_message.Message):
    __slots__ = ("fingerprint", "dry_run")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    dry_run: bool
    def __init__(self, fingerprint: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class Unusable(_message.Message):
    __slots__ = ("key", "reason", "detail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    key: str
    reason: str
    detail: str
    def __init__(self, key: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class RebuildResponse(_message.Message):
    __slots__ = ("phase", "objects", "read", "published", "standing", "unusable", "done", "revision")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    phase: str
    objects: int
    read: int
    published: int
    standing: int
    unusable: _containers.RepeatedCompositeFieldContainer[Unusable]
    done: bool
    revision: int
    def __init__(self, phase: _Optional[str] = ..., objects: _Optional[int] = ..., read: _Optional[int] = ..., published: _Optional[int] = ..., standing: _Optional[int] = ..., unusable: _Optional[_Iterable[_Union[Unusable, _Mapping]]] = ..., done: _Optional[bool] = ..., revision: _Optional[int] = ...) -> None: ...

class DecisionAttempt(_message.Message):
    __slots__ = ("attempt", "choice", "outcome", "decline", "detail", "predicted_ttft_ms", "measured_ttft_ms", "usage", "timings")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    choice: int
    outcome: AttemptOutcome
    decline: _common_pb2.DeclineReason
    detail: str
    predicted_ttft_ms: float
    measured_ttft_ms: float
    usage: _common_pb2.Usage
    timings: _common_pb2.Timings
    def __init__(self, attempt: _Optional[int] = ..., choice: _Optional[int] = ..., outcome: _Optional[_Union[AttemptOutcome, str]] = ..., decline: _Optional[_Union[_common_pb2.DeclineReason, str]] = ..., detail: _Optional[str] = ..., predicted_ttft_ms: _Optional[float] = ..., measured_ttft_ms: _Optional[float] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ...) -> None: ...

class PrunedCandidates(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ScoreTerms(_message.Message):
    __slots__ = ("queue_ms", "load_ms", "restore_ms", "prefill_ms_per_token", "first_token_ms", "ttft_ms", "uncorrected_queue_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    UNCORRECTED_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    load_ms: float
    restore_ms: float
    prefill_ms_per_token: float
    first_token_ms: float
    ttft_ms: float
    uncorrected_queue_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., restore_ms: _Optional[float] = ..., prefill_ms_per_token: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., uncorrected_queue_ms: _Optional[float] = ...) -> None: ...

class DecisionRecord(_message.Message):
    __slots__ = ("request_id", "plan_id", "decided_ms", "router", "model", "fingerprint", "worker", "prompt_tokens", "resumed_at", "ranked", "pruned", "attempts", "facts_revision", "avoid", "terms", "drawn_by", "seat", "band_ms", "held_ms", "draw_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    DECIDED_MS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_AT_FIELD_NUMBER: _ClassVar[int]
    RANKED_FIELD_NUMBER: _ClassVar[int]
    PRUNED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FACTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    DRAWN_BY_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    BAND_MS_FIELD_NUMBER: _ClassVar[int]
    HELD_MS_FIELD_NUMBER: _ClassVar[int]
    DRAW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    plan_id: int
    decided_ms: int
    router: str
    model: str
    fingerprint: str
    worker: str
    prompt_tokens: int
    resumed_at: int
    ranked: _containers.RepeatedCompositeFieldContainer[_common_pb2.Candidate]
    pruned: _containers.RepeatedCompositeFieldContainer[PrunedCandidates]
    attempts: _containers.RepeatedCompositeFieldContainer[DecisionAttempt]
    facts_revision: int
    avoid: _containers.RepeatedScalarFieldContainer[str]
    terms: _containers.RepeatedCompositeFieldContainer[ScoreTerms]
    drawn_by: str
    seat: int
    band_ms: float
    held_ms: float
    draw_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., plan_id: _Optional[int] = ..., decided_ms: _Optional[int] = ..., router: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., worker: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., resumed_at: _Optional[int] = ..., ranked: _Optional[_Iterable[_Union[_common_pb2.Candidate, _Mapping]]] = ..., pruned: _Optional[_Iterable[_Union[PrunedCandidates, _Mapping]]] = ..., attempts: _Optional[_Iterable[_Union[DecisionAttempt, _Mapping]]] = ..., facts_revision: _Optional[int] = ..., avoid: _Optional[_Iterable[str]] = ..., terms: _Optional[_Iterable[_Union[ScoreTerms, _Mapping]]] = ..., drawn_by: _Optional[str] = ..., seat: _Optional[int] = ..., band_ms: _Optional[float] = ..., held_ms: _Optional[float] = ..., draw_tokens: _Optional[int] = ...) -> None: ...

class AppendDecisionsRequest(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[DecisionRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[DecisionRecord, _Mapping]]] = ...) -> None: ...

class AppendDecisionsResponse(_message.Message):
    __slots__ = ("key", "size", "revision")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    key: str
    size: int
    revision: int
    def __init__(self, key: _Optional[str] = ..., size: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class ListDecisionsRequest(_message.Message):
    __slots__ = ("request_id", "from_ms", "until_ms", "worker", "outcome", "decline", "model", "page_size", "page_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    from_ms: int
    until_ms: int
    worker: str
    outcome: AttemptOutcome
    decline: _common_pb2.DeclineReason
    model: str
    page_size: int
    page_token: str
    def __init__(self, request_id: _Optional[str] = ..., from_ms: _Optional[int] = ..., until_ms: _Optional[int] = ..., worker: _Optional[str] = ..., outcome: _Optional[_Union[AttemptOutcome, str]] = ..., decline: _Optional[_Union[_common_pb2.DeclineReason, str]] = ..., model: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDecisionsResponse(_message.Message):
    __slots__ = ("records", "next_page_token", "revision")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[DecisionRecord]
    next_page_token: str
    revision: int
    def __init__(self, records: _Optional[_Iterable[_Union[DecisionRecord, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class GetDecisionRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetDecisionResponse(_message.Message):
    __slots__ = ("records", "revision")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[DecisionRecord]
    revision: int
    def __init__(self, records: _Optional[_Iterable[_Union[DecisionRecord, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...
