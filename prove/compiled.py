"""The router's decisions and the simulated cell around them as machine code: `make compiled`.

mypyc, which comes with mypy, makes C extensions of typed modules. They are made of a copy of `libs` in a folder of its
own, whose name is a hash of all that they are made of; the sources stay what is run, read and tested. A process runs on
them when that folder comes first on its path (`environment`): the modules listed here are machine code then, all others
as ever, and they find each other by the same names.

What is compiled is not quite the source (`written_out`), and types are checked when it runs: a value of another type
than its annotation says is refused there, and nowhere else.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prove.processes import TooLongError, finished
from prove.report import ROOT
from prove.written_out import written_out

KEPT = ROOT / "build" / "compiled"
_WITHIN_S = 900.0
_CONTROLLER = (
    *("bounds", "candidates", "catalog_facts", "corrections", "demand", "discovery", "fixed", "fleet", "herds"),
    *("holding", "knobs", "peers", "policy", "protocol", "residency", "restores", "router_effects", "router_events"),
    *("smoothing", "sources", "table", "ways"),
)
_TRACES = ("baselines", "cluster", "costs", "ours", "recorded", "replay", "routing", "synthetic", "tiers", "worker")
MODULES = (
    "continuation.chain",
    *[f"controller.{name}" for name in _CONTROLLER],
    *[f"simulation.traces.{name}" for name in _TRACES],
)
"""Of `libs`, those in which a replay spends its time."""

_SETUP = """\
from mypyc.build import mypycify
from setuptools import setup

flags = ["--config-file=", "--cache-dir=/dev/null", "--python-version=3.11"]
flags += ["--follow-imports=silent", "--ignore-missing-imports"]
setup(name="compiled", packages=[], ext_modules=mypycify([*flags, *{paths}], group_name="segue"))
"""


class NotCompiledError(RuntimeError):
    """There are no compiled modules, and why."""


async def ready(modules: Sequence[str] = MODULES, kept: Path = KEPT, within_s: float = _WITHIN_S) -> Path:
    """The folder with the compiled modules of `libs`, made if there is none of these sources yet (minutes).

    Raises NotCompiledError: no C compiler, or it does not take them, or not in time.
    """
    folder = kept / _hash(modules)
    if folder.exists():
        return folder
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise NotCompiledError(f"there is no C compiler {compiler!r} here: install gcc, or set CC")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise NotCompiledError(f"there is no {header}: install this Python's development files")
    with _making(folder) as made:
        await _make(made, modules, within_s)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Of a process that runs on the compiled modules; start it with `python -P`, which puts nothing before them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def _hash(modules: Sequence[str]) -> str:
    try:
        mypy = version("mypy")
    except PackageNotFoundError:
        raise NotCompiledError("there is no mypyc here: make setup installs it, with mypy") from None
    found = hashlib.sha256(f"{sys.version} {mypy} {sorted(modules)}".encode())
    for path in (*sorted((ROOT / "libs").rglob("*.py")), Path(__file__), Path(__file__).with_name("written_out.py")):
        found.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


@contextmanager
def _making(folder: Path) -> Iterator[Path]:
    """A folder that becomes the one wanted when all is in it, or vanishes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="making-"))
    try:
        yield made
        if not folder.exists():  # nobody else was quicker
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


async def _make(folder: Path, modules: Sequence[str], within_s: float) -> None:
    shutil.copytree(ROOT / "libs", folder / "libs", ignore=shutil.ignore_patterns("__pycache__"))
    paths = [f"libs/{name.replace('.', '/')}.py" for name in modules]
    for path in paths:
        source = folder / path
        source.write_text(written_out(source.read_text()))
    (folder / "setup.py").write_text(_SETUP.format(paths=paths))
    argv = [sys.executable, "setup.py", "build_ext", "--inplace"]
    try:
        done = await finished(argv, within_s, cwd=folder)
    except TooLongError:
        raise NotCompiledError(f"{len(paths)} modules were not compiled within {within_s:g} s") from None
    if done.code:
        said = "\n".join(done.output.strip().splitlines()[-5:])
        raise NotCompiledError(f"mypyc or the C compiler does not take one of {len(paths)} modules: {said}")
    shutil.rmtree(folder / "build")


if __name__ == "__main__":
    print(asyncio.run(ready()))
