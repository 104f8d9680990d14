from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]
    TIER_INFLIGHT: _ClassVar[Tier]
    TIER_RAM: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
    TIER_PEER: _ClassVar[Tier]
    TIER_OBJECT: _ClassVar[Tier]
    TIER_NONE: _ClassVar[Tier]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class DeclineReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECLINE_REASON_UNSPECIFIED: _ClassVar[DeclineReason]
    DECLINE_REASON_WRONG_EPOCH: _ClassVar[DeclineReason]
    DECLINE_REASON_MODEL_NOT_LOADED: _ClassVar[DeclineReason]
    DECLINE_REASON_CONTEXT_EXCEEDED: _ClassVar[DeclineReason]
    DECLINE_REASON_INSUFFICIENT_PAGES: _ClassVar[DeclineReason]
    DECLINE_REASON_QUEUE_FULL: _ClassVar[DeclineReason]
    DECLINE_REASON_QUEUE_LONGER: _ClassVar[DeclineReason]
    DECLINE_REASON_DRAINING: _ClassVar[DeclineReason]
    DECLINE_REASON_DUPLICATE: _ClassVar[DeclineReason]
    DECLINE_REASON_DEADLINE_PASSED: _ClassVar[DeclineReason]
    DECLINE_REASON_PREFIX_GONE: _ClassVar[DeclineReason]

class ResultStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESULT_STATUS_UNSPECIFIED: _ClassVar[ResultStatus]
    RESULT_STATUS_COMPLETED: _ClassVar[ResultStatus]
    RESULT_STATUS_CANCELLED: _ClassVar[ResultStatus]
    RESULT_STATUS_FAILED: _ClassVar[ResultStatus]
TIER_UNSPECIFIED: Tier
TIER_GPU: Tier
TIER_INFLIGHT: Tier
TIER_RAM: Tier
TIER_SSD: Tier
TIER_PEER: Tier
TIER_OBJECT: Tier
TIER_NONE: Tier
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
DECLINE_REASON_UNSPECIFIED: DeclineReason
DECLINE_REASON_WRONG_EPOCH: DeclineReason
DECLINE_REASON_MODEL_NOT_LOADED: DeclineReason
DECLINE_REASON_CONTEXT_EXCEEDED: DeclineReason
DECLINE_REASON_INSUFFICIENT_PAGES: DeclineReason
DECLINE_REASON_QUEUE_FULL: DeclineReason
DECLINE_REASON_QUEUE_LONGER: DeclineReason
DECLINE_REASON_DRAINING: DeclineReason
DECLINE_REASON_DUPLICATE: DeclineReason
DECLINE_REASON_DEADLINE_PASSED: DeclineReason
DECLINE_REASON_PREFIX_GONE: DeclineReason
RESULT_STATUS_UNSPECIFIED: ResultStatus
RESULT_STATUS_COMPLETED: ResultStatus
RESULT_STATUS_CANCELLED: ResultStatus
RESULT_STATUS_FAILED: ResultStatus

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "grammar", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    grammar: str
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("traceparent", "tracestate")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    tracestate: str
    def __init__(self, traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class GenerationRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "tenant_salt", "model", "tokens", "output_start", "max_new_tokens", "sampling", "stop_token_ids", "choice_index", "deadline_ms", "priority", "trace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_START_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    tenant_salt: str
    model: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    output_start: int
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    choice_index: int
    deadline_ms: int
    priority: int
    trace: TraceContext
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., tenant_salt: _Optional[str] = ..., model: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., output_start: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., choice_index: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ..., trace: _Optional[_Union[TraceContext, _Mapping]] = ...) -> None: ...

class AssignmentId(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class TierTokens(_message.Message):
    __slots__ = ("tier", "tokens", "bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    tokens: int
    bytes: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "restored_tokens", "computed_tokens", "generated_tokens", "restored_by_tier")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    computed_tokens: int
    generated_tokens: int
    restored_by_tier: _containers.RepeatedCompositeFieldContainer[TierTokens]
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., restored_by_tier: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "restore_ms", "prefill_ms", "first_token_ms", "ttft_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    restore_ms: float
    prefill_ms: float
    first_token_ms: float
    ttft_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., restore_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker", "epoch", "fingerprint", "tier", "cached_tokens", "cached_bytes", "queue_ms", "load_ms", "restore_ms", "compute_tokens", "prefill_ms_per_token", "first_token_ms", "ttft_ms", "correction", "page_tokens", "free_pages", "evictable_pages", "needed_pages", "max_context", "prefix_hash")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: int
    fingerprint: str
    tier: Tier
    cached_tokens: int
    cached_bytes: int
    queue_ms: float
    load_ms: float
    restore_ms: float
    compute_tokens: int
    prefill_ms_per_token: float
    first_token_ms: float
    ttft_ms: float
    correction: float
    page_tokens: int
    free_pages: int
    evictable_pages: int
    needed_pages: int
    max_context: int
    prefix_hash: str
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., cached_tokens: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., queue_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., restore_ms: _Optional[float] = ..., compute_tokens: _Optional[int] = ..., prefill_ms_per_token: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., correction: _Optional[float] = ..., page_tokens: _Optional[int] = ..., free_pages: _Optional[int] = ..., evictable_pages: _Optional[int] = ..., needed_pages: _Optional[int] = ..., max_context: _Optional[int] = ..., prefix_hash: _Optional[str] = ...) -> None: ...
