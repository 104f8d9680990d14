"""Schedules: strictly read, written as read, the same trace in any process, shrunk to what matters."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.sim.files import scenarios
from libs.simulation.figures import figures, unmet
from libs.simulation.generate import generate
from libs.simulation.schedule import ScheduleError
from libs.simulation.shrink import ddmin, shrink
from libs.simulation.strict import parse, render
from libs.simulation.world import World
from prove.mutants import mutants
from tests.fixtures.hash_seeds import printed

WANTED = {
    "near-but-busy-far-but-idle",
    "offer-timeout-late-acceptance",
    "cancel-in-each-phase",
    "stale-capacity",
    "crash-and-late-completion",
    "router-loss",
    "new-system-prompt",
}


def test_the_named_scenarios_are_there() -> None:
    assert set(scenarios()) >= WANTED


@pytest.mark.parametrize("name", sorted(scenarios()))
def test_every_scenario_holds_what_it_claims(name: str) -> None:
    schedule = parse(scenarios()[name])
    assert schedule.name == name and schedule.note and schedule.expect
    world = World(schedule)
    failure = world.run()
    assert failure is None
    assert unmet(schedule.expect, figures(world, failure)) == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**40))
def test_a_schedule_is_read_as_it_was_written(seed: int) -> None:
    schedule = generate(seed)
    assert parse(render(schedule)) == schedule


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"colour": 1}, "schedule"),
        ({"asks": [{"name": "a", "budget": "8"}]}, "schedule.asks[0].budget"),
        ({"asks": [{"at_ms": 1}]}, "schedule.asks[0]"),
        ({"asks": [{"name": "a", "own": 0}]}, "ask a"),
        ({"asks": [{"name": "a"}, {"name": "a"}]}, "names"),
        ({"faults": [{"at_ms": 1, "do": "explode"}]}, "schedule.faults[0].do"),
        ({"faults": [{"at_ms": 1, "do": "crash", "who": "w9"}]}, "faults[0] (crash)"),
        ({"faults": [{"at_ms": 1, "do": "jitter", "who": "r0", "whom": "w0"}]}, "faults[0] (jitter)"),
        ({"settings": {"workers": []}}, "settings"),
        ({"settings": {"workers": [{"name": "w0", "page_tokens": 7}]}}, "worker w0"),
        ({"asks": [{"name": "a", "at_ms": float("nan")}]}, "schedule.asks[0].at_ms"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, object], where: str) -> None:
    plain: dict[str, object] = {"name": "x", "settings": {"workers": [{"name": "w0"}]}, "asks": [{"name": "a"}]}
    assert parse(json.dumps(plain)).asks[0].name == "a"
    with pytest.raises(ScheduleError) as error:
        parse(json.dumps({**plain, **change}))
    assert error.value.where == where


def digest() -> str:
    found = hashlib.sha256()
    for seed in (1, 2, 3):
        world = World(generate(seed))
        world.run()
        for line in world.lines():
            found.update(line.encode() + b"\n")
    return found.hexdigest()


def test_traces_do_not_depend_on_the_hash_seed() -> None:
    code = "from tests.simulation.test_schedules import digest; print(digest())"
    assert printed(code, ("0", "4242")) == {digest()}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(), min_size=1, max_size=40, unique=True), st.data())
def test_ddmin_keeps_exactly_what_the_failure_needs(items: list[int], data: st.DataObject) -> None:
    needed = set(data.draw(st.lists(st.sampled_from(items), max_size=4, unique=True)))
    assert set(ddmin(items, lambda kept: needed <= set(kept))) == needed


def test_a_planted_failure_shrinks_to_a_minimal_schedule() -> None:
    mutant = next(one for one in mutants() if one.name == "fence RouterFence.DUPLICATE_SUBMISSION")
    found = next(schedule for schedule in map(generate, range(500)) if mutant.run(schedule) is not None)

    def broken(schedule: object) -> str:
        failure = mutant.run(schedule)  # type: ignore[arg-type]
        return failure.invariant if failure is not None else ""

    small = shrink(found, broken)
    assert broken(small) == broken(found)
    assert (len(small.asks), len(small.faults)) == (1, 1) and small.faults[0].do.value == "resubmit"
    assert len(found.asks) + len(found.faults) > 2
