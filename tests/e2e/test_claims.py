"""Every claim's slice, on the shared cluster: a claim's program that no longer works is found here, not at release."""

from __future__ import annotations

import json
import re

import pytest

from prove import report
from prove.__main__ import main, names, program
from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage


@pytest.mark.parametrize("name", names())
async def test_slice(name: str, stage: Stage) -> None:
    outcome = await program(name).run(Size.SLICE, stage)
    assert outcome.passed, json.dumps({"figure": outcome.figure, **outcome.details}, indent=1)


@pytest.mark.parametrize("name", names())
def test_named_as_its_file(name: str) -> None:
    claim = program(name).CLAIM
    assert claim.name == name and re.fullmatch(r"\d+-[a-z0-9-]+", name) and claim.text


def test_a_report_has_the_common_fields_at_its_top(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "REPORTS", tmp_path)
    path = report.write(Claim("2-x", "x holds", seed=3), Outcome(1.5, 2, passed=True, details={"more": [1]}))
    document = json.loads(path.read_text())
    for field in ("claim", "commit", "machine", "seed", "figure", "limit", "pass"):
        assert field in document
    assert (document["figure"], document["limit"], document["pass"], document["seed"]) == (1.5, 2, True, 3)
    assert document["more"] == [1] and "cores" in document["machine"]


def test_a_claim_without_checks_or_with_a_failed_one_does_not_pass() -> None:
    checks = Checks()
    assert not checks.outcome().passed
    checks.equal("a", 1, 1)
    assert checks.outcome().passed
    checks.equal("b", 1, 2)
    outcome = checks.outcome()
    assert not outcome.passed and outcome.figure == {"passed": 1, "of": 2, "failed": ["b"]}


def test_an_unknown_name_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["99-none"]) == 2
    said = capsys.readouterr().out
    assert names() and all(name in said for name in names())
