"""The echo runtime: the device loop's life without a device, on the event loop with real timers.

It runs the same iteration policy over the same kind of stable lanes, walks the pages of every job as a device would,
and sleeps for what the step is declared to cost. Cancels and submissions take effect between steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.controller.protocol import AssignmentId, DecodeCost, FinishReason, PrefillCost, TokenLogprobs
from libs.service.logs import get_logger
from services.worker.echo.model import EchoCosts, echo_token
from services.worker.handlers import (
    Job,
    JobAdvanced,
    JobEnded,
    JobEvent,
    JobPrefilled,
    JobStarted,
    JobTokens,
    QueueState,
)
from services.worker.runtime.iteration import Batch, Budgets, LaneView, plan
from services.worker.runtime.measurements import turnover

log = get_logger(__name__)

Sink = Callable[[Sequence[JobEvent]], None]


@dataclass(slots=True, eq=False)
class _Lane:
    job: Job
    start: int
    length: int
    """Tokens known: the request's and the drawn ones."""
    end: int
    """Tokens computed."""
    admitted: int
    drawn: int = 0

    @property
    def pending(self) -> int:
        return self.length - self.end

    @property
    def decoding(self) -> bool:
        return self.drawn > 0


class EchoRuntime:
    """Implements `handlers.Runtime` and `handlers.ComputeMeasurements`."""

    def __init__(self, costs: EchoCosts, max_context: int) -> None:
        self._costs, self._max_context = costs, max_context
        self._budgets = Budgets(costs.lanes, costs.step_tokens)
        self._lanes: dict[int, _Lane] = {}
        self._waiting: deque[Job] = deque()
        self._cancels: set[AssignmentId] = set()
        self._admitted = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._sink: Sink | None = None
        self._task: asyncio.Task[None] | None = None
        self.steps = 0

    # --- handlers.Runtime ---

    def start(self, sink: Sink) -> None:
        """Starts the loop as a task."""
        self._sink = sink
        self._task = asyncio.get_running_loop().create_task(self._run(), name="echo runtime")

    def submit(self, job: Job) -> None:
        """Queues the job. Raises RuntimeError once closed, ValueError for a grammar."""
        if grammar := job.request.sampling.grammar:
            raise ValueError(f"grammar {grammar!r} is not known to an echo worker: it follows none; leave it empty")
        if self._closing:
            raise RuntimeError("the echo runtime is closed: the worker is shutting down")
        self._waiting.append(job)
        self._wake.set()

    def cancel(self, assignment: AssignmentId) -> None:
        """Ends the job at its next boundary."""
        self._cancels.add(assignment)
        self._wake.set()

    def queue(self, coming: Sequence[int] = ()) -> QueueState:
        """Prompt tokens ahead at their declared cost; with all lanes taken, their next declared ends too, as often as
        those that wait will have taken them again.
        """
        lanes = list(self._lanes.values())
        ahead = sum(lane.pending for lane in lanes if not lane.decoding)
        ahead += sum(job.pending for job in self._waiting) + sum(coming)
        ms, waiting = ahead * self._costs.prefill_ms, len(self._waiting) + len(coming)
        if lanes and len(lanes) + waiting >= self._costs.lanes:
            left = [lane.job.request.max_new_tokens - lane.drawn for lane in lanes]
            queued = [job.request.max_new_tokens for job in self._waiting]
            ms += turnover(left, queued, self._costs.lanes, len(coming)) * self._costs.decode_ms
        decoding = sum(lane.decoding for lane in lanes)
        return QueueState(ms, decoding, waiting)

    async def warmup(self) -> None:
        """Nothing to warm up: costs are declared."""

    async def aclose(self) -> None:
        """Ends the loop at its next boundary."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    # --- handlers.ComputeMeasurements ---

    def prefill(self) -> Sequence[PrefillCost]:
        """As declared."""
        return (PrefillCost(self._max_context, self._costs.prefill_ms),)

    def decode(self) -> Sequence[DecodeCost]:
        """As declared."""
        return tuple(DecodeCost(lanes, self._costs.decode_ms) for lanes in (1, self._costs.lanes))

    # --- the loop ---

    async def _run(self) -> None:
        while True:
            events = self._take_cancels()
            if self._closing:
                events += self._end_all()
                self._say(events)
                return
            batch = plan(
                [LaneView(index, lane.pending, lane.admitted) for index, lane in self._lanes.items()],
                [len(job.request.tokens) for job in self._waiting],
                self._budgets,
            )
            if not batch.refills and not batch.decodes and not batch.prompts:
                self._say(events)
                self._wake.clear()
                if not self._waiting and not self._cancels and not self._closing:
                    await self._wake.wait()
                continue
            events += self._refill(batch)
            self._say(events)
            self._say(await self._step(batch))

    def _take_cancels(self) -> list[JobEvent]:
        cancels, self._cancels = self._cancels, set()
        events: list[JobEvent] = []
        for index, lane in list(self._lanes.items()):
            if lane.job.assignment in cancels:
                del self._lanes[index]
                events.append(JobEnded(lane.job.assignment, cancelled=True))
        for job in list(self._waiting):
            if job.assignment in cancels:
                self._waiting.remove(job)
                events.append(JobEnded(job.assignment, cancelled=True))
        return events

    def _end_all(self) -> list[JobEvent]:
        jobs = [*(lane.job for lane in self._lanes.values()), *self._waiting]
        self._lanes.clear()
        self._waiting.clear()
        return [JobEnded(job.assignment, cancelled=True) for job in jobs]

    def _refill(self, batch: Batch) -> list[JobEvent]:
        events: list[JobEvent] = []
        for index in batch.refills:
            job = self._waiting.popleft()
            start = job.pages.begin().start
            self._lanes[index] = _Lane(job, start, len(job.request.tokens), start, self._admitted)
            self._admitted += 1
            events.append(JobStarted(job.assignment, start))
        return events

    async def _step(self, batch: Batch) -> list[JobEvent]:
        """One declared step. A prompt may need fewer rows than planned: `begin` found more of it resident."""
        shares = [(self._lanes[index], 1) for index in batch.decodes]
        shares += [(self._lanes[index], min(count, self._lanes[index].pending)) for index, count in batch.prompts]
        events: list[JobEvent] = []
        cost = 0.0
        running: list[tuple[_Lane, int]] = []
        for lane, count in shares:
            try:
                lane.job.pages.prepare(lane.end + count)
            except Exception as error:
                log.error("a job's pages failed it", request=lane.job.assignment.request_id, exc_info=error)
                events.append(self._drop(lane, str(error)))
                continue
            running.append((lane, count))
            cost += 0.0 if lane.decoding else count * self._costs.prefill_ms
        if any(lane.decoding for lane, _ in running):
            cost += self._costs.decode_ms
        await asyncio.sleep(cost / 1e3)
        self.steps += 1
        for lane, count in running:
            lane.end += count
            lane.job.pages.computed(lane.end)
            if lane.pending == 0:
                events += self._draw(lane)
            else:
                events.append(JobAdvanced(lane.job.assignment))
        return events

    def _draw(self, lane: _Lane) -> list[JobEvent]:
        request, assignment = lane.job.request, lane.job.assignment
        events: list[JobEvent] = []
        if not lane.decoding:
            events.append(JobPrefilled(assignment, lane.end - lane.start))
        token = echo_token(request, lane.length - request.output_start)
        lane.length += 1
        lane.drawn += 1
        logprobs = (TokenLogprobs(0.0, (token,), (0.0,)),) if request.sampling.logprobs else ()
        events.append(JobTokens(assignment, (token,), logprobs))
        if token in request.stop_token_ids:
            events.append(self._end(lane, FinishReason.STOP))
        elif lane.drawn >= request.max_new_tokens:
            events.append(self._end(lane, FinishReason.LENGTH))
        return events

    def _end(self, lane: _Lane, finish: FinishReason) -> JobEnded:
        self._remove(lane)
        return JobEnded(lane.job.assignment, finish)

    def _drop(self, lane: _Lane, error: str) -> JobEnded:
        self._remove(lane)
        return JobEnded(lane.job.assignment, error=error)

    def _remove(self, lane: _Lane) -> None:
        self._lanes = {index: other for index, other in self._lanes.items() if other is not lane}

    def _say(self, events: list[JobEvent]) -> None:
        if events and self._sink is not None:
            self._sink(events)
