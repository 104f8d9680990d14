"""The values router and worker exchange: frozen, hashable where their fields are, and free of anything local.

They mirror `protos/segue/v1/{common,worker,router}.proto` field by field; enum values are the protos' numbers. `wire`
translates. Durations are milliseconds and mean "what remains"; tokens are ids; hashes are lowercase hex.

Boundary (controller.md): of a request with n tokens the first n - 1 are *processed*; the last is *pending*: it is fed
to the model first and never is part of the hash chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from libs.controller.catalog_facts import Node


class Tier(IntEnum):
    """Where the state behind a prefix lies, cheapest first."""

    UNSPECIFIED = 0
    GPU = 1
    INFLIGHT = 2
    RAM = 3
    SSD = 4
    PEER = 5
    OBJECT = 6
    NONE = 7

    __hash__ = int.__hash__  # an enum hashes its name, in Python: tiers are keys where it counts


class FinishReason(IntEnum):
    """Why a generation ended."""

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2


class DeclineReason(IntEnum):
    """Why a worker declined an offer; each is final for that offer."""

    UNSPECIFIED = 0
    WRONG_EPOCH = 1
    MODEL_NOT_LOADED = 2
    CONTEXT_EXCEEDED = 3
    INSUFFICIENT_PAGES = 4
    QUEUE_FULL = 5
    QUEUE_LONGER = 6
    DRAINING = 7
    DUPLICATE = 8
    DEADLINE_PASSED = 9
    PREFIX_GONE = 10


class ResultStatus(IntEnum):
    """What an assignment's end means."""

    UNSPECIFIED = 0
    COMPLETED = 1
    CANCELLED = 2
    FAILED = 3


class StatusCode(IntEnum):
    """The gRPC status codes the router delivers, by their meaning (google.rpc.Code)."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; zero means off. `seed` is always set (ingress draws one)."""

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # ascending by token id
    logprobs: int = 0
    grammar: str = ""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context; an empty `traceparent` = not traced."""

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. A resume changes `tokens`, `max_new_tokens` and `deadline_ms` only."""

    request_id: str
    model: str
    tokens: tuple[int, ...]
    output_start: int
    max_new_tokens: int
    tenant: str = "default"
    tenant_salt: str = field(default="", repr=False)  # hex; never logged
    sampling: Sampling = Sampling()
    stop_token_ids: tuple[int, ...] = ()
    choice_index: int = 0
    deadline_ms: int = 0  # what remains; 0 = the router's default
    priority: int = 0
    trace: TraceContext = TraceContext()

    @property
    def processed(self) -> int:
        """Tokens that may be part of the hash chain: all but the pending one."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True, order=True)
class AssignmentId:
    """One attempt of one request. Attempts start at 1 and only grow."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Tokens restored from one tier and the bytes read for them."""

    tier: Tier
    tokens: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Cumulative for its scope: an attempt in a `Delta`, a request in a delivery.

    `prompt_tokens` is the request's prompt (`output_start`) in every attempt. In the first delivering attempt
    prompt_tokens = cached_tokens + computed_tokens.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    restored_by_tier: tuple[TierTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Measured times of one attempt, ms; 0 where a phase did not happen."""

    queue_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    first_token_ms: float = 0.0
    ttft_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one drawn token and its alternatives, most likely first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a request on one worker from one prefix boundary. Times are predictions in ms."""

    worker: str
    epoch: int
    fingerprint: str
    tier: Tier
    cached_tokens: int = 0
    cached_bytes: int = 0
    queue_ms: float = 0.0
    load_ms: float = 0.0
    restore_ms: float = 0.0
    compute_tokens: int = 0
    prefill_ms_per_token: float = 0.0
    first_token_ms: float = 0.0
    ttft_ms: float = 0.0
    correction: float = 1.0
    page_tokens: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    needed_pages: int = 0
    max_context: int = 0
    prefix_hash: str = ""


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A candidate and the nodes its worker would restore: from the first not resident up to the boundary.

    `uncorrected_queue_ms`: the candidate's queue before the correction, which is the one a worker can compare with its
    own count: the offer carries this one.
    """

    candidate: Candidate
    chain: tuple[Node, ...] = ()
    uncorrected_queue_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many candidates were not ranked for one reason (`context`, `dominated`, `draining`, `break-even`, …)."""

    reason: str
    count: int


# --- router <-> worker ---


@dataclass(frozen=True, slots=True)
class Offer:
    """A request, offered to one worker process from one prefix boundary."""

    assignment: AssignmentId
    epoch: int
    request: GenerationRequest
    fingerprint: str
    candidate: Candidate
    chain: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Gives up an assignment; what is not this assignment is left alone."""

    assignment: AssignmentId
    epoch: int


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one layer group by state: free + reserved + loading + resident + evicting = total."""

    total: int = 0
    free: int = 0
    reserved: int = 0
    loading: int = 0
    resident: int = 0
    evicting: int = 0
    evictable: int = 0  # the part of resident that could be evicted now


@dataclass(frozen=True, slots=True)
class Load:
    """Queue and page counts at one moment; `pages` of the largest layer group."""

    queue_ms: float = 0.0
    active: int = 0
    decoding: int = 0
    waiting: int = 0
    pages: Pages = Pages()


@dataclass(frozen=True, slots=True)
class OfferReply:
    """Accepts (pages are reserved and the assignment runs) or declines an offer."""

    assignment: AssignmentId
    epoch: int
    accepted: bool
    reason: DeclineReason = DeclineReason.UNSPECIFIED
    detail: str = ""
    load: Load = Load()


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens in order; `index` counts the request's generated tokens over all attempts, from zero."""

    assignment: AssignmentId
    epoch: int
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()  # in the attempt's first delta, with which they are complete


@dataclass(frozen=True, slots=True)
class Result:
    """The end of an assignment."""

    assignment: AssignmentId
    epoch: int
    status: ResultStatus
    finish_reason: FinishReason = FinishReason.UNSPECIFIED
    error: str = ""
    usage: Usage = Usage()
    timings: Timings = Timings()
    heartbeat: int = 0  # number of the last one that was sent to this router before; 0 = none was


@dataclass(frozen=True, slots=True)
class Resident:
    """A prefix boundary the worker holds in device pages (GPU), is computing (INFLIGHT) or has in memory (RAM)."""

    hash: str
    end: int
    tier: Tier
    fingerprint: str
    arrival_ms: float = 0.0  # INFLIGHT: ms until the running prefill passes the boundary
    groups: tuple[str, ...] = ()  # RAM: layer groups held of this chunk; empty = all


@dataclass(frozen=True, slots=True)
class Gone:
    """A prefix no longer held in a tier."""

    hash: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Measured ms per token of prefill at a context of at most `up_to_tokens`."""

    up_to_tokens: int
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Measured ms of one decode step over `lanes` active lanes."""

    lanes: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class TierCost:
    """Measured cost of one tier; GPU stands for staging to device. `break_even_tokens` 0 = not measured."""

    tier: Tier
    latency_ms: float
    bytes_per_ms: float
    break_even_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker observes of itself. `sequence` starts at 1 per router-worker pair, without gaps."""

    worker: str
    epoch: int
    sequence: int
    version: int = 1
    node: str = ""
    draining: bool = False
    load: Load = Load()
    lanes: int = 0
    page_tokens: int = 0
    max_context: int = 0
    models: tuple[str, ...] = ()
    prefill: tuple[PrefillCost, ...] = ()
    decode: tuple[DecodeCost, ...] = ()
    tiers: tuple[TierCost, ...] = ()
    resident: tuple[Resident, ...] = ()
    gone: tuple[Gone, ...] = ()
    snapshot: bool = False
    bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Router to worker: send a snapshot of the resident prefixes next."""


@dataclass(frozen=True, slots=True)
class ElectTunnel:
    """Router to worker: this tunnel carries the pair's heartbeats from now on; older terms are ignored."""

    term: int


@dataclass(frozen=True, slots=True)
class UnknownMessage:
    """A message of a type this version does not know: its bytes, kept so that it can be passed on unharmed."""

    data: bytes


TunnelValue = Offer | Cancel | OfferReply | Delta | Result | Heartbeat | SnapshotRequest | ElectTunnel | UnknownMessage


# --- ingress <-> router ---


@dataclass(frozen=True, slots=True)
class Submission:
    """A request from ingress; `delivered` tokens at the end of `request.tokens` went out through another router.

    `fingerprint`: the variant that produced them, the only one that goes on; "" = none delivered, or unknown: any.
    """

    request: GenerationRequest
    delivered: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancels a request wherever it came from."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TokensDelivery:
    """New tokens of variant `fingerprint`; `index` among all generated tokens of the request."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage = Usage()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """How a request was served: `tier` by the first attempt that delivered, the rest by the last attempt."""

    worker: str = ""
    workers: tuple[str, ...] = ()
    epoch: int = 0
    attempts: int = 0
    tier: Tier = Tier.UNSPECIFIED
    timings: Timings = Timings()
    predicted_ttft_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class CompletedDelivery:
    """The regular end."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage = Usage()
    served: Served = Served()


@dataclass(frozen=True, slots=True)
class ErrorDelivery:
    """The irregular end. `message` names the value and the remedy, never a tenant's data."""

    request_id: str
    code: StatusCode
    message: str
    retry_after_ms: int = 0
    usage: Usage = Usage()
    served: Served = Served()


@dataclass(frozen=True, slots=True)
class CancelledDelivery:
    """The end after a cancel."""

    request_id: str
    usage: Usage = Usage()
    served: Served = Served()


Delivery = TokensDelivery | CompletedDelivery | ErrorDelivery | CancelledDelivery
AttachValue = Submission | CancelRequest | Delivery | UnknownMessage
