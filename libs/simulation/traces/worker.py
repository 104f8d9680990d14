"""One simulated worker: lanes, iterations, restores, by declared costs.

A job arrives, plans its restore (the boundary with the least predicted time to first token, by true costs, the same
under every policy) and loads it beside the device. Once a lane is free and the load is done it starts: what it has is
staged, the rest is prefilled, at most `budget_tokens` of an iteration, first come first served. Then it decodes, one
token an iteration; the first token ends its first decode iteration. What a job computed is in every tier when its
prefill ends. Iterations without prompt tokens are taken together as one span, up to the next change.

Loads do not slow one another down, and a job holds its lane from its start to its last token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest

from libs.simulation.traces.costs import Costs, TierSet, Transfer
from libs.simulation.traces.recorded import Recorded
from libs.simulation.traces.tiers import Directory, Local, Tiers

_NEVER = math.inf
SOURCES = ("ram", "ssd", "peer", "object")


@dataclass(slots=True, eq=False)
class Job:
    """One request at one worker. Times in ms; -1 = not yet."""

    number: int
    request: Recorded
    asked_ms: float
    arrived_ms: float = -1.0
    ready_ms: float = -1.0
    started_ms: float = -1.0
    prefilled_ms: float = -1.0
    first_ms: float = -1.0
    ended_ms: float = -1.0
    boundary: int = 0  # blocks that will be resident or loaded
    resident: int = 0  # blocks in device pages when the load was planned
    sources: bytes = b""  # of each block from `resident` to `boundary`: its place in SOURCES
    load_ms: float = 0.0
    staged: int = 0  # tokens restored to the device
    expected: int = 0  # prompt tokens to compute, as planned
    computed: int = 0  # and as it came
    again: int = 0  # of them, in blocks that somebody had computed before
    left: int = 0  # of them, to compute yet
    ends_at: int = 0  # the worker's decode count with its last token
    hits: dict[str, int] = field(default_factory=dict)  # tokens by tier


class Worker:
    """See the module. `form` at `next_ms`, `arrive` whenever a job does."""

    def __init__(self, number: int, costs: Costs, tiers: TierSet, directory: Directory) -> None:
        self.number, self.costs, self.tier_set = number, costs, tiers
        self.directory = directory
        self.tiers = Tiers(number, costs, directory if tiers.peers else None)
        self.next_ms = _NEVER
        self.busy_ms = 0.0  # of the device
        self.arrivals: list[Job] = []  # since they were last reported
        self._others = ~(1 << number)
        self._waiting: list[Job] = []
        self._prefilling: list[Job] = []
        self._lanes: list[tuple[int, int, Job]] = []  # heap by the count at which they end
        self._fresh: list[Job] = []  # lanes without a token yet
        self._count = 0  # decode iterations
        self._since = 0.0  # when the current iteration or span began
        self._each = 0.0  # of a span: ms an iteration; 0 = no span
        self._decodes = False
        self._pending = 0  # prompt tokens that jobs here will compute yet
        self._staging = 0

    # --- what it says ---

    @property
    def decoding(self) -> int:
        """Lanes that decode."""
        return len(self._lanes)

    @property
    def waiting(self) -> int:
        """Jobs without a lane."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Jobs with a lane."""
        return len(self._lanes) + len(self._prefilling)

    def unstarted(self) -> list[Job]:
        """Jobs whose prompt is not computed yet."""
        return [*self._prefilling, *self._waiting]

    def queue_ms(self, now: float) -> float:
        """How long one more job would wait before its prompt is read."""
        costs = self.costs
        per_token = costs.prefill_ms
        if self._lanes:
            per_token += costs.decode_ms / costs.budget_tokens
        wait = self._pending * per_token + self._staging * costs.restore_ms
        if self._each == 0.0 and not self._idle:
            wait += max(0.0, self.next_ms - now)
        elif self._each:
            wait += self._each - (now - self._since) % self._each
        ahead = self.active + len(self._waiting) - costs.lanes
        if ahead >= 0 and self._lanes:
            ends = nsmallest(min(ahead + 1, len(self._lanes)), self._lanes)
            wait += (ends[-1][0] - self._count) * costs.decode_ms
        return wait

    # --- what happens ---

    def arrive(self, job: Job, now: float) -> None:
        """A job has come; `next_ms` may be sooner afterwards."""
        job.arrived_ms = now
        self._plan(job, now)
        self._waiting.append(job)
        self._pending += job.expected
        self._staging += job.request.end(job.boundary) - job.request.end(job.resident)
        self.arrivals.append(job)
        if self.next_ms == _NEVER or (not self._decodes and self._each == 0.0 and self._idle):
            self.next_ms = min(self.next_ms, max(now, job.ready_ms))
        elif self._each:
            self.next_ms = min(self.next_ms, self._boundary(max(now, job.ready_ms)))

    @property
    def _idle(self) -> bool:
        return not self._lanes and not self._prefilling

    def _boundary(self, at: float) -> float:
        """The end of the span's iteration that runs at a time."""
        return self._since + max(1, math.ceil((at - self._since) / self._each - 1e-9)) * self._each

    def form(self, now: float) -> list[Job]:
        """The current iteration ends and the next one begins. Returns the jobs that ended."""
        ended = self._end(now)
        costs = self.costs
        self._since, self._each, self._decodes = now, 0.0, False
        budget, staged = costs.budget_tokens, 0
        for job in self._prefilling:
            taken = min(job.left, budget)
            job.left -= taken
            budget -= taken
        while budget and self._waiting and self.active < costs.lanes:
            started = self._next(now)
            if started is None:
                break
            # Its wait ends with the first of its own tokens: those of others come before it in the iteration.
            before = (costs.budget_tokens - budget) * costs.prefill_ms
            staged += self._start(started, now, now + before)
            taken = min(started.left, budget)
            started.left -= taken
            budget -= taken
            self._prefilling.append(started)
        tokens = costs.budget_tokens - budget
        self._pending -= tokens
        if not tokens and not staged:
            self._read(now)  # whoever had everything may decode at once
        self._decodes = bool(self._lanes)
        took = costs.prefill_ms * tokens + costs.restore_ms * staged + (costs.decode_ms if self._decodes else 0.0)
        if took == 0.0:
            self.next_ms = min((job.ready_ms for job in self._waiting), default=_NEVER)
            return ended
        for job in self._fresh:
            job.first_ms = now + took
        self._fresh.clear()
        self.next_ms = now + took
        if not tokens and not staged:
            self._each = took
            iterations = self._lanes[0][0] - self._count
            self.next_ms = now + iterations * took
            if self._waiting and self.active < costs.lanes:
                ready = min(job.ready_ms for job in self._waiting)
                self.next_ms = min(self.next_ms, self._boundary(ready))
        return ended

    def _end(self, now: float) -> list[Job]:
        self.busy_ms += (now - self._since) if self._decodes or self._prefilling else 0.0
        if self._decodes:
            self._count += max(1, round((now - self._since) / self._each)) if self._each else 1
        ended = []
        while self._lanes and self._lanes[0][0] <= self._count:
            job = heappop(self._lanes)[2]
            job.ended_ms = now
            ended.append(job)
        self._read(now)
        return ended

    def _read(self, now: float) -> None:
        """Prompts that are computed: their jobs decode from now on, and their blocks are there."""
        done = [job for job in self._prefilling if job.left == 0]
        if not done:
            return
        self._prefilling = [job for job in self._prefilling if job.left]
        for job in done:
            job.prefilled_ms = now
            blocks = job.request.blocks
            self.tiers.use(blocks)
            self.directory.computed.update(blocks)
            if self.tier_set.store:
                for block in blocks:
                    self.directory.stored.setdefault(block, now + self.costs.store_after_ms)
            job.ends_at = self._count + max(1, job.request.output_tokens)
            heappush(self._lanes, (job.ends_at, job.number, job))
            self._fresh.append(job)

    def _next(self, now: float) -> Job | None:
        """The first job that may start."""
        for index, job in enumerate(self._waiting):
            if job.ready_ms <= now + 1e-9:
                return self._waiting.pop(index)
        for index, job in enumerate(self._waiting):
            # Somebody else has computed it meanwhile.
            if self.tiers.prefix(job.request.blocks) >= job.boundary:
                return self._waiting.pop(index)
        return None

    def _start(self, job: Job, now: float, begins: float) -> int:
        """Returns the tokens staged."""
        request = job.request
        job.started_ms = begins
        planned = request.end(job.boundary) - request.end(job.resident)
        resident = self.tiers.prefix(request.blocks)
        held = max(resident, job.boundary)
        if resident < job.resident:  # evicted since: what is gone is computed again
            held = resident
        job.hits = {"device": request.end(resident)}
        job.staged = request.end(held) - request.end(resident)
        for position in range(resident, held):
            source = SOURCES[job.sources[position - job.resident]]
            tokens = request.end(position + 1) - request.end(position)
            job.hits[source] = job.hits.get(source, 0) + tokens
        if held > resident:
            self.tiers.use(request.blocks[:held])
        job.left = job.computed = request.input_tokens - request.end(held)
        computed = self.directory.computed
        for position in range(held, len(request.blocks)):
            if request.blocks[position] not in computed:
                break
            job.again += request.end(position + 1) - request.end(position)
        self._pending += job.computed - job.expected
        self._staging -= planned
        return job.staged

    def _plan(self, job: Job, now: float) -> None:
        """Which blocks are loaded, and from where."""
        request, costs = job.request, self.costs
        blocks, queue = request.blocks, self.queue_ms(now)
        resident = self.tiers.prefix(blocks)
        per_token = costs.prefill_ms + (costs.decode_ms / costs.budget_tokens if self._lanes else 0.0)
        end = start = request.end(resident)
        best, best_ms, best_load = resident, queue + (request.input_tokens - end) * per_token, 0.0
        sources = bytearray()
        load, used = 0.0, 0
        for position in range(resident, len(blocks)):
            source, transfer = self._source(blocks[position], now)
            if source < 0:
                break
            after = request.end(position + 1)
            load += (after - end) * transfer.per_token_ms
            if not used >> source & 1:
                used |= 1 << source
                load += transfer.latency_ms
            end = after
            sources.append(source)
            cost = max(queue, load) + (end - start) * costs.restore_ms + (request.input_tokens - end) * per_token
            if cost < best_ms:
                best, best_ms, best_load = position + 1, cost, load
        job.resident, job.boundary, job.sources = resident, best, bytes(sources[: best - resident])
        job.load_ms, job.ready_ms = best_load, now + best_load
        job.expected = request.input_tokens - request.end(best)

    def _source(self, block: int, now: float) -> tuple[int, Transfer]:
        costs = self.costs
        if self.tiers.has(Local.RAM, block):
            return 0, costs.ram
        if self.tiers.has(Local.SSD, block):
            return 1, costs.ssd
        if self.tier_set.peers:
            for tier, transfer in ((Local.RAM, costs.ram), (Local.SSD, costs.ssd)):
                if self.directory.holders[tier].get(block, 0) & self._others:
                    return 2, _plus(transfer, costs.peer)
        if self.tier_set.store and self.directory.stored.get(block, _NEVER) <= now:
            return 3, costs.store
        return -1, costs.ram


def _plus(one: Transfer, other: Transfer) -> Transfer:
    return Transfer(one.per_token_ms + other.per_token_ms, one.latency_ms + other.latency_ms)
