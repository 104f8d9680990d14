from libs.contracts.segue.v1 import catalog_pb2 as _catalog_pb2
from libs.contracts.segue.v1 import common_pb2 as _common_pb2
from libs.contracts.segue.v1 import pool_pb2 as _pool_pb2
from libs.contracts.segue.v1 import tunnel_pb2 as _tunnel_pb2
from libs.contracts.segue.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachMessage(_message.Message):
    __slots__ = ("submit", "cancel", "delivery")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    submit: GenerateRequest
    cancel: CancelRequest
    delivery: Delivery
    def __init__(self, submit: _Optional[_Union[GenerateRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., delivery: _Optional[_Union[Delivery, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request", "delivered", "fingerprint")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.GenerationRequest
    delivered: int
    fingerprint: str
    def __init__(self, request: _Optional[_Union[_common_pb2.GenerationRequest, _Mapping]] = ..., delivered: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("request_id", "tokens", "completed", "error", "cancelled")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: TokensDelivery
    completed: CompletedDelivery
    error: ErrorDelivery
    cancelled: CancelledDelivery
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Union[TokensDelivery, _Mapping]] = ..., completed: _Optional[_Union[CompletedDelivery, _Mapping]] = ..., error: _Optional[_Union[ErrorDelivery, _Mapping]] = ..., cancelled: _Optional[_Union[CancelledDelivery, _Mapping]] = ...) -> None: ...

class TokensDelivery(_message.Message):
    __slots__ = ("index", "tokens", "logprobs", "usage", "fingerprint")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    usage: _common_pb2.Usage
    fingerprint: str
    def __init__(self, index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Served(_message.Message):
    __slots__ = ("worker", "workers", "epoch", "attempts", "tier", "timings", "predicted_ttft_ms")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    attempts: int
    tier: _common_pb2.Tier
    timings: _common_pb2.Timings
    predicted_ttft_ms: float
    def __init__(self, worker: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ..., attempts: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., predicted_ttft_ms: _Optional[float] = ...) -> None: ...

class CompletedDelivery(_message.Message):
    __slots__ = ("finish_reason", "usage", "served")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    served: Served
    def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., served: _Optional[_Union[Served, _Mapping]] = ...) -> None: ...

class ErrorDelivery(_message.Message):
    __slots__ = ("code", "message", "retry_after_ms", "usage", "served")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    retry_after_ms: int
    usage: _common_pb2.Usage
    served: Served
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., served: _Optional[_Union[Served, _Mapping]] = ...) -> None: ...

class CancelledDelivery(_message.Message):
    __slots__ = ("usage", "served")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    usage: _common_pb2.Usage
    served: Served
    def __init__(self, usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., served: _Optional[_Union[Served, _Mapping]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("model", "tokens", "max_new_tokens", "tenant_salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    tenant_salt: str
    def __init__(self, model: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., tenant_salt: _Optional[str] = ...) -> None: ...

class ChainNode(_message.Message):
    __slots__ = ("hash", "start", "end", "durable", "tail")
    HASH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    hash: str
    start: int
    end: int
    durable: bool
    tail: bool
    def __init__(self, hash: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., durable: _Optional[bool] = ..., tail: _Optional[bool] = ...) -> None: ...

class ExplainedChain(_message.Message):
    __slots__ = ("fingerprint", "root", "nodes")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    root: str
    nodes: _containers.RepeatedCompositeFieldContainer[ChainNode]
    def __init__(self, fingerprint: _Optional[str] = ..., root: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[ChainNode, _Mapping]]] = ...) -> None: ...

class Pruned(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("ranked", "pruned", "chains", "infeasible", "revision")
    RANKED_FIELD_NUMBER: _ClassVar[int]
    PRUNED_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    INFEASIBLE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ranked: _containers.RepeatedCompositeFieldContainer[_common_pb2.Candidate]
    pruned: _containers.RepeatedCompositeFieldContainer[Pruned]
    chains: _containers.RepeatedCompositeFieldContainer[ExplainedChain]
    infeasible: str
    revision: int
    def __init__(self, ranked: _Optional[_Iterable[_Union[_common_pb2.Candidate, _Mapping]]] = ..., pruned: _Optional[_Iterable[_Union[Pruned, _Mapping]]] = ..., chains: _Optional[_Iterable[_Union[ExplainedChain, _Mapping]]] = ..., infeasible: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("endpoint", "heartbeat", "heard_ms", "tunnels", "resident", "listed")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HEARD_MS_FIELD_NUMBER: _ClassVar[int]
    TUNNELS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    endpoint: _catalog_pb2.Endpoint
    heartbeat: _worker_pb2.Heartbeat
    heard_ms: int
    tunnels: int
    resident: int
    listed: bool
    def __init__(self, endpoint: _Optional[_Union[_catalog_pb2.Endpoint, _Mapping]] = ..., heartbeat: _Optional[_Union[_worker_pb2.Heartbeat, _Mapping]] = ..., heard_ms: _Optional[int] = ..., tunnels: _Optional[int] = ..., resident: _Optional[int] = ..., listed: _Optional[bool] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "revision")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    revision: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class GetPoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPoolResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: _pool_pb2.PoolStatus
    def __init__(self, pool: _Optional[_Union[_pool_pb2.PoolStatus, _Mapping]] = ...) -> None: ...

class DrainEndpointRequest(_message.Message):
    __slots__ = ("worker", "address", "resume")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    worker: str
    address: str
    resume: bool
    def __init__(self, worker: _Optional[str] = ..., address: _Optional[str] = ..., resume: _Optional[bool] = ...) -> None: ...

class DrainEndpointResponse(_message.Message):
    __slots__ = ("endpoints", "routes")
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    endpoints: int
    routes: int
    def __init__(self, endpoints: _Optional[int] = ..., routes: _Optional[int] = ...) -> None: ...

class SwapGenerationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwapGenerationResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class SetPoolPolicyRequest(_message.Message):
    __slots__ = ("knobs",)
    class KnobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    knobs: _containers.ScalarMap[str, str]
    def __init__(self, knobs: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SetPoolPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    class PolicyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: _containers.ScalarMap[str, str]
    def __init__(self, policy: _Optional[_Mapping[str, str]] = ...) -> None: ...
