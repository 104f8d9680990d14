from libs.contracts.segue.v1 import catalog_pb2 as _catalog_pb2
from libs.contracts.segue.v1 import common_pb2 as _common_pb2
from libs.contracts.segue.v1 import tunnel_pb2 as _tunnel_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TunnelMessage(_message.Message):
    __slots__ = ("offer", "cancel", "offer_reply", "delta", "result", "heartbeat", "snapshot_request", "elect")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    OFFER_REPLY_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ELECT_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    cancel: Cancel
    offer_reply: OfferReply
    delta: Delta
    result: Result
    heartbeat: Heartbeat
    snapshot_request: SnapshotRequest
    elect: ElectTunnel
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., offer_reply: _Optional[_Union[OfferReply, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., snapshot_request: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., elect: _Optional[_Union[ElectTunnel, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("assignment", "epoch", "request", "fingerprint", "candidate", "chain")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    assignment: _common_pb2.AssignmentId
    epoch: int
    request: _common_pb2.GenerationRequest
    fingerprint: str
    candidate: _common_pb2.Candidate
    chain: _containers.RepeatedCompositeFieldContainer[_catalog_pb2.Node]
    def __init__(self, assignment: _Optional[_Union[_common_pb2.AssignmentId, _Mapping]] = ..., epoch: _Optional[int] = ..., request: _Optional[_Union[_common_pb2.GenerationRequest, _Mapping]] = ..., fingerprint: _Optional[str] = ..., candidate: _Optional[_Union[_common_pb2.Candidate, _Mapping]] = ..., chain: _Optional[_Iterable[_Union[_catalog_pb2.Node, _Mapping]]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("assignment", "epoch")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    assignment: _common_pb2.AssignmentId
    epoch: int
    def __init__(self, assignment: _Optional[_Union[_common_pb2.AssignmentId, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("assignment", "epoch", "accepted", "reason", "detail", "load")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    assignment: _common_pb2.AssignmentId
    epoch: int
    accepted: bool
    reason: _common_pb2.DeclineReason
    detail: str
    load: Load
    def __init__(self, assignment: _Optional[_Union[_common_pb2.AssignmentId, _Mapping]] = ..., epoch: _Optional[int] = ..., accepted: _Optional[bool] = ..., reason: _Optional[_Union[_common_pb2.DeclineReason, str]] = ..., detail: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queue_ms", "active", "decoding", "waiting", "pages")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    active: int
    decoding: int
    waiting: int
    pages: Pages
    def __init__(self, queue_ms: _Optional[float] = ..., active: _Optional[int] = ..., decoding: _Optional[int] = ..., waiting: _Optional[int] = ..., pages: _Optional[_Union[Pages, _Mapping]] = ...) -> None: ...

class Pages(_message.Message):
    __slots__ = ("total", "free", "reserved", "loading", "resident", "evicting", "evictable")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    EVICTING_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    reserved: int
    loading: int
    resident: int
    evicting: int
    evictable: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., reserved: _Optional[int] = ..., loading: _Optional[int] = ..., resident: _Optional[int] = ..., evicting: _Optional[int] = ..., evictable: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("assignment", "epoch", "index", "tokens", "logprobs", "usage", "timings")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    assignment: _common_pb2.AssignmentId
    epoch: int
    index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    usage: _common_pb2.Usage
    timings: _common_pb2.Timings
    def __init__(self, assignment: _Optional[_Union[_common_pb2.AssignmentId, _Mapping]] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("assignment", "epoch", "status", "finish_reason", "error", "usage", "timings", "heartbeat")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    assignment: _common_pb2.AssignmentId
    epoch: int
    status: _common_pb2.ResultStatus
    finish_reason: _common_pb2.FinishReason
    error: str
    usage: _common_pb2.Usage
    timings: _common_pb2.Timings
    heartbeat: int
    def __init__(self, assignment: _Optional[_Union[_common_pb2.AssignmentId, _Mapping]] = ..., epoch: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ResultStatus, str]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., heartbeat: _Optional[int] = ...) -> None: ...

class Resident(_message.Message):
    __slots__ = ("hash", "end", "tier", "fingerprint", "arrival_ms", "groups")
    HASH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_MS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    hash: str
    end: int
    tier: _common_pb2.Tier
    fingerprint: str
    arrival_ms: float
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hash: _Optional[str] = ..., end: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., fingerprint: _Optional[str] = ..., arrival_ms: _Optional[float] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("hash", "tier")
    HASH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    hash: str
    tier: _common_pb2.Tier
    def __init__(self, hash: _Optional[str] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class PrefillCost(_message.Message):
    __slots__ = ("up_to_tokens", "ms_per_token")
    UP_TO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    up_to_tokens: int
    ms_per_token: float
    def __init__(self, up_to_tokens: _Optional[int] = ..., ms_per_token: _Optional[float] = ...) -> None: ...

class DecodeCost(_message.Message):
    __slots__ = ("lanes", "step_ms")
    LANES_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    lanes: int
    step_ms: float
    def __init__(self, lanes: _Optional[int] = ..., step_ms: _Optional[float] = ...) -> None: ...

class TierCost(_message.Message):
    __slots__ = ("tier", "latency_ms", "bytes_per_ms", "break_even_tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_MS_FIELD_NUMBER: _ClassVar[int]
    BREAK_EVEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    latency_ms: float
    bytes_per_ms: float
    break_even_tokens: int
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., latency_ms: _Optional[float] = ..., bytes_per_ms: _Optional[float] = ..., break_even_tokens: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("version", "worker", "epoch", "sequence", "node", "draining", "load", "lanes", "page_tokens", "max_context", "models", "prefill", "decode", "tiers", "resident", "gone", "snapshot", "bytes_per_token")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    version: int
    worker: str
    epoch: int
    sequence: int
    node: str
    draining: bool
    load: Load
    lanes: int
    page_tokens: int
    max_context: int
    models: _containers.RepeatedScalarFieldContainer[str]
    prefill: _containers.RepeatedCompositeFieldContainer[PrefillCost]
    decode: _containers.RepeatedCompositeFieldContainer[DecodeCost]
    tiers: _containers.RepeatedCompositeFieldContainer[TierCost]
    resident: _containers.RepeatedCompositeFieldContainer[Resident]
    gone: _containers.RepeatedCompositeFieldContainer[Gone]
    snapshot: bool
    bytes_per_token: int
    def __init__(self, version: _Optional[int] = ..., worker: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., node: _Optional[str] = ..., draining: _Optional[bool] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., lanes: _Optional[int] = ..., page_tokens: _Optional[int] = ..., max_context: _Optional[int] = ..., models: _Optional[_Iterable[str]] = ..., prefill: _Optional[_Iterable[_Union[PrefillCost, _Mapping]]] = ..., decode: _Optional[_Iterable[_Union[DecodeCost, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierCost, _Mapping]]] = ..., resident: _Optional[_Iterable[_Union[Resident, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[Gone, _Mapping]]] = ..., snapshot: _Optional[bool] = ..., bytes_per_token: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ElectTunnel(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class WorkerGenerateRequest(_message.Message):
    __slots__ = ("request", "fingerprint", "chain", "attempt")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.GenerationRequest
    fingerprint: str
    chain: _containers.RepeatedCompositeFieldContainer[_catalog_pb2.Node]
    attempt: int
    def __init__(self, request: _Optional[_Union[_common_pb2.GenerationRequest, _Mapping]] = ..., fingerprint: _Optional[str] = ..., chain: _Optional[_Iterable[_Union[_catalog_pb2.Node, _Mapping]]] = ..., attempt: _Optional[int] = ...) -> None: ...

class WorkerGenerateResponse(_message.Message):
    __slots__ = ("accepted", "delta", "result")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    accepted: OfferReply
    delta: Delta
    result: Result
    def __init__(self, accepted: _Optional[_Union[OfferReply, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("endpoint", "models", "observation", "pages", "disk_bytes", "disk_cap_bytes", "checkpoints_pending", "checkpoints_dropped", "assignments")
    class PagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Pages
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Pages, _Mapping]] = ...) -> None: ...
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_PENDING_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    endpoint: _catalog_pb2.Endpoint
    models: _containers.RepeatedCompositeFieldContainer[_catalog_pb2.Model]
    observation: Heartbeat
    pages: _containers.MessageMap[str, Pages]
    disk_bytes: int
    disk_cap_bytes: int
    checkpoints_pending: int
    checkpoints_dropped: int
    assignments: _containers.RepeatedCompositeFieldContainer[_common_pb2.AssignmentId]
    def __init__(self, endpoint: _Optional[_Union[_catalog_pb2.Endpoint, _Mapping]] = ..., models: _Optional[_Iterable[_Union[_catalog_pb2.Model, _Mapping]]] = ..., observation: _Optional[_Union[Heartbeat, _Mapping]] = ..., pages: _Optional[_Mapping[str, Pages]] = ..., disk_bytes: _Optional[int] = ..., disk_cap_bytes: _Optional[int] = ..., checkpoints_pending: _Optional[int] = ..., checkpoints_dropped: _Optional[int] = ..., assignments: _Optional[_Iterable[_Union[_common_pb2.AssignmentId, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_ms",)
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    def __init__(self, grace_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("clean", "cancelled", "unpublished")
    CLEAN_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    UNPUBLISHED_FIELD_NUMBER: _ClassVar[int]
    clean: bool
    cancelled: int
    unpublished: int
    def __init__(self, clean: _Optional[bool] = ..., cancelled: _Optional[int] = ..., unpublished: _Optional[int] = ...) -> None: ...

class FetchChunkRequest(_message.Message):
    __slots__ = ("epoch", "fingerprint", "owner", "hash", "group", "content_id", "offset", "length")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    fingerprint: str
    owner: str
    hash: str
    group: str
    content_id: str
    offset: int
    length: int
    def __init__(self, epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., owner: _Optional[str] = ..., hash: _Optional[str] = ..., group: _Optional[str] = ..., content_id: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FetchChunkResponse(_message.Message):
    __slots__ = ("offset", "data", "size")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    size: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...
