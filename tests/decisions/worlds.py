"""Decisions of random worlds as a router records them."""

from __future__ import annotations

import random
from dataclasses import replace

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.controller import candidates
from libs.controller.fleet import Fleet
from libs.controller.knobs import POLICY_KNOBS
from libs.controller.policy import BY_REQUEST, Draw, rank
from libs.controller.protocol import (
    Candidate,
    DeclineReason,
    Load,
    Pages,
    PrefillCost,
    RankedCandidate,
    Tier,
    Timings,
    Usage,
)
from libs.controller.router_effects import AttemptRecord, Decision, Outcome
from services.router.decision_records import record_of
from tests.controller.world import MODEL, a_request, heartbeat, observe, random_world


def recorded(
    ranked: tuple[RankedCandidate, ...],
    request_id: str,
    avoid: tuple[str, ...] = (),
    decided_ms: int = 1_000,
    draw: Draw = BY_REQUEST,
) -> pb.DecisionRecord:
    """The first candidate taken, the second one after a decline where there is one."""
    attempts = [attempt(0, Outcome.COMPLETED, ranked)]
    if len(ranked) > 1:
        attempts = [attempt(0, Outcome.DECLINED, ranked), attempt(1, Outcome.COMPLETED, ranked)]
    made = Decision(request_id, 1, "acme", "m", 100, 0, 0.0, ranked, (), tuple(attempts), avoid, 5, draw)
    return record_of(made, "r1", decided_ms)


def attempt(choice: int, outcome: Outcome, ranked: tuple[RankedCandidate, ...]) -> AttemptRecord:
    declined = outcome is Outcome.DECLINED
    predicted = ranked[choice].candidate.ttft_ms
    return AttemptRecord(
        choice + 1,
        choice,
        outcome,
        DeclineReason.QUEUE_FULL if declined else DeclineReason.UNSPECIFIED,
        "",
        predicted,
        None if declined else predicted * 1.1,
        Usage(100, 0, 0, 100, 4),
        Timings(ttft_ms=predicted * 1.05),
    )


def of_world(seed: int, avoid: bool = False) -> pb.DecisionRecord | None:
    """None where nobody can run it."""
    world = random_world(seed)
    request, fleet = replace(world.request, request_id=f"r{seed}"), world.fleet
    workers = sorted(fleet.views())
    shunned = tuple(workers[: len(workers) // 2]) if avoid else ()
    plan = candidates.plan(request, (world.variant,), fleet, 0.0, shunned)
    return recorded(plan.ranked, request.request_id, shunned, draw=plan.draw) if plan.ranked else None


def crowded(seed: int, workers: int = 200, draw: Draw = BY_REQUEST) -> pb.DecisionRecord:
    """Many equals: more near ties than are kept of a ranking."""
    rng = random.Random(seed)
    base = Candidate("w", 1, "ab" * 32, Tier.NONE, compute_tokens=100, prefill_ms_per_token=1.0, first_token_ms=5.0)
    options = []
    for index in range(workers):
        queue = rng.choice([0.0, 0.4, 0.9, 1.4, 30.0])
        one = replace(base, worker=f"w{index}", queue_ms=queue, ttft_ms=queue + 105.0)
        options.append(RankedCandidate(one, (), queue))
    name = f"crowd-{seed}"
    kept = rank(name, options, ())[:64]  # what is dealt is dealt among those that are kept
    return recorded(rank(name, kept, (), POLICY_KNOBS, draw), name, draw=draw)


def of_many(seed: int, workers: int = 150) -> pb.DecisionRecord:
    """As the planner ranks a large, mostly idle fleet for a new prompt."""
    rng = random.Random(seed)
    fleet = Fleet()
    costs = [rng.uniform(0.5, 0.52) for _ in range(3)]
    beats = [
        heartbeat(
            f"w{index}",
            load=Load(rng.choice([0.0, 0.0, 0.5, 1.0, 40.0]), pages=Pages(1_000, 1_000)),
            prefill=(PrefillCost(8_192, rng.choice(costs)),),
        )
        for index in range(workers)
    ]
    observe(fleet, *beats)
    request = a_request(rng.randint(30, 600), name=f"many-{seed}")
    plan = candidates.plan(request, (candidates.variant(MODEL, request),), fleet, 0.0)
    return recorded(plan.ranked, request.request_id, draw=plan.draw)
