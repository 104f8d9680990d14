"""One replay by the names of its policy, tier set, load and error; and its figures.

Load is the work that round robin would make, over what the workers could do in the trace's span: arrivals are scaled
in time until it is the one asked for.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.simulation.traces import baselines
from libs.simulation.traces.cluster import Cluster, Replayed
from libs.simulation.traces.costs import DECLARED, Costs, Error, TierSet
from libs.simulation.traces.ours import Segue
from libs.simulation.traces.recorded import Recorded, scaled
from libs.simulation.traces.routing import Policy
from libs.simulation.traces.tiers import Directory

POLICIES = ("segue", "round-robin", "least-loaded", "longest-prefix", "cache-aware", "weighted")
BASELINES = POLICIES[1:]
OBLIVIOUS = ("round-robin", "longest-prefix", "cache-aware", "weighted")
"""Those that look at no cost, and so do not care how costs are off."""

_SETTLED = 0.005  # share by which a load may miss what was asked for
_TRIES = 6


@dataclass(frozen=True)
class Figures:
    """What a run is reported by. `hit_by_tier`: share of the prompt tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    hit_by_tier: dict[str, float]
    recomputed_tokens: int
    max_over_mean_busy: float
    max_over_mean_work: float
    decisions_per_s: float


@dataclass(frozen=True)
class Setting:
    """What one run is of."""

    policy: str
    tiers: TierSet
    error: Error
    seed: int
    workers: int = 8
    costs: Costs = DECLARED
    skip: int = 0  # requests that count for nothing yet: a policy learns from them


def made(setting: Setting, directory: Directory) -> Policy:
    """The policy, anew. Raises ValueError for an unknown name."""
    workers, seed, costs = setting.workers, setting.seed, setting.costs
    match setting.policy:
        case "segue":
            return Segue(workers, seed, costs, setting.tiers, directory)
        case "round-robin":
            return baselines.RoundRobin(workers)
        case "least-loaded":
            return baselines.LeastLoaded(workers, seed, costs)
        case "longest-prefix":
            return baselines.LongestPrefix(workers, seed)
        case "cache-aware":
            return baselines.CacheAware(workers, seed)
        case "weighted":
            return baselines.WeightedOverlap(workers, seed)
    raise ValueError(f"no policy is called {setting.policy!r}: there are {', '.join(POLICIES)}")


def run(
    rows: Sequence[Recorded],
    setting: Setting,
    progress: Callable[[int], None] | None = None,
    policy: Policy | None = None,
) -> Replayed:
    """Replays the rows as they are. `policy`: another than the setting names. No garbage is collected meanwhile."""
    directory = Directory()
    chosen = policy or made(setting, directory)
    cluster = Cluster(
        rows,
        chosen,
        setting.workers,
        setting.tiers,
        setting.costs,
        setting.error,
        setting.seed,
        directory,
        setting.skip,
    )
    # A replay makes no cycles; looking for some among its millions of values would take longer than all else.
    collected = gc.isenabled()
    gc.disable()
    try:
        return cluster.run(progress)
    finally:
        if collected:
            gc.enable()


def loaded(rows: Sequence[Recorded], rho: float, tiers: TierSet, workers: int, costs: Costs = DECLARED) -> float:
    """The factor of the trace's times at which round robin's work is this share of what the workers could do."""
    setting = Setting("round-robin", tiers, Error.NONE, 0, workers, costs)
    span = max(1.0, rows[-1].at_ms - rows[0].at_ms)
    factor = 1.0
    for _ in range(_TRIES):
        found = sum(run(scaled(rows, factor), setting).work_ms) / (workers * span * factor)
        if abs(found / rho - 1) <= _SETTLED:
            break
        factor *= found / rho
    return factor


def figures(found: Replayed) -> Figures:
    """Of one run."""
    ordered = sorted(found.ttft_ms[found.skipped :])
    deciding = sum(found.decision_s)
    return Figures(
        mean=sum(ordered) / len(ordered),
        p50=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p99=quantile(ordered, 0.99),
        hit_by_tier={tier: tokens / found.prompt_tokens for tier, tokens in sorted(found.hits.items())},
        recomputed_tokens=found.recomputed_tokens,
        max_over_mean_busy=spread(found.busy_ms),
        max_over_mean_work=spread(found.work_ms),
        decisions_per_s=len(found.decision_s) / deciding if deciding else math.inf,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> float:
    """Largest over mean."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
