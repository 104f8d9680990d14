"""Prefixed, coloured log lines of several children on one terminal."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_WIDTH = 10


class PrefixedConsole:
    """A `children.Sink`: each child keeps the colour it got with its first line. Colour only on a terminal."""

    def __init__(self, stream: TextIO | None = None, *, colour: bool | None = None) -> None:
        self._stream = stream or sys.stderr
        self._colour = self._stream.isatty() and "NO_COLOR" not in os.environ if colour is None else colour
        self._assigned: dict[str, int] = {}

    def __call__(self, name: str, line: str) -> None:
        prefix = f"{name:<{_WIDTH}} |"
        if self._colour:
            code = self._assigned.setdefault(name, _COLOURS[len(self._assigned) % len(_COLOURS)])
            prefix = f"\x1b[{code}m{prefix}\x1b[0m"
        self._stream.write(f"{prefix} {line}\n")
        self._stream.flush()
