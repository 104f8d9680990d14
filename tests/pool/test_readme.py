"""The table of the pool's README can be read by a program: its lines are there, once, and so are its tests."""

import ast
from collections import Counter

import pytest

from tests.pool.table import ROOT, Row, rows

ROWS = rows()


def test_the_table_is_whole() -> None:
    assert len(ROWS) >= 60
    assert not [name for name, times in Counter(row.id for row in ROWS).items() if times > 1]
    assert {f"I{number}" for number in range(1, 7)} <= {row.id for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_names_one_line_and_one_test(row: Row) -> None:
    ast.parse(row.disabled((ROOT / row.file).read_text()))  # disabled, not broken
    file, _, name = row.test.partition("::")
    functions = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name.partition("[")[0] in functions
