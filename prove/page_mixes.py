"""Random mixes of assignments on a nearly full page pool, over a device that remembers what was written where.

A *mix*: a pool of a few conversations that fill it; then forks, next turns and strangers are offered until one is
refused, and all that were accepted run to the end of their budgets, interleaved at random, while checkpoints lease
pages and others give up. An accepted one must never lack a page, read a wrong one, or see its books broken.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.controller.protocol import AssignmentId
from services.worker.handlers import CheckpointRange, JobPages, Lease
from services.worker.pages.admission import Wanted
from services.worker.pages.errors import InsufficientPagesError
from services.worker.pages.pool import PagePool
from services.worker.pages.route import Continuation
from services.worker.pages.sizing import GroupSpec, PageSizes
from tests.worker.pool_device import Device, Slot

SIZES = PageSizes(page=16, chunk=256, step=96)
OCCUPIED = 0.95
_READ_SHARE = 0.15
"""Of the steps after a job's first: those before which its whole visible prefix is read and compared."""
_ROOT = "11" * 32
_WINDOWS = ((0,), (0, 32), (0, 300), (40, 0, 600))


@dataclass
class _Job:
    key: AssignmentId
    tokens: list[int]
    budget_end: int
    end: int
    pages: JobPages | None = None
    marks: list[Slot] = field(default_factory=list)

    def marked(self) -> list[Slot]:
        """One value per position that names the whole prefix up to it."""
        running = self.marks[-1][2] if self.marks and self.marks[-1] else hash(_ROOT)
        for position in range(len(self.marks), len(self.tokens)):
            running = hash((running, self.tokens[position]))
            self.marks.append((_ROOT, position, running))
        return self.marks

    @property
    def over(self) -> bool:
        return self.end >= self.budget_end


@dataclass
class Counts:
    """Of all mixes. `partial`: forks that began inside a page, and so needed a page of their own for its copy."""

    mixes: int = 0
    accepted: int = 0
    refused: int = 0
    forks: int = 0
    partial: int = 0
    leases: int = 0
    cancelled: int = 0
    evicted_pages: int = 0
    least_occupied: float = 1.0
    failures: list[str] = field(default_factory=list)


class Mix:
    """One mix; `play` runs it to its end."""

    def __init__(self, seed: int, counts: Counts) -> None:
        self._draw = random.Random(seed)
        windows = self._draw.choice(_WINDOWS)
        full = self._draw.choice([90, 160, 300])
        windowed = self._draw.choice([110, 160])
        groups = [GroupSpec(f"g{i}-w{w}", w, windowed if w else full) for i, w in enumerate(windows)]
        self.pool, self._device = PagePool(groups, SIZES), Device(groups, SIZES)
        self._counts = counts
        self._jobs: list[_Job] = []
        self._chats: list[list[int]] = []
        self._ranges: list[CheckpointRange] = []
        self._leases: list[Lease] = []
        self._number, self._now = 0, 0.0

    def play(self) -> None:
        """Raises AssertionError (also of the pool and the device) where an accepted assignment ran short."""
        self._fill()
        for _ in range(self._draw.randint(1, 3)):
            self._offer_until_full()
            self._counts.least_occupied = min(self._counts.least_occupied, self.occupied())
            self._run_all()
            self.pool.check_integrity()
        assert not self.pool.held()
        self._settle(everything=True)
        for pages in self.pool.pages().values():
            assert pages.free + pages.evictable == pages.total, f"at rest: {pages}"
        self._counts.evicted_pages += sum(self.pool.evictions.pages.values())

    def occupied(self) -> float:
        """Of the fullest group: the share of pages that are not free."""
        return max(1 - pages.free / pages.total for pages in self.pool.pages().values())

    def _fill(self) -> None:
        """Conversations at rest until hardly a page is free."""
        for _ in range(200):
            if self.occupied() >= OCCUPIED:
                return
            free = min(pages.free for pages in self.pool.pages().values())
            length = min(self._draw.randint(20, 900), max(2, free * SIZES.page - 40))
            if not self._offer(self._stranger(length), self._draw.randint(1, 30)):
                length = self._draw.randint(2, 120)
                if not self._offer(self._stranger(length), 1):
                    return
            self._run_all(cancels=False)

    def _stranger(self, length: int) -> list[int]:
        self._number += 1
        first = 1_000 * self._number
        return [first + position for position in range(length)]

    def _offer_until_full(self) -> None:
        """Forks, next turns and strangers until one is refused; then whatever fits, until hardly a page is free."""
        for _ in range(12):
            stranger = self._draw.random() < 0.25 or not self._chats
            tokens = self._stranger(self._draw.randint(1, 500)) if stranger else self._fork()
            if not self._offer(tokens, self._draw.choice([1, 15, 16, 17, 100, 300])):
                break
        for _ in range(100):
            if self.occupied() >= OCCUPIED:
                return
            free = max(pages.free for pages in self.pool.pages().values())
            self._offer(self._stranger(self._draw.randint(1, max(1, min(300, free * SIZES.page - 20)))), 8)

    def _fork(self) -> list[int]:
        """A next turn of a chat, from its end or from anywhere in it; of one under way too."""
        chat = self._draw.choice([*self._chats, *(job.tokens for job in self._jobs)])
        cut = len(chat) if self._draw.random() < 0.7 else self._draw.randint(1, len(chat))
        return [*chat[:cut], *self._stranger(self._draw.randint(1, 40))]

    def _offer(self, tokens: list[int], budget: int) -> bool:
        self._number += 1
        self._now += 1
        key = AssignmentId(f"r{self._number}", 1)
        try:
            made = self.pool.reserve(key, Wanted(Continuation("ff" * 32, _ROOT, ""), tuple(tokens), budget), self._now)
        except InsufficientPagesError:
            self._counts.refused += 1
            return False
        self._counts.accepted += 1
        self._counts.forks += made.resident > 0
        self._counts.partial += made.resident % SIZES.page > 0
        self._jobs.append(_Job(key, tokens, len(tokens) + budget - 1, made.resident))
        return True

    def _run_all(self, *, cancels: bool = True) -> None:
        while self._jobs:
            job = self._draw.choice(self._jobs)
            if cancels and self._draw.random() < 0.004:
                self._counts.cancelled += 1
                self._finish(job)
                continue
            for _ in range(self._draw.choice([1, 4, 30])):
                if not job.over:
                    self._step(job)
            if job.over:
                self._finish(job)
            self._checkpoint()

    def _step(self, job: _Job) -> None:
        start_of_all = job.pages is None
        if job.pages is None:
            job.pages = self.pool.job_pages(job.key)
            start = job.pages.begin()
            job.end = start.start
            for copy in start.copies:
                self._device.copy(copy.group, copy.source, copy.target, copy.slots)
        rows = self._draw.choice([1, 17, SIZES.step])
        end = min(job.end + rows, len(job.tokens), job.budget_end)
        job.pages.prepare(end)
        marks = job.marked()
        if start_of_all or self._draw.random() < _READ_SHARE:
            self._device.read(job.pages, marks, job.end, end)
        self._device.write(job.pages, marks, job.end, end)
        job.pages.computed(end)
        job.end = end
        drawn = [self._number] if end == len(job.tokens) and end < job.budget_end else []
        job.tokens += drawn
        self._ranges += self.pool.progress(job.key, drawn)

    def _finish(self, job: _Job) -> None:
        self._jobs.remove(job)
        self._now += 1
        self._ranges += self.pool.release(job.key, self._now)
        if job.end:
            self._chats = [*self._chats[-7:], job.tokens[: job.end]]

    def _checkpoint(self) -> None:
        pick = self._draw.random()
        if pick < 0.3 and self._ranges:
            wanted = self._draw.choice(self._ranges)
            if not any(lease_route(lease) == wanted.route for lease in self._leases):
                lease = self.pool.lease(wanted)
                if lease is not None:
                    self._counts.leases += 1
                    self._leases.append(lease)
        elif pick < 0.5 and self._leases:
            self._leases.pop(self._draw.randrange(len(self._leases))).release()
        elif pick < 0.8:
            self._settle(everything=False)

    def _settle(self, *, everything: bool) -> None:
        if everything:
            for lease in self._leases:
                lease.release()
            self._leases = []
        leased = {lease_route(lease) for lease in self._leases}
        for wanted in [wanted for wanted in self._ranges if wanted.route not in leased]:
            self._ranges.remove(wanted)
            self.pool.settled(wanted, durable=bool(self._draw.getrandbits(1)))


def lease_route(lease: Lease) -> int:
    """The route that a lease of the pool belongs to."""
    found: int = lease._lease.route.id  # type: ignore[attr-defined]
    return found


def play(seeds: Sequence[int], *, stop_at: int = 20) -> Counts:
    """A mix for each seed; failures are collected, up to `stop_at` of them."""
    counts = Counts()
    for seed in seeds:
        counts.mixes += 1
        try:
            Mix(seed, counts).play()
        except (AssertionError, IndexError, KeyError) as error:
            counts.failures.append(f"mix {seed}: {type(error).__name__}: {str(error)[:200]}")
            if len(counts.failures) >= stop_at:
                break
    return counts


def kinds(failures: Sequence[str]) -> dict[str, int]:
    """How many of each kind."""
    return dict(Counter(failure.split(": ")[1] for failure in failures))
