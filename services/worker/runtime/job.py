"""What goes into the device loop and what comes out: jobs, events, and the `Runtime` protocol between them.

Boundaries. Before a job runs, the K and V of its first `computed` tokens lie in its pages. The last token is pending:
its K and V are computed when it is fed, which yields the logits of the first new token. After a generation has ended,
its last token has none. Every event carries `computed`, the length of the prefix whose state is complete and will not
change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from libs.continuation.layout import Layout
from services.worker.runtime.errors import RuntimeRefusalError
from services.worker.runtime.measurements import Measurements
from services.worker.runtime.sampling import LogitsMask, Sampling, TokenLogprobs


class JobPages(Protocol):
    """The page tables of one job, owned by the page pool. `begin` and `prepare` are called on the loop's thread.

    Full-attention groups are mapped for the whole budget before the job is submitted and never change. A windowed group
    may be mapped as the job goes, pages behind its window being used again further on. Neither call may block.
    """

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        """By group name, page ids in logical order. Entries behind the window are never read and may hold anything."""
        ...

    def begin(self, computed: int) -> int:
        """Once, when the job gets its lane: from where to compute, at least `computed` and less than its tokens."""
        ...

    def prepare(self, end: int) -> Collection[str]:
        """Before rows up to position `end` (exclusive) are computed; names the groups whose tables changed."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPages:
    """Page tables that never change: everything was mapped at reservation."""

    tables: Mapping[str, Sequence[int]]

    def begin(self, computed: int) -> int:
        """From where the job was submitted."""
        return computed

    def prepare(self, end: int) -> Collection[str]:
        """Nothing changes."""
        return ()


@dataclass(frozen=True, slots=True)
class Job:
    """One generation.

    key: opaque, unique among the jobs the runtime holds. tokens: prompt and, in a resumed attempt, the output so far,
    from index `output_start`. pages: hold the state of [0, computed) and have room, reserved, for
    len(tokens) + max_new_tokens - 1 positions. choice: index of the completion among those of one request.
    stop_token_ids end the generation; the stop token is reported like any other. likely: tokens that `begin` is
    expected to find computed, for estimates.
    """

    key: Hashable
    tokens: Sequence[int]
    computed: int
    pages: JobPages
    max_new_tokens: int
    output_start: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()
    choice: int = 0
    mask: LogitsMask | None = field(default=None, compare=False)
    likely: int = 0

    def validate(self, layout: Layout, page_size: int, max_context: int, vocab: int) -> None:
        """Raises RuntimeRefusalError for a job that could not run to its end."""
        length = len(self.tokens)
        if not 0 <= self.computed < length:
            raise RuntimeRefusalError(
                f"computed={self.computed} of {length} tokens: at least the last token must be left to feed"
            )
        if self.max_new_tokens < 1 or length + self.max_new_tokens > max_context:
            raise RuntimeRefusalError(
                f"{length} tokens and max_new_tokens={self.max_new_tokens} must be positive and fit {max_context}"
            )
        if not 0 <= self.output_start <= length:
            raise RuntimeRefusalError(f"output_start={self.output_start} is outside the {length} tokens")
        if not (min(self.tokens) >= 0 and max(self.tokens) < vocab):
            bad = next(token for token in self.tokens if not 0 <= token < vocab)
            raise RuntimeRefusalError(f"token id {bad} is outside the vocabulary of {vocab}")
        needed = -(-(length + self.max_new_tokens - 1) // page_size)
        for group in layout.groups:
            mapped = len(self.pages.tables.get(group.name, ()))
            if group.window is None and mapped < needed:
                raise RuntimeRefusalError(f"group {group.name} has {mapped} of the {needed} pages the job needs")
        self.sampling.validate(vocab)


@dataclass(frozen=True, slots=True)
class Started:
    """The job has a lane and computes from token `computed` on."""

    key: Hashable
    computed: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Part of the prompt was read: tokens [0, computed) are complete. Also sent for the last part, before its Token.

    `ahead`: prompt rows of jobs that came before it in the same step.
    """

    key: Hashable
    computed: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """`index`: zero-based among this job's new tokens. `computed`: all tokens before this one are complete."""

    key: Hashable
    token: int
    index: int
    computed: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal: a stop token was drawn, or max_new_tokens reached."""

    key: Hashable
    reason: Literal["stop", "length"]
    computed: int


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Terminal: cancelled. The device no longer touches the job's pages."""

    key: Hashable
    computed: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: an error while computing. Tokens [0, computed) are still complete."""

    key: Hashable
    error: Exception
    computed: int


Event = Started | Prefilled | Token | Finished | Quiesced | Failed
Sink = Callable[[Sequence[Event]], None]
"""Called on the loop's thread, once per iteration, with all its events in order. Must not block: hand over and
return.
"""


class Runtime(Protocol):
    """A device and its loop. All methods may be called from any thread."""

    def submit(self, job: Job) -> None:
        """Queues a job. Raises RuntimeRefusalError, RuntimeFullError, RuntimeClosedError."""

    def cancel(self, key: Hashable) -> None:
        """Ends a job at the next iteration boundary with Quiesced. Ignored where the job is unknown or has ended."""

    def measurements(self) -> Measurements:
        """A snapshot."""

    def warmed(self) -> None:
        """What runs from now on is work: see `measurements`."""

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the loop at the next iteration boundary; whatever it held ends with Quiesced. Raises TimeoutError."""
