"""`segue sim run` and `segue sim fuzz`."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.__main__ import app
from cli.sim import fuzzing, plots
from libs.simulation.fuzz import Run
from libs.simulation.generate import generate
from libs.simulation.strict import parse
from libs.simulation.world import Failure, World

runner = CliRunner()


def test_a_scenario_runs_and_says_what_it_found(tmp_path: Path) -> None:
    done = runner.invoke(app, ["sim", "run", "router-loss", "--json", "--trace", str(tmp_path / "t.txt")])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["violation"] is None and said["unmet"] == []
    assert said["figures"]["ask.first.outcome"] == "completed"
    lines = (tmp_path / "t.txt").read_text().splitlines()
    assert any("Submitted" in line for line in lines) and any("→ SendOffer" in line for line in lines)


@pytest.mark.parametrize("command", [["run", "router-loss"], ["fuzz", "--seeds", "3", "--jobs", "1"]])
def test_a_picture_is_drawn(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    done = runner.invoke(app, ["sim", *command, "--json", "--plot", str(path)])
    assert done.exit_code == 0 and json.loads(done.stdout)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_spans_are_what_the_lanes_did() -> None:
    world = World(generate(12))
    assert world.run() is None
    assert sum(len(node.spans) for node in world.workers.values()) >= 5
    for node in world.workers.values():
        rows = plots.lanes(node.spans)
        assert len(rows) <= node.spec.lanes
        assert sorted(span.began_ms for row in rows for span in row) == sorted(one.began_ms for one in node.spans)
        for row in rows:
            for one, other in pairwise(row):
                assert one.began_ms <= one.decodes_ms <= one.ended_ms <= other.began_ms


def test_a_claim_that_does_not_hold_fails_the_run(tmp_path: Path) -> None:
    schedule = {
        "name": "x",
        "settings": {"workers": [{"name": "w0"}]},
        "asks": [{"name": "a"}],
        "expect": [{"figure": "ask.a.tokens", "least": 9}],
    }
    path = tmp_path / "x.json"
    path.write_text(json.dumps(schedule))
    done = runner.invoke(app, ["sim", "run", str(path)])
    assert done.exit_code == 1 and "NOT SO" in done.output


def test_what_cannot_be_read_is_said_and_scenarios_are_named(tmp_path: Path) -> None:
    done = runner.invoke(app, ["sim", "run", "nothing-like-it"])
    assert done.exit_code == 2 and "router-loss" in done.output
    (tmp_path / "bad.json").write_text("{")
    assert runner.invoke(app, ["sim", "run", str(tmp_path / "bad.json")]).exit_code == 2


def test_fuzz_counts_what_it_reached() -> None:
    done = runner.invoke(app, ["sim", "fuzz", "--seeds", "6", "--start", "50", "--jobs", "1", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["seeds"], said["start"], said["violations"]) == (6, 50, 0)
    assert said["coverage"]["router event"]["Submitted"] > 0 and said["events_median"] > 0


def test_fuzz_in_two_processes_says_the_same() -> None:
    alone = [run for batch in fuzzing.batches(range(30), 1) for run in batch]
    shared = [run for batch in fuzzing.batches(range(30), 2) for run in batch]
    assert sorted(shared, key=lambda run: run.seed) == alone


def test_a_failure_is_saved_and_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Run(3, 10, 4, Failure("1 one end", "planted", 10, 5.0, ("line",)), {})
    monkeypatch.setattr(fuzzing, "run_seed", lambda seed: broken)
    done = runner.invoke(
        app, ["sim", "fuzz", "--seeds", "1", "--start", "3", "--jobs", "1", "--json", "--save", str(tmp_path)]
    )
    assert done.exit_code == 1
    failure = json.loads(done.stdout)["failures"][0]
    assert failure["invariant"] == "1 one end" and parse(Path(failure["file"]).read_text()).seed == 3
