"""`segue sim fuzz`: many random schedules, on all cores; failures are shrunk and saved."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cli.sim import files, plots
from cli.sim.running import plain
from libs.simulation.fuzz import Run, Summary, run_seed, summarise
from libs.simulation.generate import generate
from libs.simulation.shrink import shrink

_BATCH = 25  # seeds a process takes at a time
_SAVED = 5  # failures that are shrunk and saved
_errors = Console(stderr=True)


def fuzz(
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="How many schedules.")] = 2_000,
    start: Annotated[int, typer.Option(min=0, metavar="S", help="The first seed.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="J", help="Processes.", show_default="one a core")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, no tables.")] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Shrink the first failures and save them there.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw times to first token and the schedules' events and faults."),
    ] = None,
) -> None:
    """Play random schedules and check every invariant after every step; exit status 1 if one breaks."""
    began = time.monotonic()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=_errors,
        transient=True,
        disable=not _errors.is_terminal,
    )
    runs: list[Run] = []
    with bar:
        task = bar.add_task("schedules", total=seeds, note="")
        broken = 0
        for batch in batches(range(start, start + seeds), jobs or os.cpu_count() or 1):
            runs += batch
            broken += sum(run.failure is not None for run in batch)
            bar.update(task, advance=len(batch), note=f"{broken} broken" if broken else "")
    summary = summarise(runs)
    saved = {run.seed: _save(run.seed, save) for run in summary.failures[:_SAVED]} if save is not None else {}
    seconds = time.monotonic() - began
    if plot is not None:
        plots.draw_fuzz(runs, plot)
    if as_json:
        sys.stdout.write(json.dumps(document(summary, start, seconds, saved), indent=2) + "\n")
    else:
        _tables(summary, seconds, saved)
    raise typer.Exit(1 if summary.failures else 0)


def batches(seeds: range, jobs: int) -> Iterator[list[Run]]:
    """Runs of all seeds, as they end; in this process if one is enough."""
    parts = [seeds[begin : begin + _BATCH] for begin in range(0, len(seeds), _BATCH)]
    if jobs == 1 or len(parts) == 1:
        for part in parts:
            yield _runs(part)
        return
    # No collection need look at what was imported.
    with ProcessPoolExecutor(min(jobs, len(parts)), initializer=gc.freeze) as pool:
        try:
            for done in as_completed([pool.submit(_runs, part) for part in parts]):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _runs(seeds: range) -> list[Run]:
    return [run_seed(seed) for seed in seeds]


def _save(seed: int, folder: Path) -> str:
    small = shrink(generate(seed))
    return str(files.save(replace(small, note="shrunk from its seed; it breaks the same invariant"), folder))


def document(summary: Summary, start: int, seconds: float, saved: dict[int, str]) -> dict[str, object]:
    """For JSON. `missing`: what was never reached, with the reason where it cannot be."""
    coverage: dict[str, dict[str, int]] = {}
    for name, count in summary.coverage.items():
        kind, one = name.split("/", 1)
        coverage.setdefault(kind, {})[one] = count
    failures = [
        {"seed": run.seed, "file": saved.get(run.seed), **plain(run.failure)}
        for run in summary.failures[:20]
        if run.failure is not None
    ]
    return {
        "seeds": summary.seeds,
        "start": start,
        "violations": len(summary.failures),
        "events_median": summary.events_median,
        "faults_median": summary.faults_median,
        "seconds": round(seconds, 1),
        "coverage": coverage,
        "missing": summary.missing,
        "failures": failures,
    }


def _tables(summary: Summary, seconds: float, saved: dict[int, str]) -> None:
    console = Console()
    table = Table("reached", box=None, header_style="bold")
    table.add_column("times", justify="right")
    for name, count in summary.coverage.items():
        table.add_row(name, f"{count:,}")
    console.print(table)
    for name, reason in summary.missing.items():
        console.print(f"never reached: {name}{f' ({reason})' if reason else ''}", markup=False)
    for run in summary.failures[:20]:
        assert run.failure is not None
        where = f" → {saved[run.seed]}" if run.seed in saved else ""
        console.print(
            f"seed {run.seed}: {run.failure.invariant}: {run.failure.detail}{where}", style="red", markup=False
        )
    console.print(
        f"{summary.seeds} schedules in {seconds:.1f} s, {len(summary.failures)} broke an invariant; "
        f"median {summary.events_median:g} events and {summary.faults_median:g} faults",
        style="red" if summary.failures else "green",
    )
