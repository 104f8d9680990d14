"""Equal workers whose reports and measurements vary: none of them gets all the work, and a slow one among them none."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from libs.controller import candidates
from libs.controller.discovery import Observed
from libs.controller.fleet import Fleet
from libs.controller.protocol import Candidate, DecodeCost, PrefillCost, Tier, Timings, Usage
from libs.controller.router_effects import Measured
from tests.controller.world import MODEL, a_request, heartbeat

WORKERS = [f"w{number:02}" for number in range(40)]
TOKEN_MS, STEP_MS = 0.15, 12.0


def chosen(seed: int, slow: str = "", requests: int = 80) -> Counter[str]:
    """Who gets prompts that nobody has anything of, while nobody waits anywhere. Reports are off by up to 30 %."""
    draw, fleet = random.Random(seed), Fleet()
    for turn in range(20):
        for worker in WORKERS:
            costs = {
                "prefill": (PrefillCost(1 << 20, TOKEN_MS * draw.uniform(0.7, 1.3)),),
                "decode": (DecodeCost(8, STEP_MS * draw.uniform(0.7, 1.3)),),
            }
            fleet.observe(Observed(heartbeat(worker, **costs), False, True), float(turn))
    for worker in WORKERS:
        view, speed = fleet.view(worker), 1.5 if worker == slow else 1.0
        assert view is not None
        for _ in range(40):
            ratio, tokens = fleet.corrections.of(worker), draw.randint(500, 12_000)
            said = Candidate(
                worker,
                1,
                MODEL.fingerprint,
                Tier.NONE,
                compute_tokens=tokens,
                prefill_ms_per_token=view.prefill[0].ms_per_token * ratio.prefill,
                first_token_ms=view.decode[0].step_ms * ratio.first,
            )
            measured = tokens * TOKEN_MS * speed * draw.uniform(0.85, 1.25)
            timings = Timings(0.0, 0.0, measured, STEP_MS * draw.choice([1, 1, 1, 3]))
            fleet.account(Measured(said, Usage(), timings), 30.0)
    found = Counter[str]()
    for number in range(requests):
        tokens = tuple(range(number * 7_000, (number + 1) * 7_000))  # one that begins as another goes where that went
        request = replace(a_request(7_000, name=f"r{number}"), tokens=tokens)
        plan = candidates.plan(request, [candidates.variant(MODEL, request)], fleet, 50.0)
        found[plan.ranked[0].candidate.worker] += 1
    return found


def test_the_draw_is_among_all_that_are_equal() -> None:
    found = chosen(1)
    assert len(found) > 28 and max(found.values()) <= 8  # of 40: at random 35, and at most 6


def test_a_slow_worker_among_equals_gets_nothing_new() -> None:
    found = chosen(2, slow="w07")
    assert "w07" not in found and len(found) > 28


def test_what_is_believed_without_doubt_herds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.controller.corrections.believed", lambda level, usual, doubt: level)
    assert len(chosen(1)) < 8
