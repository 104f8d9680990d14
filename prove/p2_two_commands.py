"""Two commands from nothing: `make up` and a curl chat that answers; `make test`, green. And how long each takes.

The repository's last commit is cloned into an empty directory; HOME and the caches are empty too. What is kept of the
environment is PATH without any virtual environment, and what tells pip of this machine's network. As a slice: the ready
line's command answers on a running cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cli.up import ready_line
from prove.checks import Checks
from prove.processes import alive, descendants, finished, started
from prove.report import ROOT, Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "2-two-commands", "from an empty clone and an empty cache, make up answers a curl chat and make test is green"
)
_UP_WITHIN_S = 3_600.0
_TEST_WITHIN_S = 3_600.0
_CURL_WITHIN_S = 120.0
_READY = re.compile(r"^curl \S+/v1/chat/completions .*\\\n {2}-d '.*'$", re.MULTILINE)
_KEPT = (
    "PIP_",
    "SSL_",
    "REQUESTS_CA",
    "CURL_CA",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    if stage is not None:
        checks = Checks()
        await _answers(checks, "the ready line's command", ready_line(stage.cluster, stage.model), dict(os.environ))
        return checks.outcome()
    with tempfile.TemporaryDirectory(prefix="segue-clone-") as folder:
        return await _from_nothing(Path(folder))


async def _from_nothing(folder: Path) -> Outcome:
    checks, seconds = Checks(), {}
    clone, home = folder / "segue", folder / "home"
    home.mkdir()
    env = _environment(home)
    cloned = await finished(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], 120, env=env)
    if not checks.equal("git clone", cloned.code, 0):
        return checks.outcome({"said": cloned.output[-2_000:]})
    for turn in ("first", "second"):
        async with _up(clone, env) as (curl, took):
            seconds[f"up, {turn}"] = took
            await _answers(checks, f"make up, {turn}: its curl line", curl, env)
    for turn in ("first", "second"):
        tested = await finished(["make", "test"], _TEST_WITHIN_S, env=env, cwd=clone)
        seconds[f"test, {turn}"] = round(tested.seconds, 1)
        if not checks.check(f"make test, {turn}", tested.last_line, "green", tested.code == 0):
            return checks.outcome({"seconds": seconds, "said": tested.output[-4_000:].splitlines()})
    return checks.outcome({"seconds": seconds, "cores": os.cpu_count()})


def _environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    venv = str(Path(sys.prefix) / "bin")
    path = os.pathsep.join(part for part in os.environ.get("PATH", "").split(os.pathsep) if part != venv)
    python = str(Path(sys.executable).resolve())  # the interpreter itself, not a virtual environment's
    caches = {"XDG_CACHE_HOME": str(home / ".cache"), "TMPDIR": tempfile.gettempdir()}
    return kept | caches | {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "PYTHON": python}


@asynccontextmanager
async def _up(clone: Path, env: dict[str, str]) -> AsyncIterator[tuple[str, float]]:
    """`make up` until its ready line; yields the line's command and the seconds it took. Ctrl-C ends it."""
    began = time.monotonic()
    async with started(["make", "up"], env=env, cwd=clone) as process:
        assert process.stdout is not None and process.stderr is not None
        noise: list[str] = []
        listening = asyncio.create_task(_drain(process.stderr, noise))
        try:
            said = ""
            async with asyncio.timeout(_UP_WITHIN_S):
                while not (found := _READY.search(said)):
                    line = await process.stdout.readline()
                    if not line:
                        raise RuntimeError("make up ended early:\n" + "".join(noise)[-4_000:])
                    said += line.decode(errors="replace")
            drained = asyncio.create_task(_drain(process.stdout, noise))
            yield found.group(), round(time.monotonic() - began, 1)
            below = descendants(process.pid)
            os.killpg(process.pid, signal.SIGINT)
            async with asyncio.timeout(90):
                await process.wait()
            await drained
            left = [command for pid, command in below.items() if alive(pid)]
            if left:
                raise RuntimeError(f"left behind by Ctrl-C: {left}")
        finally:
            listening.cancel()


async def _drain(stream: asyncio.StreamReader, into: list[str]) -> None:
    async for line in stream:
        into.append(line.decode(errors="replace"))  # noqa: PERF401 - whoever waits reads what has come so far


async def _answers(checks: Checks, name: str, curl: str, env: dict[str, str]) -> None:
    said = await finished(["bash", "-c", curl.replace("curl ", "curl -sS ", 1)], _CURL_WITHIN_S, env=env)
    if not checks.equal(f"{name}: exit code", said.code, 0):
        return
    answer = json.loads(said.stdout)
    text = answer["choices"][0]["message"]["content"] if "choices" in answer else ""
    checks.check(f"{name}: answers", text[:200] or said.stdout[:500], "text", bool(text.strip()))
