"""`segue up`: the embedded cluster on a terminal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cli.embedded.binaries import BinaryNotFoundError
from cli.embedded.children import ChildFailedError, Sink
from cli.embedded.cluster import (
    Cluster,
    ClusterSpec,
    NotStateError,
    PortTakenError,
    StateLockedError,
    clear,
    port_is_free,
    running,
)
from cli.embedded.console import PrefixedConsole
from cli.embedded.models import ModelUnavailableError
from cli.embedded.ports import NoFreePortError

DEFAULT_PORT = 8_000
START_ERRORS = (
    BinaryNotFoundError,
    ChildFailedError,
    ModelUnavailableError,
    NoFreePortError,
    NotStateError,
    PortTakenError,
    StateLockedError,
)
"""What can keep a cluster from starting; each text carries the value and the remedy."""


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    models: tuple[str, ...]
    workers: int
    device: str
    threads: int | None
    port: int | None
    echo: bool
    chat_templates: tuple[str, ...]
    state: Path
    fresh: bool
    otlp_endpoint: str | None

    def spec(self) -> ClusterSpec:
        port = self.port if self.port is not None else (DEFAULT_PORT if port_is_free(DEFAULT_PORT) else 0)
        return ClusterSpec(
            state=self.state.absolute(),
            models=self.models,
            workers=self.workers,
            device=self.device,
            threads=self.threads,
            port=port,
            echo=self.echo,
            otlp_endpoint=self.otlp_endpoint,
            chat_templates=self.chat_templates,
        )


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """One line that says what is being waited for."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


def ready_line(cluster: Cluster, model: str) -> str:
    """A command that can be pasted."""
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 64}
    return f"curl {cluster.base_url}/chat/completions -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body)}'"


def run(options: Options) -> int:
    """Until Ctrl-C or SIGTERM; returns the exit code."""
    try:
        asyncio.run(_up(options))
    except START_ERRORS as error:
        print(f"segue up: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("segue up: interrupted while starting; everything is stopped", file=sys.stderr)
        return 130
    return 0


async def _up(options: Options) -> None:
    if options.fresh:
        clear(options.state)
    console = Console(stderr=True)
    stop = asyncio.Event()
    starting = asyncio.current_task()
    ready = False

    def on_signal() -> None:
        if ready:
            stop.set()
        elif starting is not None:
            starting.cancel()

    loop = asyncio.get_running_loop()
    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, on_signal)
    sink: Sink = PrefixedConsole()
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=1.0)

        def through_bar(name: str, line: str) -> None:
            bar.stop()
            sink(name, line)
            bar.start()

        active: list[Sink] = [through_bar if console.is_terminal else sink]

        said: list[str] = []

        def progress(doing: str, fraction: float) -> None:
            bar.update(task, description=doing, completed=fraction)
            if not console.is_terminal and doing not in said[-1:]:
                said.append(doing)
                print(f"segue up: {doing}", file=sys.stderr, flush=True)

        async with running(options.spec(), lambda name, line: active[0](name, line), progress) as cluster:
            active[0] = sink
            bar.stop()
            ready = True
            name = next(iter(cluster.folders))
            print(f"\nSegue is ready: {cluster.base_url}\n\n{ready_line(cluster, name)}\n", flush=True)
            await stop.wait()
            print("segue up: stopping (workers publish what only they hold)", file=sys.stderr, flush=True)
