"""Claims that are test suites: run by pytest in a process of its own, counted by name from its own report."""

from __future__ import annotations

import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prove.checks import Checks
from prove.processes import finished

_ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Ran:
    """Names by what became of them."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def count(self, *words: str) -> int:
        """Passed tests whose names hold all the words."""
        return sum(all(word in name for word in words) for name in self.passed)


async def suite(paths: Sequence[str], within: float, *, only: str = "") -> Ran:
    """Runs tests (`only`: pytest's -k). Raises TooLongError; RuntimeError where nothing was reported."""
    with tempfile.TemporaryDirectory(prefix="segue-suite-") as folder:
        report = Path(folder) / "report.xml"
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *paths]
        done = await finished([*argv, "-k", only] if only else argv, within, cwd=_ROOT)
        if not report.exists():
            raise RuntimeError(f"pytest reported nothing: {done.last_line}")
        return counted(report.read_text())


def counted(report: str) -> Ran:
    """A JUnit report's cases."""
    ran = Ran()
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
        fault = case.find("failure")
        fault = case.find("error") if fault is None else fault
        if fault is not None:
            ran.failed.append(f"{name}: {fault.get('message', '')[:600]}")
        elif case.find("skipped") is not None:
            ran.skipped.append(name)
        else:
            ran.passed.append(name)
    return ran


def judge(checks: Checks, ran: Ran, least: int) -> None:
    """Enough passed, none failed, none left out."""
    checks.check("tests passed", len(ran.passed), f">= {least}", len(ran.passed) >= least)
    checks.equal("tests failed", [*ran.failed[:10]], [])
    checks.equal("tests skipped (unsupported here)", [*ran.skipped[:10]], [])
