"""What a worker machine remembers of one assignment. Mutable, owned by the machine alone."""

from __future__ import annotations

from dataclasses import dataclass

from libs.controller.protocol import Offer, TierTokens, Timings, Usage
from libs.controller.worker_table import Phase


@dataclass(slots=True)
class AssignmentState:
    """One assignment. Times are ms on the caller's clock; None = has not happened."""

    offer: Offer
    tunnel: int
    phase: Phase = Phase.RESERVING
    cached: int = 0  # tokens in device pages when the run starts, resident and restored
    restored: tuple[TierTokens, ...] = ()
    computed: int = 0
    generated: int = 0
    accepted_ms: float | None = None
    fetch_ms: float | None = None
    restored_ms: float | None = None
    lane_ms: float | None = None
    prefilled_ms: float | None = None
    first_ms: float | None = None

    @property
    def next_index(self) -> int:
        """Index of the next token among the request's generated tokens, over all attempts."""
        request = self.offer.request
        return len(request.tokens) - request.output_start + self.generated

    def usage(self) -> Usage:
        """The attempt's usage so far."""
        return Usage(
            prompt_tokens=self.offer.request.output_start,
            cached_tokens=self.cached,
            restored_tokens=sum(part.tokens for part in self.restored),
            computed_tokens=self.computed,
            generated_tokens=self.generated,
            restored_by_tier=self.restored,
        )

    def timings(self) -> Timings:
        """The attempt's measured times; a phase that did not end counts 0."""
        accepted, restored = self.accepted_ms, self.restored_ms
        if accepted is None:
            return Timings()
        fetch = self.fetch_ms if self.fetch_ms is not None else accepted
        restore_ms = 0.0 if restored is None else restored - fetch
        ready = accepted if restored is None else restored
        lane = self.lane_ms if self.lane_ms is not None else ready
        prefilled = self.prefilled_ms
        return Timings(
            queue_ms=(fetch - accepted) + (lane - ready),
            restore_ms=restore_ms,
            prefill_ms=0.0 if prefilled is None else prefilled - lane,
            first_token_ms=0.0 if prefilled is None or self.first_ms is None else self.first_ms - prefilled,
            ttft_ms=0.0 if self.first_ms is None else self.first_ms - accepted,
        )
