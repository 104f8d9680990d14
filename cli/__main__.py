"""The `segue` command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from cli import up as up_command
from cli.cache.app import app as cache_commands
from cli.decisions.app import app as decision_commands
from cli.sim.app import app as sim_commands
from cli.top.command import top as top_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Segue: open-weight language models behind an OpenAI-compatible API; no prompt is paid for twice.",
)

app.add_typer(cache_commands, name="cache")
app.add_typer(decision_commands, name="decisions")
app.add_typer(sim_commands, name="sim")
app.command("top")(top_command)

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="gemma3-270m, tiny, a model folder, a .gguf file or a hub id; may be repeated.",
        show_default="gemma3-270m",
    ),
]
Workers = Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Workers per model, at most 64.")]


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} is no device: give auto, cpu, cuda or cuda:N")
    return value


Device = Annotated[str, typer.Option(metavar="DEVICE", callback=_device, help="auto, cpu, cuda or cuda:N.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Threads of each worker.", show_default="cores / workers"),
]
State = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of everything the cluster keeps.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete everything in the state folder first.")]
Otlp = Annotated[str | None, typer.Option(metavar="URL", help="OTLP/gRPC collector for traces, as http://HOST:PORT.")]


@app.command()
def up(
    model: Models = None,
    workers: Workers = 2,
    device: Device = "cpu",
    threads: Threads = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            metavar="PORT",
            help="Port of the API; 0: any free one.",
            show_default="8000, or a free one",
        ),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Model-free workers with declared costs.")] = False,
    chat_template: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="A chat template instead of the model's own; may be repeated."),
    ] = None,
    state: State = Path(".segue"),
    fresh: Fresh = False,
    otlp: Otlp = None,
) -> None:
    """Run a whole cluster on this machine until Ctrl-C."""
    options = up_command.Options(
        models=tuple(model or ["gemma3-270m"]),
        workers=workers,
        device=device,
        threads=threads,
        port=port,
        echo=echo,
        chat_templates=tuple(chat_template or ()),
        state=state,
        fresh=fresh,
        otlp_endpoint=otlp,
    )
    raise typer.Exit(up_command.run(options))


@app.command()
def demo(
    model: Annotated[str, typer.Option(metavar="MODEL", help="The model, as for `segue up`.")] = "gemma3-270m",
    echo: Annotated[bool, typer.Option("--echo", help="The same path without a model, in seconds.")] = False,
    threads: Threads = None,
    report: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For demo.json, .png and .log (with --echo: demo-echo.json, …).")
    ] = Path("reports"),
) -> None:
    """Watch a conversation survive a killed worker, token for token; fails if any claim does."""
    from cli.demo import command

    raise typer.Exit(command.run(model=model, echo=echo, threads=threads, report=report))


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
