"""What a routing policy is to the replay: it hears samples of the workers and ends of jobs, and chooses workers.

A sample is what a worker said of itself some time ago. What a policy has itself assigned it knows at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from libs.simulation.traces.recorded import Recorded
from libs.simulation.traces.tiers import Changes
from libs.simulation.traces.worker import Job


@dataclass(frozen=True, slots=True)
class Factors:
    """How what a worker says of its costs is off; 1 = as it is."""

    queue: float = 1.0
    prefill: float = 1.0
    decode: float = 1.0
    restore: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a worker says: of its tiers, what changed since the last sample.

    `coming`: blocks that jobs at the worker compute, each with ms until it is there, counted from `taken_ms`;
    `dropped`: blocks said to be coming that are no longer.
    """

    worker: int
    taken_ms: float
    queue_ms: float
    active: int
    decoding: int
    waiting: int
    device: Changes
    ram: Changes
    ssd: Changes
    coming: tuple[tuple[int, float], ...]
    factors: Factors


class Policy(ABC):
    """See the module. Times in ms on the router's clock."""

    @abstractmethod
    def choose(self, number: int, request: Recorded, now: float) -> int:
        """The worker that gets the request."""

    def heard(self, sample: Sample, now: float) -> None:
        """A worker's sample has come; nothing to most."""
        del sample, now

    def finished(self, worker: int, job: Job, now: float) -> None:
        """A job's end has come; nothing to most."""
        del worker, job, now
