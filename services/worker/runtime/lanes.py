"""Lanes: the physical rows of the device loop. A lane holds one job at a time and is refilled in place.

The host's record of a running job: its tokens (growing), how far they are computed, and its sampler's state. The lane's
device state, the page tables, is uploaded when the job gets its lane and then only where a table changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from services.worker.runtime.iteration import LaneView
from services.worker.runtime.job import Event, Finished, Job, Prefilled, Token
from services.worker.runtime.sampling import SamplerState, TokenLogprobs
from services.worker.runtime.step import Span


class Lane:
    """One running job. `computed`: tokens with K and V; `generated`: new ones; `primed`: its tables are uploaded."""

    def __init__(self, index: int, job: Job, sampler: SamplerState, admitted: int, computed: int) -> None:
        self.index = index
        self.job = job
        self.sampler = sampler
        self.admitted = admitted
        self.tokens = list(job.tokens)
        self.computed = computed
        self.generated = 0
        self.primed = False

    @property
    def pending(self) -> int:
        """Tokens to feed before the next one can be drawn; 1 while decoding."""
        return len(self.tokens) - self.computed

    def view(self) -> LaneView:
        """What the iteration policy sees."""
        return LaneView(self.index, self.pending, self.admitted)

    def span(self, count: int) -> Span:
        """The next `count` tokens to feed."""
        end = self.computed + count
        return Span(self.index, self.computed, self.tokens[self.computed : end], end == len(self.tokens))

    def fed(self, span: Span, ahead: int = 0) -> Sequence[Event]:
        """Books the rows of a span as computed. A prompt's rows are reported, with those of others that were ahead; a
        decoding lane's by its Token.
        """
        reading = span.start < len(self.job.tokens)
        self.computed = span.end
        return (Prefilled(self.job.key, self.computed, ahead),) if reading else ()

    def drew(self, token: int, logprobs: TokenLogprobs | None) -> Sequence[Event]:
        """Appends the token drawn from the last row of a span just fed; with Finished where it was the last one."""
        self.tokens.append(token)
        self.sampler.advance(token)
        self.generated += 1
        event = Token(self.job.key, token, self.generated - 1, self.computed, logprobs)
        reason: Literal["stop", "length"] | None = None
        if token in self.job.stop_token_ids:
            reason = "stop"
        elif self.generated == self.job.max_new_tokens:
            reason = "length"
        return (event,) if reason is None else (event, Finished(self.job.key, reason, self.computed))
