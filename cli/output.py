"""What commands write: one JSON document on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cli.connection import console


def print_json(value: Any) -> None:
    """One document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def bar(silent: bool) -> Progress:
    """A progress bar on standard error; hidden where that is no terminal, or where silence was asked for."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=silent or not console.is_terminal)
