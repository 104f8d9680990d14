"""The table of the pool's README, row by row: take the line out, in a copy of the tree, and the row's test goes red.

Before that every test is green with its line in place: a test that is red anyhow holds nothing. And the judge is
shown a row whose test does not need its line: it must say so.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prove.checks import Checks
from prove.processes import finished
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from tests.pool.table import Row, copy, red_without, rows

CLAIM = Claim(
    "6-table",
    "libs/pool/README.md: each entity, guarantee and invariant of the source document, the line that holds it, and the "
    "test that is red without it",
)
_SLICE = ("F2",)
_GREEN_S = 600.0
LEAST = 78
"""Rows: the source document's entities, guarantees and invariants."""


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice takes a few rows."""
    del stage
    full = size is Size.FULL
    chosen = [row for row in rows() if full or row.id in _SLICE]
    checks = Checks()
    if full:
        checks.check("rows", len(chosen), f">= {LEAST}", len(chosen) >= LEAST)
    with tempfile.TemporaryDirectory(prefix="segue-table-") as folder:
        tree = Path(folder)
        copy(tree)
        await judge(checks, chosen, tree)
        checks.equal(
            "a row whose line is not needed is found", await asyncio.to_thread(red_without, needless(), tree), False
        )
    return checks.outcome({"rows": [row.id for row in chosen]})


async def judge(checks: Checks, chosen: Sequence[Row], tree: Path) -> None:
    """Green with the lines, red without each."""
    tests = sorted({row.test for row in chosen})
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", *tests]
    done = await finished(argv, _GREEN_S, cwd=tree)
    checks.check("tests green with every line in place", done.last_line, f"{len(tests)} tests", done.code == 0)
    if done.code:
        return
    for row in chosen:
        checks.equal(
            f"{row.id} red without its line: {row.holds}", await asyncio.to_thread(red_without, row, tree), True
        )


def needless() -> Row:
    """A line that the test of another row does not need."""
    found = {row.id: row for row in rows()}
    return replace(found["F2"], id="F2*", test=found["C6"].test)
