"""The device loop as the shell's `Runtime`: requests to jobs, its events to ours, its measurements to costs.

Pages move on the loop's thread: a job's pages are computed the moment the loop says so, before it prepares the next
iteration; partial pages are copied when the job gets its lane. What the loop reports per iteration is translated there
and handed on in one call.

Warm-up runs a few jobs of zeros through the whole path: it compiles and touches what the first request would otherwise
wait for, and measures prefill and decode, on one lane and on all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from libs.continuation.hashing import derive
from libs.controller import protocol
from libs.controller.protocol import AssignmentId, DecodeCost, FinishReason, GenerationRequest, PrefillCost
from services.worker.handlers import (
    Job,
    JobAdvanced,
    JobEnded,
    JobEvent,
    JobPages,
    JobPrefilled,
    JobStarted,
    JobTokens,
    QueueState,
)
from services.worker.model.load import LoadedModel
from services.worker.pages.admission import Wanted
from services.worker.pages.pool import PagePool
from services.worker.pages.route import Continuation
from services.worker.runtime import job as device
from services.worker.runtime.grammars import MaskFactory, mask_of
from services.worker.runtime.iteration import Budgets
from services.worker.runtime.kv import KVStore
from services.worker.runtime.loop import DeviceLoop
from services.worker.runtime.measurements import (
    Measurements,
    ahead_ms,
    prefill_timings,
    prompts_ms,
    steady,
    step_ms,
    turnover,
    whole_prompts,
)
from services.worker.runtime.sampling import Sampling
from services.worker.runtime.serial import SerialLoop

Sink = Callable[[Sequence[JobEvent]], None]

_WARM_TOKENS = 300
_WARM_SHORT = 16
_WARM_NEW = 6
_WARM_PROMPTS_S = 8.0
_WARM_WITHIN_S = 300.0
_NOBODY = "00" * 32


class DevicePages:
    """A job's pages as the loop sees them: copies are done when the lane is granted. That the job's first rows are
    about to be computed is news at once: until then it waits, lane or not.

    (The loop's own word comes with the iteration's other events, when the first rows are done.)
    """

    def __init__(self, pages: JobPages, kv: KVStore, began: Callable[[int], None]) -> None:
        self._pages, self._kv, self._began = pages, kv, began
        self._start: int | None = None

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        """By group name."""
        return self._pages.tables

    def begin(self, computed: int) -> int:
        """From where to compute."""
        start = self._pages.begin()
        for copy in start.copies:
            self._kv.copy_page(copy.group, copy.source, copy.target, copy.slots)
        self._start = start.start
        return start.start

    def prepare(self, end: int) -> Collection[str]:
        """Groups whose tables changed."""
        if self._start is not None:
            self._began(self._start)
            self._start = None
        return self._pages.prepare(end)


@dataclass(slots=True, eq=False)
class _Held:
    """A job the loop has."""

    assignment: AssignmentId
    request: GenerationRequest
    pages: JobPages
    start: int = 0
    left: int = 0
    """Tokens it may still draw."""
    ahead: int = 0
    """Prompt rows of others before its own, in the step with its first."""


class DeviceRuntime:
    """Implements `handlers.Runtime` and `handlers.ComputeMeasurements` over a `DeviceLoop`, or a `SerialLoop` where
    `serialized` (one job at a time, whatever `lanes` says). `masks`: what requests may name as their grammar.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KVStore,
        pool: PagePool,
        *,
        lanes: int,
        max_context: int,
        threads: int,
        max_jobs: int,
        serialized: bool = False,
        masks: Mapping[str, MaskFactory] | None = None,
    ) -> None:
        self._kv, self._pool, self._lanes = kv, pool, 1 if serialized else lanes
        self._masks = dict(masks or {})
        self._loop = _loop(
            model, kv, pool, self._on_events, lanes, max_context, threads, max_jobs, serialized=serialized
        )
        self._held: dict[Hashable, _Held] = {}
        self._sink: Sink | None = None
        self._warming: Sink | None = None

    # --- handlers.Runtime ---

    def start(self, sink: Sink) -> None:
        """Starts the loop's thread."""
        self._sink = sink
        self._loop.start()

    def submit(self, job: Job) -> None:
        """Queues the job. Raises RuntimeRefusalError (an unknown grammar too), RuntimeFullError, RuntimeClosedError."""
        request = job.request
        mask = mask_of(request.sampling.grammar, self._masks)
        held = _Held(job.assignment, request, job.pages, left=request.max_new_tokens)
        self._held[job.assignment] = held

        def began(start: int) -> None:
            held.start = start
            self._say([JobStarted(job.assignment, start)])

        try:
            self._loop.submit(
                device.Job(
                    key=job.assignment,
                    tokens=request.tokens,
                    computed=job.cached,
                    pages=DevicePages(job.pages, self._kv, began),
                    max_new_tokens=request.max_new_tokens,
                    output_start=request.output_start,
                    sampling=sampling(request.sampling),
                    stop_token_ids=frozenset(request.stop_token_ids),
                    choice=request.choice_index,
                    mask=mask,
                    likely=job.likely,
                )
            )
        except Exception:
            del self._held[job.assignment]
            raise

    def cancel(self, assignment: AssignmentId) -> None:
        """Ends the job at the next iteration boundary."""
        self._loop.cancel(assignment)

    def queue(self, coming: Sequence[int] = ()) -> QueueState:
        """What is ahead of a new job's first row; with all lanes taken, their next possible ends too, as often as those
        that wait will have taken them again.
        """
        found = self._loop.measurements()
        waiting, decoding = found.waiting_jobs + len(coming), found.decoding_lanes
        ms = ahead_ms(found, coming, self._pool.sizes.step)
        taken = decoding + found.prefilling_lanes
        if taken and taken + waiting >= self._lanes:
            left = [held.left for held in tuple(self._held.values())]  # lanes are granted in this order
            steps = turnover(left[:taken], left[taken:], self._lanes, len(coming))
            ms += steps * step_ms(found.decode_step_ms, self._lanes)
        return QueueState(ms, decoding, waiting)

    async def warmup(self) -> None:
        """See the module. Raises RuntimeError where the device cannot run the model."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        wave: set[AssignmentId] = set()
        errors: list[str] = []

        def warm(events: Sequence[JobEvent]) -> None:
            for event in events:
                if isinstance(event, JobEnded) and event.assignment in wave:
                    wave.discard(event.assignment)
                    if event.error:
                        errors.append(event.error)
            if not wave:
                loop.call_soon_threadsafe(ended.set)

        self._warming = warm
        try:
            async with asyncio.timeout(_WARM_WITHIN_S):
                for jobs in self._warm_waves():
                    wave |= {job.assignment for job in jobs}
                    ended.clear()
                    for job in jobs:
                        self.submit(job)
                    await ended.wait()
                    for job in jobs:
                        self._pool.discard(job.assignment, time.monotonic())
                    if errors:
                        raise RuntimeError(f"the warm-up failed: {errors[0]}")
        finally:
            self._warming = None
            self._loop.warmed()

    async def aclose(self) -> None:
        """Ends the loop at its next iteration boundary; raises TimeoutError where it does not get there."""
        await asyncio.to_thread(self._loop.close)

    # --- handlers.ComputeMeasurements ---

    def prefill(self) -> Sequence[PrefillCost]:
        """By length; from iterations without decoding lanes where there were some."""
        timings = prefill_timings(self._loop.measurements())
        return tuple(PrefillCost(length, ms_per_token) for length, ms_per_token in whole_prompts(timings))

    def decode(self) -> Sequence[DecodeCost]:
        """By decoding lanes."""
        timings = self._loop.measurements().decode_step_ms
        return tuple(DecodeCost(lanes, timing.recent_ms) for lanes, timing in sorted(timings.items()))

    def counters(self) -> Measurements:
        """The loop's own."""
        return self._loop.measurements()

    # --- the loop's thread ---

    def _on_events(self, events: Sequence[device.Event]) -> None:
        self._say([made for event in events for made in self._translate(event)])

    def _say(self, news: Sequence[JobEvent]) -> None:
        sink = self._warming or self._sink
        if news and sink is not None:
            sink(news)

    def _translate(self, event: device.Event) -> Sequence[JobEvent]:
        held = self._held.get(event.key)
        if held is None:
            return ()
        assignment, request = held.assignment, held.request
        match event:
            case device.Started():
                return ()
            case device.Prefilled():
                held.pages.computed(event.computed)
                held.ahead += event.ahead  # whoever has rows of a step has all those ahead of it in every later one
                if event.computed < len(request.tokens):
                    return (JobAdvanced(assignment),)
                found, length = self._loop.measurements(), len(request.tokens)
                drawing_ms = step_ms(found.decode_step_ms, found.decoding_lanes)
                behind_ms = prompts_ms(prefill_timings(found), [(held.ahead, length)])
                return (JobPrefilled(assignment, event.computed - held.start, drawing_ms, behind_ms),)
            case device.Token():
                held.pages.computed(event.computed)
                held.left -= 1
                return (JobTokens(assignment, (event.token,), _logprobs(event)),)
            case device.Finished():
                finish = FinishReason.STOP if event.reason == "stop" else FinishReason.LENGTH
                ended = JobEnded(assignment, finish)
            case device.Quiesced():
                ended = JobEnded(assignment, cancelled=True)
            case device.Failed():
                ended = JobEnded(assignment, error=str(event.error) or type(event.error).__name__)
        del self._held[event.key]
        return (ended,)

    # --- warm-up ---

    def _warm_waves(self) -> Iterator[Sequence[Job]]:
        """One prompt alone until it has been as quick as it will be, then all lanes twice: the first of each pays for
        what libraries compile.
        """
        most = min(pages.total for pages in self._pool.pages().values()) * self._pool.sizes.page
        long, short = min(_WARM_TOKENS, most // 2), min(_WARM_SHORT, most // (4 * self._lanes))
        if long > 1:
            took: list[float] = []
            while not steady(took) and sum(took) < _WARM_PROMPTS_S:
                began = time.monotonic()
                yield [self._warm_job(f"prompt {len(took)}", long)]
                took.append(time.monotonic() - began)
        if short > 0 and self._lanes > 1:
            for number in range(2):
                yield [self._warm_job(f"lane {lane}, {number}", short) for lane in range(self._lanes)]

    def _warm_job(self, name: str, length: int) -> Job:
        assignment = AssignmentId(f"warm-up {name}", 1)
        # A root of its own for each, so that none finds the other's prefix.
        of = Continuation(_NOBODY, derive("root", _NOBODY, name).hex(), "")
        tokens = (0,) * length
        self._pool.reserve(assignment, Wanted(of, tokens, _WARM_NEW), time.monotonic())
        request = GenerationRequest(assignment.request_id, "", tokens, length, _WARM_NEW)
        return Job(assignment, request, self._pool.job_pages(assignment))


def _loop(
    model: LoadedModel,
    kv: KVStore,
    pool: PagePool,
    sink: device.Sink,
    lanes: int,
    max_context: int,
    threads: int,
    max_jobs: int,
    *,
    serialized: bool,
) -> DeviceLoop | SerialLoop:
    step = pool.sizes.step
    if serialized:
        return SerialLoop(
            model, kv, sink, step_tokens=step, max_context=max_context, threads=threads, max_jobs=max_jobs
        )
    budgets = Budgets(lanes, step)
    return DeviceLoop(model, kv, budgets, sink, max_context=max_context, threads=threads, max_jobs=max_jobs)


def _logprobs(event: device.Token) -> tuple[protocol.TokenLogprobs, ...]:
    found = event.logprobs
    if found is None:
        return ()
    ids = tuple(token for token, _ in found.top)
    return (protocol.TokenLogprobs(found.chosen, ids, tuple(value for _, value in found.top)),)


def sampling(wanted: protocol.Sampling) -> Sampling:
    """The contract's zeros to the loop's neutral values."""
    return Sampling(
        temperature=wanted.temperature,
        top_p=wanted.top_p or 1.0,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty or 1.0,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        logit_bias=wanted.logit_bias,
        logprobs=None if not wanted.logprobs else (0 if wanted.logprobs == 1 else wanted.logprobs),
        seed=wanted.seed,
    )
