"""`segue sim run`: one scenario or one saved failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cli.sim import files, plots
from libs.simulation.figures import Figure, figures, unmet
from libs.simulation.schedule import Schedule, ScheduleError
from libs.simulation.world import Failure, World

_errors = Console(stderr=True)


def run(
    schedule: Annotated[str, typer.Argument(metavar="FILE|SCENARIO", help="A schedule file, or a scenario's name.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, no tables.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every event and effect there, one a line.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw times to first token and what each worker's lanes did when."),
    ] = None,
) -> None:
    """Play one schedule; exit status 1 if an invariant breaks or a claim of the scenario does not hold."""
    try:
        wanted = files.load(schedule)
    except ScheduleError as error:
        _errors.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    world = World(wanted)
    failure = world.run()
    found = figures(world, failure)
    wrong = unmet(wanted.expect, found)
    if trace is not None:
        trace.write_text("".join(line + "\n" for line in world.lines()))
    if plot is not None:
        plots.draw_run(world, plot)
    if as_json:
        sys.stdout.write(json.dumps(_document(wanted, failure, wrong, found), indent=2) + "\n")
    else:
        _tables(wanted, failure, wrong, found)
    raise typer.Exit(1 if failure is not None or wrong else 0)


def plain(failure: Failure) -> dict[str, object]:
    """For JSON."""
    return {
        "invariant": failure.invariant,
        "detail": failure.detail,
        "step": failure.step,
        "at_ms": failure.at_ms,
        "tail": [*failure.tail],
    }


def _document(
    schedule: Schedule, failure: Failure | None, wrong: list[str], found: dict[str, Figure]
) -> dict[str, object]:
    return {
        "name": schedule.name,
        "seed": schedule.seed if schedule.seed >= 0 else None,
        "violation": plain(failure) if failure is not None else None,
        "unmet": wrong,
        "figures": found,
    }


def _tables(schedule: Schedule, failure: Failure | None, wrong: list[str], found: dict[str, Figure]) -> None:
    console = Console()
    console.print(schedule.name, style="bold", markup=False)
    if schedule.note:
        console.print(schedule.note, markup=False)
    table = Table("ask", "outcome", box=None, header_style="bold")
    for name in ("tokens", "TTFT ms", "attempts", "tier"):
        table.add_column(name, justify="right")
    table.add_column("workers")
    for ask in schedule.asks[:40]:
        parts = ("outcome", "tokens", "ttft_ms", "attempts", "tier", "workers")
        row = [found.get(f"ask.{ask.name}.{part}", "-") for part in parts]
        table.add_row(ask.name, *(value if isinstance(value, str) else f"{value:g}" for value in row))
    console.print(table)
    if len(schedule.asks) > 40:
        console.print(f"… and {len(schedule.asks) - 40} more asks")
    for claim in schedule.expect:
        bounds = [claim.equals] if claim.equals else []
        bounds += [f">= {claim.least:g}"] if claim.least is not None else []
        bounds += [f"<= {claim.most:g}"] if claim.most is not None else []
        console.print(f"  {claim.figure} = {found.get(claim.figure, 0.0)} ({' and '.join(bounds)})", markup=False)
    for line in wrong:
        console.print(f"NOT SO: {line}", style="red", markup=False)
    if failure is None:
        console.print(f"{found['run.events']:g} events, no invariant broken", style="green")
        return
    console.print(f"BROKEN after {failure.step} events, {failure.at_ms:.3f} ms: {failure.invariant}", style="red")
    console.print(failure.detail, markup=False)
    for line in failure.tail:
        console.print(line, style="dim", markup=False, highlight=False)
