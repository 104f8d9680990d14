"""Order-only figures, which are known for the recorded traces, and reading traces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from libs.simulation.traces.order import order_only
from libs.simulation.traces.recorded import SHIPPED, TraceError, read

SYNTHETIC, THOUSAND = SHIPPED / "mooncake_synthetic_trace.jsonl", SHIPPED / "dynamo_mooncake_trace_1000.jsonl"


@pytest.mark.parametrize(
    ("trace", "policy", "hit_rate", "spread"),
    [
        (SYNTHETIC, "unbounded", 0.640, 1.0),
        (SYNTHETIC, "round-robin", 0.194, 1.04),
        (SYNTHETIC, "longest-prefix", 0.640, 1.15),
        (THOUSAND, "round-robin", 0.291, 1.35),
        (THOUSAND, "longest-prefix", 0.351, 7.38),
    ],
)
def test_known_figures(trace: Path, policy: str, hit_rate: float, spread: float) -> None:
    found = order_only(read(trace), policy)
    assert found.hit_rate == pytest.approx(hit_rate, abs=0.0006)
    assert found.max_over_mean_work == pytest.approx(spread, abs=0.006)


def test_ours_finds_as_much_as_the_balanced_baseline() -> None:
    found = order_only(read(THOUSAND), "segue")
    assert found.hit_rate >= 0.378 and found.max_over_mean_work <= 1.11


def test_arrivals_of_one_bucket_are_spread_evenly() -> None:
    rows = read(THOUSAND)
    assert [row.at_ms for row in rows] == sorted(row.at_ms for row in rows)
    first = [row.at_ms for row in rows if row.at_ms < 3_000]
    assert len(first) > 2 and len({round(b - a, 6) for a, b in pairwise(first)}) == 1


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 0}',
        json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2"):
        read(path)
