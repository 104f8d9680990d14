"""What a run has reached: every event, effect, transition, decline, fence and rejection, by name, with counts."""

from __future__ import annotations

import typing
from collections import Counter

from libs.controller import (
    discovery,
    router_effects,
    router_events,
    router_table,
    worker_effects,
    worker_events,
    worker_table,
)
from libs.controller.fences import Fence, FenceName, RouterFence, WorkerFence
from libs.controller.protocol import DeclineReason

Table = dict[str, int]

# What no run can reach, and why. Everything else must be.
UNREACHABLE: dict[str, str] = {}


class Coverage:
    """Of one run; the machines write into its counters."""

    def __init__(self) -> None:
        self.router_reached: Counter[tuple[router_table.Phase, router_table.Trigger, router_table.Phase]] = Counter()
        self.worker_reached: Counter[tuple[worker_table.Phase, worker_table.Trigger, worker_table.Phase]] = Counter()
        self.declines: Counter[DeclineReason] = Counter()
        self.rejected: Counter[discovery.Rejection] = Counter()
        self.events: Counter[type] = Counter()
        self.effects: Counter[type] = Counter()
        self.other: Counter[str] = Counter()

    def add(self, kind: str, name: str) -> None:
        """One more of anything else."""
        self.other[f"{kind}/{name}"] += 1

    def table(self, router_fence: Fence, worker_fence: Fence) -> Table:
        """Flat, by `kind/name`, sorted."""
        found: Counter[str] = Counter(self.other)
        for (before, trigger, _), count in self.router_reached.items():
            found[f"router transition/{before.value}, {trigger.value}"] += count
        for (phase, cause, _), count in self.worker_reached.items():
            found[f"worker transition/{phase.value}, {cause.value}"] += count
        for reason, count in self.declines.items():
            found[f"decline/{reason.name}"] += count
        for rejection, count in self.rejected.items():
            found[f"discovery rejection/{rejection.value}"] += count
        for kind, count in self.events.items():
            found[f"{_side(kind)} event/{kind.__name__}"] += count
        for kind, count in self.effects.items():
            found[f"{_side(kind)} effect/{kind.__name__}"] += count
        for fence in (router_fence, worker_fence):
            for (_, name), count in fence.counts.items():
                found[f"{_fence(name)}/{name.value}"] += count
        return {name: found[name] for name in sorted(found)}


def _side(kind: type) -> str:
    return "worker" if kind.__module__.rsplit(".", 1)[-1].startswith("worker") else "router"


def _fence(name: FenceName) -> str:
    return "router fence" if isinstance(name, RouterFence) else "worker fence"


def wanted() -> list[str]:
    """Every name the machines have, whether it can be reached or not."""
    names = [f"router transition/{phase.value}, {trigger.value}" for phase, trigger in router_table.TABLE]
    names += [f"worker transition/{phase.value}, {cause.value}" for phase, cause in worker_table.TABLE]
    names += [f"decline/{reason.name}" for reason in DeclineReason if reason is not DeclineReason.UNSPECIFIED]
    names += [f"discovery rejection/{rejection.value}" for rejection in discovery.Rejection]
    for union, kind in (
        (router_events.RouterEvent, "router event"),
        (worker_events.WorkerEvent, "worker event"),
        (router_effects.RouterEffect, "router effect"),
        (worker_effects.WorkerEffect, "worker effect"),
        (discovery.DiscoveryEffect, "discovery effect"),
    ):
        names += [f"{kind}/{one.__name__}" for one in typing.get_args(union)]
    names += [f"router fence/{fence.value}" for fence in RouterFence]
    names += [f"worker fence/{fence.value}" for fence in WorkerFence]
    return sorted(names)


def missing(table: Table) -> dict[str, str]:
    """Wanted names that were not reached, with the reason where there is one."""
    return {name: UNREACHABLE.get(name, "") for name in wanted() if not table.get(name)}
