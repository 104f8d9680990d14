"""Machine code of the modules that decide: it chooses as they do; and what is rewritten for it is the same."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from prove import compiled
from prove.compiled import NotCompiledError, environment, ready
from prove.processes import finished
from prove.report import ROOT
from prove.written_out import written_out

DECIDING = ("controller.candidates", "controller.policy", "controller.ways")
CLASSES = '''
"""Theory."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST, LEAST = 3, 1
FIRST, SECOND = range(2)
again = 0


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """Somewhere."""

    x: int
    y: int = _MOST
    note: str = field(default="", repr=False)

    @property
    def far(self) -> int:
        return self.x + self.y


@dataclass
class Bag:
    points: list[Point] = field(default_factory=list)
    named: dict[str, int] = field(default_factory=dict)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.points)


@dataclass(slots=True, eq=False)
class Empty:
    pass
'''


def played(source: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, "classes", "exec"), found)
    return found


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def told(names: dict[str, Any]) -> list[Any]:
    """What somebody who uses the classes sees of them."""
    point, bag, empty = names["Point"], names["Bag"], names["Empty"]
    one, other = point(1), point(2, note="n")
    filled = bag([one, other], {"a": 1})
    with pytest.raises(TypeError):
        point()
    assert bag().points is not bag().points
    return [
        *(repr(one), repr(other), repr(filled), hash(one), one.far, one.note),
        *(one < other, one == point(1), one == other, replace(one, y=9) == point(1, 9), one == 1),
        *([entry.name for entry in fields(point)], [entry.name for entry in fields(bag)], filled.count),
        *(empty() == empty(), hasattr(one, "__dict__"), point.__doc__),
        *(names["_MOST"], names["LEAST"], names["FIRST"], names["SECOND"], names["__doc__"]),
    ]


def test_what_is_written_out_is_the_same() -> None:
    assert told(played(written_out(CLASSES))) == told(played(CLASSES))


def test_constructors_and_constants_stand_there() -> None:
    text = written_out(CLASSES)
    assert text.count("def __init__(self") == 3 and text.count("init=False") == 4  # one is a field's
    assert "_MOST: Final = 3" in text and "SECOND: Final = 1" in text and "again = 0" in text


def test_only_what_is_assigned_once_is_constant() -> None:
    assert "Final = " not in written_out("LEAST = 1\nLEAST = 2\n")


@pytest.mark.timeout(900)
async def test_compiled_modules_choose_as_interpreted_ones(tmp_path: Path) -> None:
    try:
        folder = await ready(DECIDING, kept=tmp_path)
    except NotCompiledError as error:
        if "compiler does not take" in str(error):
            raise
        pytest.skip(f"unsupported here: {error}")
    assert await ready(DECIDING, kept=tmp_path) == folder and left_in(tmp_path) == [folder]
    found = []
    for env in (environment(folder), {**os.environ, "PYTHONPATH": str(ROOT)}):
        done = await finished([sys.executable, "-P", "-m", "prove.cell", "16", "300"], 300, env=env)
        assert done.code == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert [one["compiled"] for one in found] == [True, False]
    for name in ("chosen", "ttft_ms", "hit_by_tier", "max_over_mean_work"):
        assert found[0][name] == found[1][name]


async def test_without_a_compiler_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(NotCompiledError, match="no C compiler 'no-such-compiler' here: install gcc, or set CC"):
        await ready(DECIDING, kept=tmp_path)


async def test_what_is_not_compiled_in_time_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_SETUP", "{paths}\nimport time\ntime.sleep(60)\n")
    monkeypatch.setenv("CC", sys.executable)
    with pytest.raises(NotCompiledError, match="3 modules were not compiled within"):
        await ready(DECIDING, kept=tmp_path, within_s=0.5)
    assert not left_in(tmp_path)
