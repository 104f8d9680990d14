"""`segue sim trace`: a recorded trace against simulated workers with declared costs, under named routing policies."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cli.sim import plots
from libs.simulation.traces import suite
from libs.simulation.traces.costs import Error, TierSet
from libs.simulation.traces.order import ORDERS, order_only
from libs.simulation.traces.recorded import SHIPPED, TraceError, read
from libs.simulation.traces.replay import POLICIES, Figures

console = Console(stderr=True)


class _PolicyName(StrEnum):
    ALL = "all"
    SEGUE = "segue"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    LONGEST_PREFIX = "longest-prefix"
    CACHE_AWARE = "cache-aware"
    WEIGHTED = "weighted"


def trace(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSON lines: timestamp, input_length, output_length, hash_ids."),
    ],
    workers: Annotated[int, typer.Option(min=1, max=4_096, metavar="N", help="Simulated workers.")] = 8,
    policy: Annotated[list[_PolicyName] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    tiers: Annotated[
        list[TierSet] | None,
        typer.Option(help="Where workers restore from; may be repeated.", show_default="all three"),
    ] = None,
    rho: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            max=4.0,
            metavar="RHO",
            help="Load, as round robin's work; may be repeated.",
            show_default="0.3, 0.6, 0.85, 1.1",
        ),
    ] = None,
    error: Annotated[
        list[Error] | None,
        typer.Option(
            help="How costs that a policy hears are off; may be repeated.", show_default="redrawn, persistent"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=99, metavar="N", help="Medians are of so many seeds.")] = 3,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the trace's first requests.", show_default="all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, no table.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw TTFT distributions and work per worker over time of one cell."),
    ] = None,
) -> None:
    """Replay a recorded trace under each policy: time to first token, hits by tier, balance."""
    chosen = POLICIES if not policy or _PolicyName.ALL in policy else tuple(dict.fromkeys(one.value for one in policy))
    default = suite.Wanted(_found(file))
    wanted = replace(
        default,
        workers=workers,
        policies=chosen,
        tiers=tuple(dict.fromkeys(tiers or default.tiers)),
        rhos=tuple(dict.fromkeys(rho or default.rhos)),
        errors=tuple(dict.fromkeys(error or default.errors)),
        seeds=seeds,
        limit=limit,
    )
    try:
        document = _document(wanted, as_json)
        if plot is not None:
            plots.draw(wanted, plot)
    except (TraceError, OSError) as failure:
        console.print(f"[red]{failure}[/red]", highlight=False)
        raise typer.Exit(2) from failure
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _show(document)


def _found(file: Path) -> Path:
    """A shipped trace may be named by its file name alone."""
    return SHIPPED / file.name if not file.exists() and (SHIPPED / file.name).exists() else file


def _document(wanted: suite.Wanted, silent: bool) -> dict[str, JsonValue]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    disable = silent or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task("replays", total=None)
        cells = suite.compare(wanted, lambda done, total: progress.update(task, completed=done, total=total))
    return {"trace": wanted.trace.name, "cells": plain(cells), "order_only": ordered(wanted)}


def plain(cells: list[suite.Cell]) -> list[JsonValue]:
    """The cells as JSON: times in ms, hits as shares of the prompt tokens."""
    return [
        {
            "tiers": cell.tiers.value,
            "rho": cell.rho,
            "error": cell.error.value,
            "policies": {name: _figures(one) for name, one in cell.policies.items()},
        }
        for cell in cells
    ]


def _figures(one: Figures) -> dict[str, JsonValue]:
    return {
        "ttft_ms": {name: round(getattr(one, name), 2) for name in ("mean", "p50", "p90", "p99")},
        "hit_by_tier": {tier: round(share, 4) for tier, share in one.hit_by_tier.items()},
        "recomputed_tokens": int(one.recomputed_tokens),
        "max_over_mean_busy": round(one.max_over_mean_busy, 4),
        "max_over_mean_work": round(one.max_over_mean_work, 4),
        "decisions_per_s": round(one.decisions_per_s),
    }


def ordered(wanted: suite.Wanted) -> dict[str, JsonValue]:
    """Hit rates with one tier and no time, and the most work over the mean."""
    rows = read(wanted.trace, wanted.limit)
    found: dict[str, JsonValue] = {}
    for name in ORDERS:
        one = order_only(rows, name, wanted.workers)
        found[name] = {"hit_rate": round(one.hit_rate, 4), "max_over_mean_work": round(one.max_over_mean_work, 4)}
    return found


def _show(document: dict[str, JsonValue]) -> None:
    out = Console()
    cells, orders = document["cells"], document["order_only"]
    assert isinstance(cells, list) and isinstance(orders, dict)
    table = Table("tiers", "load", "error", "policy", box=None, header_style="bold")
    for name in ("mean", "p50", "p90", "p99 ms", "hit", "max/mean busy"):
        table.add_column(name, justify="right")
    for cell in cells:
        assert isinstance(cell, dict)
        policies = cell["policies"]
        assert isinstance(policies, dict)
        for name, one in policies.items():
            assert isinstance(one, dict)
            ttft, hits = one["ttft_ms"], one["hit_by_tier"]
            assert isinstance(ttft, dict) and isinstance(hits, dict)
            times = [f"{float(str(ttft[key])):,.0f}" for key in ("mean", "p50", "p90", "p99")]
            hit = sum(float(str(share)) for share in hits.values())
            table.add_row(
                str(cell["tiers"]), str(cell["rho"]), str(cell["error"]), name, *times, f"{hit:.1%}",
                f"{float(str(one['max_over_mean_busy'])):.2f}",
            )  # fmt: skip
    out.print(table)
    second = Table("order only", "block hit rate", "max/mean work", box=None, header_style="bold")
    for name, one in orders.items():
        assert isinstance(one, dict)
        second.add_row(name, f"{float(str(one['hit_rate'])):.3f}", f"{float(str(one['max_over_mean_work'])):.2f}")
    out.print(second)
