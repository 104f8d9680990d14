"""What the ingress counts about requests; see libs.service.metrics for how it is exported."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


@dataclass
class RequestCounters:
    """Exported as metrics."""

    running: int = field(default=0, metadata={"help": "Requests being served now", "kind": "gauge"})
    disconnects: int = field(default=0, metadata={"help": "Requests whose client left before the answer's end"})
    errors_after_start: int = field(default=0, metadata={"help": "Streams that ended in an error event"})
    prompt_tokens: int = field(default=0, metadata={"help": "Prompt tokens of finished requests"})
    cached_tokens: int = field(
        default=0, metadata={"help": "Prompt tokens whose attention state was not computed anew"}
    )
    completion_tokens: int = field(default=0, metadata={"help": "Tokens generated for finished requests"})
    memo_hits: int = field(default=0, metadata={"help": "Chat prompts that began with a remembered turn"})
    memo_misses: int = field(default=0, metadata={"help": "Chat prompts with an answer in them that did not"})
    memo_spliced_tokens: int = field(default=0, metadata={"help": "Prompt tokens taken from the turn memo"})
    memo_bytes: int = field(default=0, metadata={"help": "Bytes held by the turn memo", "kind": "gauge"})


class RequestMetrics:
    """All of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counters = RequestCounters()
        self.requests = Counter(
            "segue_ingress_requests", "Requests by endpoint and status", ["endpoint", "code"], registry=registry
        )
        self.ttft = Histogram(
            "segue_ingress_ttft_seconds", "Submission to first token", buckets=_TTFT_BUCKETS, registry=registry
        )
        self.inter_token = Histogram(
            "segue_ingress_inter_token_seconds",
            "Time between tokens of a stream",
            buckets=_INTER_TOKEN_BUCKETS,
            registry=registry,
        )
