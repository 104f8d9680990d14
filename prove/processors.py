"""How busy the machine's processors are, whoever uses them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Processors:
    """Time of all processors since the machine began, in ticks: used, and in all (proc(5), /proc/stat)."""

    used: int
    passed: int

    @classmethod
    def now(cls) -> Processors:
        """Linux only; raises FileNotFoundError elsewhere."""
        with Path("/proc/stat").open() as stat:
            ticks = [int(value) for value in stat.readline().split()[1:9]]
        return cls(sum(ticks) - ticks[3] - ticks[4], sum(ticks))

    def busy_since(self, before: Processors) -> float:
        """The share of the time between two moments that was used."""
        return (self.used - before.used) / max(1, self.passed - before.passed)
