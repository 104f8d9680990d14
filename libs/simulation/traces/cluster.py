"""The replay: arrivals, a router with one policy, workers, and what the policy hears of them, by one event heap.

Equal inputs give equal runs: events of one time are taken in the order in which they were made, and every draw comes
from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import perf_counter

from libs.simulation.traces.costs import Costs, Error, TierSet
from libs.simulation.traces.recorded import Recorded
from libs.simulation.traces.routing import Factors, Policy, Sample
from libs.simulation.traces.tiers import Directory, Local
from libs.simulation.traces.worker import Job, Worker

_ARRIVE, _FORM, _SAMPLE, _HEARD, _FINISHED = range(5)
_NEVER = math.inf
_PROGRESS = 256  # requests between two reports of it
_Event = tuple[float, int, int, int, Job | Sample | None]  # when, order, kind, worker, what


@dataclass
class Replayed:
    """What a run found, the first `skipped` requests left out of all sums. By request: `ttft_ms`, `chosen`,
    `decision_s`, `timeline`; by worker: `busy_ms`, `work_ms`; by tier: `hits`.
    """

    ttft_ms: list[float]
    hits: dict[str, int] = field(default_factory=dict)  # prompt tokens not computed, by tier
    prompt_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    busy_ms: list[float] = field(default_factory=list)
    work_ms: list[float] = field(default_factory=list)
    span_ms: float = 0.0
    skipped: int = 0
    decision_s: list[float] = field(default_factory=list)
    timeline: list[tuple[float, int, float]] = field(default_factory=list)  # when, worker, work then begun
    chosen: list[int] = field(default_factory=list)  # worker by request


class Cluster:
    """See the module."""

    def __init__(
        self,
        rows: Sequence[Recorded],
        policy: Policy,
        workers: int,
        tiers: TierSet,
        costs: Costs,
        error: Error,
        seed: int,
        directory: Directory,
        skip: int = 0,
    ) -> None:
        self._rows, self._policy, self._costs = rows, policy, costs
        self.workers = [Worker(number, costs, tiers, directory) for number in range(workers)]
        self._events: list[_Event] = []
        self._order = 0
        self._error = error
        self._draws = [random.Random(seed * 1_000_003 + number) for number in range(workers)]
        self._factors = [self._drawn(number) for number in range(workers)]
        self._formed = [-1.0] * workers  # when a worker's next event is due, to make none twice
        self._said: list[set[int]] = [set() for _ in range(workers)]  # blocks said to be coming
        self._found = Replayed([0.0] * len(rows), work_ms=[0.0] * workers, busy_ms=[0.0] * workers, skipped=skip)

    def run(self, progress: Callable[[int], None] | None = None) -> Replayed:
        """All requests, to their ends."""
        rows, found, costs = self._rows, self._found, self._costs
        for number, worker in enumerate(self.workers):
            self._push(rows[0].at_ms + costs.heartbeat_ms * number / len(self.workers), _SAMPLE, worker.number, None)
        position, left, row = 0, len(rows), rows[0]
        now, arrives = row.at_ms, row.at_ms  # when the next one comes
        while left:
            if arrives != _NEVER and (not self._events or arrives <= self._events[0][0]):
                now = arrives
                if position == found.skipped:
                    found.busy_ms = [worker.busy_ms for worker in self.workers]
                began = perf_counter()
                chosen = self._policy.choose(position, row, now)
                found.decision_s.append(perf_counter() - began)
                found.chosen.append(chosen)
                self._push(now + costs.hop_ms, _ARRIVE, chosen, Job(position, row, now))
                position += 1
                if position < len(rows):
                    row = rows[position]
                    arrives = row.at_ms
                else:
                    arrives = _NEVER
                if progress is not None and position % _PROGRESS == 0:
                    progress(position)
                continue
            now, _, kind, number, what = heappop(self._events)
            if kind == _FORM:
                if self._formed[number] == now:
                    self._form(self.workers[number], now)
            elif kind == _ARRIVE:
                assert isinstance(what, Job)
                self.workers[number].arrive(what, now)
                self._due(self.workers[number])
            elif kind == _SAMPLE:
                self._push(now + costs.stale_ms, _HEARD, number, self._sample(self.workers[number], now))
                self._push(now + costs.heartbeat_ms, _SAMPLE, number, None)
            elif kind == _HEARD:
                assert isinstance(what, Sample)
                self._policy.heard(what, now)
            else:
                assert isinstance(what, Job)
                self._policy.finished(number, what, now)
                left -= 1
        if progress is not None:
            progress(len(rows))
        found.span_ms = now - rows[0].at_ms
        found.busy_ms = [worker.busy_ms - before for worker, before in zip(self.workers, found.busy_ms, strict=True)]
        return found

    def _push(self, when: float, kind: int, worker: int, what: Job | Sample | None) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, kind, worker, what))

    def _due(self, worker: Worker) -> None:
        """The worker's next event, if it is another one than before."""
        when = worker.next_ms
        if when != self._formed[worker.number] and when != float("inf"):
            self._formed[worker.number] = when
            self._push(when, _FORM, worker.number, None)

    def _form(self, worker: Worker, now: float) -> None:
        self._formed[worker.number] = -1.0
        for job in worker.form(now):
            self._ended(worker, job)
        self._due(worker)

    def _ended(self, worker: Worker, job: Job) -> None:
        found, costs = self._found, self._costs
        found.ttft_ms[job.number] = job.first_ms + costs.hop_ms - job.asked_ms
        self._push(job.ended_ms + costs.hop_ms, _FINISHED, worker.number, job)
        if job.number < found.skipped:
            return
        for tier, tokens in job.hits.items():
            found.hits[tier] = found.hits.get(tier, 0) + tokens
        found.prompt_tokens += job.request.input_tokens
        found.computed_tokens += job.computed
        found.recomputed_tokens += job.again
        work = costs.work_ms(job.computed, job.staged, max(1, job.request.output_tokens))
        found.timeline.append((job.started_ms, worker.number, work))
        found.work_ms[worker.number] += work

    def _sample(self, worker: Worker, now: float) -> Sample:
        if self._error is Error.REDRAWN:
            self._factors[worker.number] = self._drawn(worker.number)
        factors, said, tiers = self._factors[worker.number], self._said[worker.number], worker.tiers
        coming: list[tuple[int, float]] = []
        for job in worker.arrivals:
            if job.prefilled_ms < 0:
                self._coming(worker, job, now, said, coming)
        worker.arrivals.clear()
        device = tiers.drain(Local.DEVICE)
        said.difference_update(device.entered, device.left)
        return Sample(
            worker.number,
            now,
            worker.queue_ms(now),
            worker.active,
            worker.decoding,
            worker.waiting,
            device,
            tiers.drain(Local.RAM),
            tiers.drain(Local.SSD),
            tuple(coming),
            factors,
        )

    def _coming(self, worker: Worker, job: Job, now: float, said: set[int], coming: list[tuple[int, float]]) -> None:
        """What a job computes that nobody here has or computes yet, and when it is there: with its whole prompt."""
        request = job.request
        begins = job.started_ms if job.started_ms >= 0 else now + worker.queue_ms(now)
        there = begins - now + job.expected * self._costs.prefill_ms
        for block in request.blocks[job.boundary :]:
            if block not in said and not worker.tiers.has(Local.DEVICE, block):
                said.add(block)
                coming.append((block, there))

    def _drawn(self, number: int) -> Factors:
        if self._error is Error.NONE:
            return Factors()
        draw, most = self._draws[number], self._costs.error
        return Factors(*(draw.uniform(1 - most, 1 + most) for _ in range(4)))
