"""A hundred requests with one new beginning: who computes it, who waits how long, and who serves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cli.sim.files import scenarios
from libs.controller import candidates, holding
from libs.controller.policy import BY_REQUEST
from libs.controller.router_events import HoldExpired, PrefixesReported
from libs.simulation.figures import Figure, figures, unmet
from libs.simulation.schedule import Ask, Do, Fault, Schedule, Settings, WorkerSpec
from libs.simulation.strict import parse
from libs.simulation.world import World
from prove import p5_herd
from prove.checks import Checks


def the_scenario() -> Schedule:
    return parse(scenarios()["new-system-prompt"])


def played(schedule: Schedule) -> tuple[World, dict[str, Figure]]:
    world = World(schedule)
    return world, figures(world, world.run())


def test_it_is_computed_twice_fetched_by_all_and_nobody_waits_longer_than_alone() -> None:
    schedule = the_scenario()
    world, found = played(schedule)
    assert unmet(schedule.expect, found) == []
    assert found["computed.system"] == 2.0 and found["restored.PEER"] > 0  # type: ignore[operator]
    assert world.coverage.events[PrefixesReported] and not world.coverage.events[HoldExpired]


def copies(schedule: Schedule, _: pytest.MonkeyPatch) -> Schedule:
    return replace(schedule, settings=replace(schedule.settings, prefix_copies=8))


def strangers(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """Routers that do not agree on who computes it."""
    monkeypatch.setattr(candidates._Planning, "_drawn", lambda *_: BY_REQUEST)
    return schedule


def undealt(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """By time alone the worker that has it takes them."""
    monkeypatch.setattr(holding, "drawn", lambda *_: None)
    return schedule


def deaf(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """Nobody is told that it is there."""
    monkeypatch.setattr("libs.simulation.router_node.news", lambda *_: ())
    return schedule


@pytest.mark.parametrize(
    ("plant", "figure"),
    [
        (copies, "computed.system"),
        (strangers, "computed.system"),
        (undealt, "served.max_over_mean"),
        (deaf, "wait.most_over_alone"),
    ],
)
def test_a_planted_bug_is_noticed(
    plant: Callable[[Schedule, pytest.MonkeyPatch], Schedule], figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = plant(the_scenario(), monkeypatch)
    _, found = played(schedule)
    assert [claim for claim in unmet(schedule.expect, found) if claim.startswith(figure)]


@pytest.mark.parametrize("plant", [strangers, undealt, deaf])
def test_the_claim_notices_it_too(
    plant: Callable[[Schedule, pytest.MonkeyPatch], Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, planted = Checks(), Checks()
    p5_herd._simulated(honest)
    plant(the_scenario(), monkeypatch)
    p5_herd._simulated(planted)
    assert not honest.failed and len(planted.failed) >= 2  # the figure, and what the scenario expects


def a_herd(count: int, *faults: Fault, workers: int = 4) -> Schedule:
    spec = WorkerSpec("", lanes=8, pages=600, context=1_024, control_tasks=64)
    asks = tuple(Ask(f"q{i}", 600.0 + i / 10, "system", 768, 32, 4, deadline_ms=30_000, router=0) for i in range(count))
    settings = Settings(tuple(replace(spec, name=f"w{i}") for i in range(workers)), settle_ms=1_500)
    return Schedule("herd", settings, asks, faults)


def leader(schedule: Schedule) -> str:
    """Who computes it first."""
    world, _ = played(schedule)
    return min((span.began_ms, name) for name, worker in world.workers.items() for span in worker.spans)[1]


@pytest.mark.parametrize("fate", [Do.CRASH, Do.DEVICE_ERROR, Do.CANCEL, Do.DRAIN])
def test_when_a_leader_fails_the_others_are_served_all_the_same(fate: Do) -> None:
    first = leader(a_herd(12))
    who = "q0" if fate is Do.CANCEL else first
    world, found = played(a_herd(12, Fault(900.0, fate, who, ms=2_000.0)))
    assert found["run.violations"] == 0.0
    outcomes = {name: call.outcome for name, call in world.ingress.calls.items()}
    ended = {name: outcome for name, outcome in outcomes.items() if name != "q0" or fate is not Do.CANCEL}
    assert set(ended.values()) == {"completed"}
    # The other leader was computing it too: nobody computes it a third time but in the place of the lost one.
    assert found["computed.system"] <= 3.0  # type: ignore[operator]


def test_when_all_leaders_are_lost_it_is_computed_again() -> None:
    world, _ = played(a_herd(8))
    leaders = sorted(name for name, worker in world.workers.items() if worker.prefills["system"])
    world, found = played(a_herd(8, *(Fault(900.0, Do.CRASH, name, ms=100.0) for name in leaders)))
    assert found["run.violations"] == 0.0
    assert {call.outcome for call in world.ingress.calls.values()} == {"completed"}


def test_a_request_that_ends_while_it_is_held_is_forgotten() -> None:
    schedule = a_herd(8, Fault(700.0, Do.CANCEL, "q6"))
    late = replace(schedule.asks[7], deadline_ms=200.0)
    world, found = played(replace(schedule, asks=(*schedule.asks[:7], late)))
    assert found["run.violations"] == 0.0
    assert world.ingress.calls["q6"].outcome == "cancelled" and world.ingress.calls["q7"].outcome != "completed"
    assert found["router transition/held, cancelled"] == found["router transition/held, deadline"] == 1.0
