"""Which of the suite's two processes runs a test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures.lanes import COMPUTING, SERVED, give_way, lane

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("tests/worker/test_cow.py::test_a[tests/e2e/x]", "computing"),
        ("tests/worker/test_process.py::test_a", "live"),
        ("tests/e2e/test_up.py::test_a", "live"),
        ("test_sample.py::test_a", "live"),
    ],
)
def test_by_folder_and_file(nodeid: str, expected: str) -> None:
    assert lane(nodeid) == expected


def test_what_is_named_is_there() -> None:
    assert all((TESTS / folder).is_dir() for folder in COMPUTING)
    assert all((TESTS / file).is_file() for file in SERVED)


def test_a_server_in_the_lane_that_computes_is_noticed() -> None:
    item: Any = SimpleNamespace(
        nodeid="tests/worker/test_cow.py::test_a", fixturenames=["tmp_path", "background_servers"]
    )
    with pytest.raises(pytest.fail.Exception, match="belongs into SERVED"):
        give_way(item)
