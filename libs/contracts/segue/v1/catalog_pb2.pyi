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
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_COPYING: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_FAILED: ReplicaState
REPLICA_STATE_REMOVED: ReplicaState

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
