"""Manifests valid, lint clean, and no I/O in the two pure libraries: shown by import-linter, and by imports it catches.

The planted imports go into a copy of the sources, which is otherwise clean.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from prove.checks import Checks
from prove.processes import Finished, finished
from prove.report import ROOT, Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "2-checks",
    "make k8s-check and make lint are clean; controller and continuation import no I/O, a planted import is caught",
)
_WITHIN_S = 900.0
_PLANTS = ("libs/controller/policy.py", "libs/continuation/chain.py")
_FORBIDDEN = ("asyncio", "socket", "os", "time", "random", "logging", "threading", "grpc")
_CONTRACT = "controller and continuation do no I/O"


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The slice leaves out `make lint`, which CI runs beside the tests."""
    checks = Checks()
    manifests = await _tool(sys.executable, "tools/k8s_check.py")
    checks.check("k8s-check", manifests.last_line, "exit code 0", manifests.code == 0)
    if size is Size.FULL:
        lint = await finished(["make", "lint"], _WITHIN_S, cwd=ROOT)
        checks.check("make lint", lint.output[-500:] if lint.code else "clean", "exit code 0", lint.code == 0)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("libs", "services", "cli"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        clean = await _imports(copy)
        checks.check(
            "imports as they are", clean.last_line, "kept", clean.code == 0 and f"{_CONTRACT} KEPT" in clean.stdout
        )
        for plant in _PLANTS:
            await _planted(checks, copy, plant)
    return checks.outcome()


async def _planted(checks: Checks, copy: Path, plant: str) -> None:
    """Every forbidden module at once: each must be named."""
    path = copy / plant
    before = path.read_text()
    path.write_text(before + "".join(f"\nimport {module}\n" for module in _FORBIDDEN))
    found = await _imports(copy)
    path.write_text(before)
    module = plant.removesuffix(".py").replace("/", ".")
    caught = [name for name in _FORBIDDEN if f"{module} -> {name}" in found.stdout]
    passed = found.code != 0 and caught == list(_FORBIDDEN) and f"{_CONTRACT} BROKEN" in found.stdout
    checks.check(f"I/O planted in {plant} is caught", [*caught], [*_FORBIDDEN], passed)


async def _imports(folder: Path) -> Finished:
    env = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return await finished(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], _WITHIN_S, env=env, cwd=folder
    )


async def _tool(*argv: str) -> Finished:
    return await finished(argv, _WITHIN_S, cwd=ROOT)
