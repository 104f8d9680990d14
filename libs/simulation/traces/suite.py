"""Every cell of a comparison: tier sets x loads x errors x policies x seeds, on all cores; the median of the seeds.

A policy that looks at no cost replays once for all errors, round robin also once for all seeds. With a persistent error
the first quarter of the trace is calibration: no policy is judged by it.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from libs.simulation.traces.costs import Error, TierSet
from libs.simulation.traces.recorded import Recorded, read, scaled
from libs.simulation.traces.replay import OBLIVIOUS, POLICIES, Figures, Setting, figures, loaded, run

CALIBRATION = 0.25  # share of the requests, with a persistent error


@dataclass(frozen=True)
class Wanted:
    """What is compared."""

    trace: Path
    workers: int = 8
    policies: tuple[str, ...] = POLICIES
    tiers: tuple[TierSet, ...] = tuple(TierSet)
    rhos: tuple[float, ...] = (0.3, 0.6, 0.85, 1.1)
    errors: tuple[Error, ...] = (Error.REDRAWN, Error.PERSISTENT)
    seeds: int = 3
    limit: int | None = None  # requests of the trace; None = all


@dataclass(frozen=True)
class Cell:
    """One tier set, load and error: each policy's median figures."""

    tiers: TierSet
    rho: float
    error: Error
    policies: dict[str, Figures]


_Run = tuple[TierSet, float, Error, str, int]  # and the seed
_Key = tuple[TierSet, float, Error, str]


def compare(wanted: Wanted, progress: Callable[[int, int], None] | None = None) -> list[Cell]:
    """Runs them all; `progress` hears how many of how many runs are done. Raises TraceError, OSError, ValueError."""
    _rows(wanted.trace, wanted.limit)  # a trace that cannot be read is refused here
    unknown = [name for name in wanted.policies if name not in POLICIES]
    if unknown:
        raise ValueError(f"no policy is called {unknown[0]!r}: there are {', '.join(POLICIES)}")
    runs = _runs(wanted)
    loads = [(tiers, rho) for tiers in wanted.tiers for rho in wanted.rhos]
    total, done = len(runs) + len(loads), 0
    found: dict[_Run, Figures] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, total), context) as pool:
        scaling = {pool.submit(_load, wanted, tiers, rho): (tiers, rho) for tiers, rho in loads}
        running: dict[Future[Figures], _Run] = {}
        for scaled_one in as_completed(scaling):
            done = _told(progress, done, total)
            factor = scaled_one.result()
            for one in runs:
                if one[:2] == scaling[scaled_one]:
                    running[pool.submit(_replay, wanted, one, factor)] = one
        for replayed in as_completed(running):
            done = _told(progress, done, total)
            found[running[replayed]] = replayed.result()
    return [
        Cell(tiers, rho, error, {name: _median(wanted, found, (tiers, rho, error, name)) for name in wanted.policies})
        for tiers in wanted.tiers
        for rho in wanted.rhos
        for error in wanted.errors
    ]


def _told(progress: Callable[[int, int], None] | None, done: int, total: int) -> int:
    if progress is not None:
        progress(done + 1, total)
    return done + 1


def _runs(wanted: Wanted) -> list[_Run]:
    every = [
        (tiers, rho, error, name, seed)
        for tiers in wanted.tiers
        for rho in wanted.rhos
        for error in wanted.errors
        for name in wanted.policies
        for seed in range(wanted.seeds)
    ]
    return list(dict.fromkeys(_same(wanted, one) for one in every))


def _same(wanted: Wanted, one: _Run) -> _Run:
    """The run that stands for this one."""
    tiers, rho, error, name, seed = one
    if name not in OBLIVIOUS:
        return one
    alike = [other for other in wanted.errors if (other is Error.PERSISTENT) == (error is Error.PERSISTENT)]
    return tiers, rho, alike[0], name, 0 if name == "round-robin" else seed


def _median(wanted: Wanted, found: dict[_Run, Figures], key: _Key) -> Figures:
    return median([found[_same(wanted, (*key, seed))] for seed in range(wanted.seeds)])


def median(several: Sequence[Figures]) -> Figures:
    """Of each figure by itself."""
    names = sorted({tier for one in several for tier in one.hit_by_tier})
    hits = {tier: statistics.median(one.hit_by_tier.get(tier, 0.0) for one in several) for tier in names}
    values = {
        field.name: statistics.median(getattr(one, field.name) for one in several)
        for field in fields(Figures)
        if field.name != "hit_by_tier"
    }
    return Figures(**values, hit_by_tier=hits)


@lru_cache(maxsize=2)
def _rows(trace: Path, limit: int | None) -> list[Recorded]:
    return read(trace, limit)


def _load(wanted: Wanted, tiers: TierSet, rho: float) -> float:
    return loaded(_rows(wanted.trace, wanted.limit), rho, tiers, wanted.workers)


def _replay(wanted: Wanted, one: _Run, factor: float) -> Figures:
    tiers, _, error, name, seed = one
    rows = scaled(_rows(wanted.trace, wanted.limit), factor)
    setting = Setting(name, tiers, error, seed, wanted.workers)
    if error is Error.PERSISTENT:
        setting = replace(setting, skip=int(CALIBRATION * len(rows)))
    return figures(run(rows, setting))
