"""One seed's run and what many of them amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from libs.simulation.coverage import Table, missing
from libs.simulation.generate import generate
from libs.simulation.world import Failure, World


@dataclass(frozen=True, slots=True)
class Run:
    """Of one seed. `faults`: those that found something to harm; `ttft_ms`: of the asks that got a token."""

    seed: int
    events: int
    faults: int
    failure: Failure | None
    coverage: Table
    ttft_ms: tuple[float, ...] = ()


def run_seed(seed: int) -> Run:
    """Generates, runs, checks."""
    world = World(generate(seed))
    failure = world.run()
    table = world.coverage.table(world.router_fence, world.worker_fence)
    for reason, count in sorted(world.codec.counts.items()):
        table[f"wire/{reason}"] = table.get(f"wire/{reason}", 0) + count
    faults = sum(count for name, count in table.items() if name.startswith("fault/"))
    return Run(seed, world.steps, faults, failure, table, world.ingress.waits())


@dataclass(frozen=True, slots=True)
class Summary:
    """Of many seeds. `missing`: what was never reached, with the reason where there is one."""

    seeds: int
    failures: tuple[Run, ...]
    events_median: float
    faults_median: float
    coverage: Table
    missing: dict[str, str]


def summarise(runs: Iterable[Run]) -> Summary:
    """Adds up."""
    coverage: Counter[str] = Counter()
    failures: list[Run] = []
    events: list[int] = []
    faults: list[int] = []
    for run in runs:
        coverage.update(run.coverage)
        events.append(run.events)
        faults.append(run.faults)
        if run.failure is not None:
            failures.append(run)
    table = {name: coverage[name] for name in sorted(coverage)}
    failures.sort(key=lambda run: run.seed)
    return Summary(
        len(events), tuple(failures), float(median(events or [0])), float(median(faults or [0])), table, missing(table)
    )
