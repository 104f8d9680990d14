"""The policies that ours is compared with. All hear the same samples; none looks at tiers.

A block is believed at a worker from the moment a request with it was sent there until a sample says that it has left
the worker's last tier. Ties are drawn by the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from libs.controller.residency import bits
from libs.simulation.traces.costs import Costs
from libs.simulation.traces.recorded import Recorded
from libs.simulation.traces.routing import Policy, Sample
from libs.simulation.traces.worker import Job


class RoundRobin(Policy):
    """In turn."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def choose(self, number: int, request: Recorded, now: float) -> int:
        del request, now
        return number % self._workers


class Believing(Policy):
    """Keeps who is believed to hold what, and who has how much in flight."""

    def __init__(self, workers: int, seed: int) -> None:
        self.workers = workers
        self.draw = random.Random(seed)
        self.holders: dict[int, int] = {}  # block -> bits of workers
        self.held = [0] * workers  # blocks believed
        self.requests = [0] * workers  # in flight
        self.blocks = [0] * workers  # of requests in flight

    def heard(self, sample: Sample, now: float) -> None:
        del now
        for block in sample.ssd.entered:
            self._set(block, sample.worker, True)
        for block in sample.ssd.left:
            self._set(block, sample.worker, False)

    def finished(self, worker: int, job: Job, now: float) -> None:
        del now
        self.requests[worker] -= 1
        self.blocks[worker] -= len(job.request.blocks)

    def matched(self, blocks: Sequence[int]) -> list[int]:
        """Blocks of the prompt's start that each worker is believed to hold."""
        depths = [0] * self.workers
        alive, last, depth = (1 << self.workers) - 1, -1, 0
        for block in blocks:
            holders = self.holders.get(block, 0)
            if holders != last:
                for worker in bits(alive & ~holders):
                    depths[worker] = depth
                alive &= holders
                if not alive:
                    return depths
                last = holders
            depth += 1
        for worker in bits(alive):
            depths[worker] = depth
        return depths

    def assigned(self, worker: int, request: Recorded) -> int:
        """Notes the choice, and returns it."""
        for block in request.blocks:
            self._set(block, worker, True)
        self.requests[worker] += 1
        self.blocks[worker] += len(request.blocks)
        return worker

    def least(self, costs: Sequence[float]) -> int:
        """The worker with the least; ties drawn."""
        best = min(costs)
        return self.draw.choice([worker for worker, cost in enumerate(costs) if cost == best])

    def _set(self, block: int, worker: int, there: bool) -> None:
        old = self.holders.get(block, 0)
        new = old | 1 << worker if there else old & ~(1 << worker)
        if new != old:
            self.held[worker] += 1 if there else -1
            if new:
                self.holders[block] = new
            else:
                del self.holders[block]


class LeastLoaded(Believing):
    """The least predicted ms in flight, by what the workers say their costs are."""

    def __init__(self, workers: int, seed: int, costs: Costs) -> None:
        super().__init__(workers, seed)
        self._costs = costs
        self._factor = [1.0] * workers
        self._ms = [0.0] * workers
        self._of: dict[int, float] = {}

    def heard(self, sample: Sample, now: float) -> None:
        super().heard(sample, now)
        self._factor[sample.worker] = sample.factors.prefill

    def choose(self, number: int, request: Recorded, now: float) -> int:
        del now
        depths = self.matched(request.blocks)
        worker = self.least(self._ms)
        uncached = request.input_tokens - request.end(depths[worker])
        cost = self._costs.work_ms(uncached, 0, request.output_tokens) * self._factor[worker]
        self._of[number] = cost
        self._ms[worker] += cost
        return self.assigned(worker, request)

    def finished(self, worker: int, job: Job, now: float) -> None:
        super().finished(worker, job, now)
        self._ms[worker] = max(0.0, self._ms[worker] - self._of.pop(job.number))


class LongestPrefix(Believing):
    """The longest prefix, whatever the load."""

    def choose(self, number: int, request: Recorded, now: float) -> int:
        del number, now
        depths = self.matched(request.blocks)
        return self.assigned(self.least([-depth for depth in depths]), request)


class CacheAware(Believing):
    """The longest prefix if it is long enough and nobody is overloaded; else the emptiest, or the least busy."""

    CACHE = 0.3
    ABSOLUTE = 64
    RELATIVE = 1.5

    def choose(self, number: int, request: Recorded, now: float) -> int:
        del number, now
        most, least = max(self.requests), min(self.requests)
        if most - least > self.ABSOLUTE and most > self.RELATIVE * least:
            return self.assigned(self.least(self.requests), request)
        depths = self.matched(request.blocks)
        if max(depths) > self.CACHE * len(request.blocks):
            return self.assigned(self.least([-depth for depth in depths]), request)
        return self.assigned(self.least(self.held), request)


class WeightedOverlap(Believing):
    """Blocks to compute, eightfold, plus blocks in flight."""

    WEIGHT = 8

    def choose(self, number: int, request: Recorded, now: float) -> int:
        del number, now
        depths = self.matched(request.blocks)
        count = len(request.blocks)
        costs = [self.WEIGHT * (count - depth) + load for depth, load in zip(depths, self.blocks, strict=True)]
        return self.assigned(self.least(costs), request)
