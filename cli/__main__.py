"""The `segue` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli import up as up_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Segue: open-weight language models behind an OpenAI-compatible API; no prompt is paid for twice.",
)

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="gemma3-270m, tiny, a model folder, a .gguf file or a hub id; may be repeated.  [default: gemma3-270m]",
        show_default=False,
    ),
]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Workers per model.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads of each worker.  [default: cores / workers]", show_default=False),
]
State = Annotated[Path, typer.Option(help="Directory of everything the cluster keeps.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what the state directory holds first.")]
Otlp = Annotated[str | None, typer.Option(help="OTLP/gRPC collector for traces, as http://HOST:PORT.")]


@app.command()
def up(
    model: Models = None,
    workers: Workers = 2,
    device: Device = "cpu",
    threads: Threads = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Port of the API.  [default: 8000, or any free one]", show_default=False),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Model-free workers with declared costs.")] = False,
    chat_template: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE: a chat template instead of the model's own; may be repeated.")
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
    model: Annotated[str, typer.Option(help="The model to talk to.")] = "gemma3-270m",
    echo: Annotated[bool, typer.Option("--echo", help="The same path without a model, in seconds.")] = False,
    threads: Threads = None,
    report: Annotated[Path, typer.Option(help="Directory for demo.json and demo.png.")] = Path("reports"),
) -> None:
    """Watch a conversation survive a killed worker, token for token; fails if any claim does."""
    from cli.demo import command

    raise typer.Exit(command.run(model=model, echo=echo, threads=threads, report=report))


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
