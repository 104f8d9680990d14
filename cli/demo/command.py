"""`segue demo`: a fresh embedded cluster, the scenes, the verdict."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from pydantic import JsonValue
from rich.console import Console

from cli.demo.echo import ECHO_SETTINGS, run_echo
from cli.demo.exact import ReferenceFailedError
from cli.demo.facts import Facts, NotInTimeError
from cli.demo.record import Record, draw, write_report
from cli.demo.scenario import ScenarioFailedError, run_scenario
from cli.demo.talk import StreamBrokenError, Talker
from cli.embedded.cluster import Cluster, ClusterSpec, running
from cli.up import START_ERRORS

FAILURES = (*START_ERRORS, NotInTimeError, ReferenceFailedError, ScenarioFailedError, StreamBrokenError)
Scenes = Callable[[Cluster, Talker, Facts, Callable[[str], None]], Awaitable[Record]]


def run(*, model: str, echo: bool, threads: int | None, report: Path) -> int:
    """Exit code 0 when every claim held. Logs of the children go to `<report>/demo.log`."""
    # Without a terminal rich takes 80 columns; a file has room for whole lines.
    console = Console(stderr=True, width=None if sys.stderr.isatty() or "COLUMNS" in os.environ else 120)
    began = time.monotonic()
    report.mkdir(parents=True, exist_ok=True)
    name = "demo-echo" if echo else "demo"
    try:
        with tempfile.TemporaryDirectory(prefix="segue-demo-") as state:
            spec = ClusterSpec(
                state=Path(state),
                models=(model,),
                threads=threads,
                echo=echo,
                worker_settings=ECHO_SETTINGS if echo else {},
            )
            record = asyncio.run(_play(spec, run_echo if echo else run_scenario, report / f"{name}.log", console))
    except FAILURES as error:
        console.print(f"segue demo: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    seconds = time.monotonic() - began
    record.show(console)
    draw(record, report / f"{name}.png")
    write_report(report / f"{name}.json", _common(name, record, seconds) | record.document())
    verdict = "pass" if record.ok else "FAIL"
    console.print(f"\n{verdict} in {seconds:.0f} s; see {report / name}.json, .png and .log", soft_wrap=True)
    return 0 if record.ok else 1


async def _play(spec: ClusterSpec, scenes: Scenes, log: Path, console: Console) -> Record:
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    with log.open("w") as file:

        def sink(name: str, line: str) -> None:
            file.write(f"{time.monotonic() - began:8.3f} {name:<10} | {line}\n")
            file.flush()

        said: list[str] = []

        def progress(doing: str, _fraction: float) -> None:
            if doing not in said[-1:]:
                said.append(doing)
                say(doing)

        async with running(spec, sink, progress) as cluster:
            name = next(iter(cluster.folders))
            facts = Facts(cluster.catalog_target, cluster.router_target, name, cluster.tenant_secret)
            try:
                async with httpx.AsyncClient() as http:
                    return await scenes(cluster, Talker(cluster.base_url, name, http), facts, say)
            finally:
                await facts.aclose()


def _common(name: str, record: Record, seconds: float) -> dict[str, JsonValue]:
    """The fields every report has."""
    passed = sum(check.passed for check in record.checks)
    return {
        "name": name,
        "claim": "a conversation survives a killed worker, token for token",
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "seed": 0,
        "figure": f"{passed} of {len(record.checks)} checks",
        "limit": "all",
        "pass": record.ok,
        "seconds": round(seconds, 1),
    }


def _commit() -> str:
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return f"segue without a repository, Python {sys.version_info.major}"
    return head.stdout.strip()
