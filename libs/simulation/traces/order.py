"""Order only: one tier of blocks a worker, no time. How often a policy finds its prefix, and how it shares the work.

Bounds of this kind are known for the recorded traces and independent of every cost. A block hit is a block of the
longest prefix that the chosen worker holds; work is blocks that are not.

Without time there is no queue in milliseconds. Ours is told of one as long as the request's own prefill times the
worker's work over the mean, which is what `balanced` weighs too; it hears everything at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from libs.simulation.traces.costs import DECLARED, TierSet
from libs.simulation.traces.ours import Segue
from libs.simulation.traces.recorded import Recorded
from libs.simulation.traces.replay import spread
from libs.simulation.traces.routing import Factors, Sample
from libs.simulation.traces.tiers import UNCHANGED, Changes, Directory

BLOCKS = 5_859  # of a worker
ORDERS = ("unbounded", "round-robin", "longest-prefix", "balanced", "segue")


@dataclass(frozen=True)
class Ordered:
    """Share of blocks found, and the most work of a worker over the mean."""

    hit_rate: float
    max_over_mean_work: float


class _Caches:
    """Every worker's blocks, least recently used first, and the work it was given."""

    def __init__(self, workers: int, capacity: int) -> None:
        self.held: list[dict[int, None]] = [{} for _ in range(workers)]
        self.work = [0] * workers
        self.hits = self.blocks = 0
        self._capacity = capacity

    def matched(self, worker: int, blocks: Sequence[int]) -> int:
        held, count = self.held[worker], 0
        for block in blocks:
            if block not in held:
                break
            count += 1
        return count

    def give(self, worker: int, blocks: Sequence[int]) -> list[tuple[int, bool]]:
        """Returns what entered and what left."""
        found, held = self.matched(worker, blocks), self.held[worker]
        self.hits += found
        self.blocks += len(blocks)
        self.work[worker] += len(blocks) - found
        changed = []
        for block in reversed(blocks):  # a prompt's end leaves before what it follows
            if block in held:
                del held[block]
            else:
                changed.append((block, True))
            held[block] = None
        while len(held) > self._capacity:
            block = next(iter(held))
            del held[block]
            changed.append((block, False))
        return changed


class _Chooser(ABC):
    def __init__(self, caches: _Caches) -> None:
        self.caches = caches

    @abstractmethod
    def choose(self, number: int, row: Recorded) -> int: ...

    def given(self, worker: int, changed: list[tuple[int, bool]]) -> None:
        """The worker has it: what entered and what left. Nothing to those that look for themselves."""
        del worker, changed


class _Turn(_Chooser):
    def choose(self, number: int, row: Recorded) -> int:
        return number % len(self.caches.held)


class _Longest(_Chooser):
    """Of equals the next in turn."""

    def choose(self, number: int, row: Recorded) -> int:
        caches, count = self.caches, len(self.caches.held)
        return min(range(count), key=lambda worker: (-caches.matched(worker, row.blocks), (worker - number) % count))


class _Balanced(_Chooser):
    """Share matched minus work over the mean."""

    def choose(self, number: int, row: Recorded) -> int:
        caches = self.caches
        mean = max(1.0, sum(caches.work) / len(caches.work))
        workers = range(len(caches.held))
        return max(
            workers,
            key=lambda worker: caches.matched(worker, row.blocks) / len(row.blocks) - caches.work[worker] / mean,
        )


class _Ours(_Chooser):
    def __init__(self, caches: _Caches) -> None:
        super().__init__(caches)
        costs = replace(DECLARED, stale_ms=0.0, hop_ms=0.0)
        self._token_ms = costs.prefill_ms
        self._segue = Segue(len(caches.held), 0, costs, TierSet.LOCAL, Directory())
        self._changed = [UNCHANGED] * len(caches.held)

    def choose(self, number: int, row: Recorded) -> int:
        work, now = self.caches.work, float(number)
        mean = max(1.0, sum(work) / len(work))
        for worker, changed in enumerate(self._changed):
            queue = row.input_tokens * self._token_ms * work[worker] / mean
            self._segue.heard(Sample(worker, now, queue, 0, 0, 0, changed, UNCHANGED, UNCHANGED, (), Factors()), now)
            self._changed[worker] = UNCHANGED
        return self._segue.choose(number, row, now)

    def given(self, worker: int, changed: list[tuple[int, bool]]) -> None:
        entered, left = [block for block, there in changed if there], [block for block, there in changed if not there]
        self._changed[worker] = Changes(tuple(entered), tuple(left))


def order_only(rows: Sequence[Recorded], policy: str, workers: int = 8, blocks: int = BLOCKS) -> Ordered:
    """Of ORDERS by name. Raises ValueError for another."""
    if policy not in ORDERS:
        raise ValueError(f"no order-only policy is called {policy!r}: there are {', '.join(ORDERS)}")
    endless = policy == "unbounded"
    caches = _Caches(1 if endless else workers, 1 << 62 if endless else blocks)
    kinds: dict[str, type[_Chooser]] = {"longest-prefix": _Longest, "balanced": _Balanced, "segue": _Ours}
    chooser = kinds.get(policy, _Turn)(caches)
    for number, row in enumerate(rows):
        worker = chooser.choose(number, row)
        chooser.given(worker, caches.give(worker, row.blocks))
    return Ordered(caches.hits / caches.blocks, spread([float(work) for work in caches.work]))
