"""The commands of `segue sim`, one line each."""

from __future__ import annotations

import typer

from cli.sim import fuzzing, running, trace

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The cluster's own decisions under logical time: named scenarios, random schedules full of faults, recorded "
    "traces.",
)

app.command("run")(running.run)
app.command("fuzz")(fuzzing.fuzz)
app.command("trace")(trace.trace)
