"""Reads the table of libs/pool/README.md: what must hold, the line that holds it, the test that is red without it.

`python -m tests.pool.table [ID...]` takes the line out, in a copy of the tree, and runs the test: it must fail.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "libs/pool/README.md"
_FIELD = r"`(?P<{}>[^`]+)`"
_ROW = re.compile(
    r"^\| (?P<id>[A-Z]\d+) \| (?P<holds>.+?) \| "
    + r" \| ".join(_FIELD.format(name) for name in ("file", "line", "without", "test"))
    + r" \|$"
)
_TAKEN = ("libs", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Row:
    """``line`` occurs once in ``file`` (indentation apart); ``without`` is what stands there instead."""

    id: str
    holds: str
    file: str
    line: str
    without: str
    test: str

    def disabled(self, text: str) -> str:
        """The file's text without the line. Raises ValueError unless it occurs exactly once."""
        lines = text.split("\n")
        found = [index for index, line in enumerate(lines) if line.strip() == self.line]
        if len(found) != 1:
            raise ValueError(f"row {self.id}: {self.file} has the line {len(found)} times, not once: {self.line}")
        old = lines[found[0]]
        lines[found[0]] = old[: len(old) - len(old.lstrip())] + self.without
        return "\n".join(lines)


def rows() -> list[Row]:
    """All rows. Raises ValueError if one cannot be read."""
    table = [line for line in README.read_text().splitlines() if re.match(r"^\| [A-Z]\d+ \|", line)]
    found = []
    for line in table:
        match = _ROW.match(line)
        if match is None:
            raise ValueError(f"a row that cannot be read: {line}")
        found.append(Row(**match.groupdict()))
    return found


def red_without(row: Row, tree: Path, timeout_s: float = 400.0) -> bool:
    """Whether the row's test fails in ``tree`` once its line is gone; the line is put back."""
    path = tree / row.file
    before = path.read_text()
    path.write_text(row.disabled(before))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "120", row.test]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(before)
    # 1 = tests failed. Anything else is no verdict on the line: a test that was not found, a tree that is broken.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"row {row.id}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.returncode == 1


def copy(tree: Path) -> None:
    """What the tests need, to be changed there."""
    for name in _TAKEN:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)


def main(wanted: list[str]) -> int:
    """Checks the rows named, or all; how many are not red."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy(tree)
        for row in rows():
            if wanted and row.id not in wanted:
                continue
            red = red_without(row, tree)
            failed += not red
            print(f"{row.id}: {'red' if red else 'NOT RED'}  {row.holds}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
