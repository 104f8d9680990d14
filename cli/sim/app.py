"""The commands of `segue sim`."""

from __future__ import annotations

import typer

from cli.sim import trace

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The cluster's own decisions under logical time: recorded traces against simulated workers.",
)


@app.callback()
def group() -> None:
    """A group also with one command."""


app.command("trace")(trace.trace)
