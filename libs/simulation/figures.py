"""What a run amounts to, as flat figures: what scenario files make claims about.

`ask.NAME.{outcome,tokens,ttft_ms,workers,attempts,tier,submissions}`, `worker.NAME.{busy_ms,served}`,
`served.max_over_mean` (requests a worker), `computed.PREFIX` (prefills that computed some of a shared prefix, over all
workers), `restored.TIER` (tokens), `busy.max_over_mean`, `fleet.killed` (workers, by queries of death),
`ttft.{mean_ms,most_ms,most_over_alone}` (alone: the same prompt on the quickest worker, with nothing resident and
nobody else there), `wait.{mean_ms,most_ms,most_over_alone}` (until the worker that serves it took it: then it computes,
fetches or has what it needs), `run.{events,violations}`, and every counter of the coverage table by its name.
"""

from __future__ import annotations

from collections import Counter

from libs.controller.protocol import CancelledDelivery, CompletedDelivery, ErrorDelivery
from libs.simulation.ingress import Call
from libs.simulation.schedule import Expectation, Schedule
from libs.simulation.world import Failure, World

Figure = str | float


def figures(world: World, failure: Failure | None) -> dict[str, Figure]:
    """Of a run that has ended."""
    found: dict[str, Figure] = {"run.events": float(world.steps), "run.violations": float(failure is not None)}
    waits: list[float] = []
    begun: list[tuple[float, float]] = []  # until accepted, and by alone
    over: list[float] = []
    served: Counter[str] = Counter()
    for name, call in world.ingress.calls.items():
        found[f"ask.{name}.outcome"] = call.outcome or "none"
        found[f"ask.{name}.tokens"] = float(len(call.delivered))
        found[f"ask.{name}.submissions"] = float(call.submissions)
        if call.first_ms is not None:
            wait = call.first_ms - call.ask.at_ms
            waits.append(wait)
            over.append(wait / alone_ms(world.schedule, call))
            found[f"ask.{name}.ttft_ms"] = round(wait, 3)
            taken = world.accepted.get(name, call.first_ms) - call.ask.at_ms
            begun.append((taken, taken / alone_ms(world.schedule, call)))
        terminal = call.terminal
        if isinstance(terminal, CompletedDelivery | ErrorDelivery | CancelledDelivery):
            found[f"ask.{name}.workers"] = ">".join(terminal.served.workers)
            found[f"ask.{name}.attempts"] = float(terminal.served.attempts)
            found[f"ask.{name}.tier"] = terminal.served.tier.name
            served.update(terminal.served.workers)
    busy: dict[str, float] = {}
    computed: Counter[str] = Counter()
    for name, worker in world.workers.items():
        busy[name] = sum((span.ended_ms - span.began_ms for span in worker.spans), 0.0)
        found[f"worker.{name}.busy_ms"] = round(busy[name], 3)
        found[f"worker.{name}.served"] = float(served[name])
        computed.update(worker.prefills)
    mean = sum(busy.values()) / len(busy)
    found["busy.max_over_mean"] = round(max(busy.values()) / mean, 4) if mean else 0.0
    most, total = max(served[name] for name in world.workers), sum(served[name] for name in world.workers)
    found["served.max_over_mean"] = round(most * len(world.workers) / total, 4) if total else 0.0
    found["fleet.killed"] = float(sum(world.watch.fleet.killed.values()))
    found |= {f"computed.{prefix}": float(count) for prefix, count in sorted(computed.items())}
    found |= {f"restored.{tier}": float(count) for tier, count in sorted(world.restored.items())}
    if waits:
        found["ttft.mean_ms"] = round(sum(waits) / len(waits), 3)
        found["ttft.most_ms"] = round(max(waits), 3)
        found["ttft.most_over_alone"] = round(max(over), 4)
        found["wait.mean_ms"] = round(sum(taken for taken, _ in begun) / len(begun), 3)
        found["wait.most_ms"] = round(max(taken for taken, _ in begun), 3)
        found["wait.most_over_alone"] = round(max(share for _, share in begun), 4)
    table = world.coverage.table(world.router_fence, world.worker_fence)
    return found | {name: float(count) for name, count in table.items()}


def alone_ms(schedule: Schedule, call: Call) -> float:
    """The time to first token of an ask that finds the cluster empty: look-up, offer, prefill, one step."""
    settings = schedule.settings
    ask = call.ask
    compute = min(
        spec.reserve_ms + (ask.shared + ask.own) * spec.prefill_ms + (settings.burst or ask.budget) * spec.decode_ms
        for spec in settings.workers
    )
    return compute + 4 * settings.latency_ms + 2 * settings.catalog_ms


def unmet(expect: tuple[Expectation, ...], found: dict[str, Figure]) -> list[str]:
    """The claims that do not hold, in words. A counter that is absent is 0."""
    wrong: list[str] = []
    for claim in expect:
        value = found.get(claim.figure, 0.0)
        if claim.equals and value != claim.equals:
            wrong.append(f"{claim.figure} is {value!r}, not {claim.equals!r}")
        if claim.least is not None and not (isinstance(value, float) and value >= claim.least):
            wrong.append(f"{claim.figure} is {value!r}, less than {claim.least:g}")
        if claim.most is not None and not (isinstance(value, float) and value <= claim.most):
            wrong.append(f"{claim.figure} is {value!r}, more than {claim.most:g}")
    return wrong
