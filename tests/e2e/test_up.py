"""`segue up` as people run it: a process on a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from prove.processes import alive, descendants, finished, started

READY_WITHIN_S = 60.0
SERVICES = ("catalog", "router", "ingress", "worker")


def up_argv(state: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "cli", "up", "--echo", "--state", str(state), *flags]


@dataclass
class Up:
    """A `segue up` that has said it is ready."""

    process: asyncio.subprocess.Process
    curl: str
    base_url: str
    said: list[str] = field(default_factory=list)

    def children(self) -> dict[int, str]:
        return descendants(self.process.pid)

    def child(self, service: str) -> list[int]:
        return [pid for pid, command in self.children().items() if f"services.{service}" in command]


@asynccontextmanager
async def up(state: Path, *flags: str) -> AsyncIterator[Up]:
    async with started(up_argv(state, *flags)) as process:
        assert process.stdout is not None and process.stderr is not None
        said: list[str] = []
        tasks = [asyncio.create_task(_collect(stream, said)) for stream in (process.stdout, process.stderr)]
        try:
            began = time.monotonic()
            while (ready := re.search(r"curl (\S+/v1)/chat/completions .*\\\n  -d '.*'", "".join(said))) is None:
                assert process.returncode is None and time.monotonic() - began < READY_WITHIN_S, "".join(said)
                await asyncio.sleep(0.05)
            yield Up(process, ready.group(), ready.group(1), said)
        finally:
            for task in tasks:
                task.cancel()


async def _collect(stream: asyncio.StreamReader, said: list[str]) -> None:
    async for line in stream:
        said.append(line.decode(errors="replace"))  # noqa: PERF401 - read while it grows


async def test_up_from_its_ready_line_to_ctrl_c(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with up(state, "--port", "0") as cluster, httpx.AsyncClient() as http:
        # What is printed works at once, as it stands.
        chat = await finished(["bash", "-c", cluster.curl.replace("curl", "curl -sS", 1)], 20)
        answer = json.loads(chat.stdout)
        assert chat.code == 0 and answer["choices"][0]["message"]["content"], chat.output
        listed = (await http.get(cluster.base_url + "/models")).json()["data"]
        assert [model["id"] for model in listed] == ["echo"], "ready means that the model is served and listed"
        for service in SERVICES:
            assert len(cluster.child(service)) == (2 if service == "worker" else 1), cluster.children()

        second = await finished(up_argv(state, "--port", "0"), 20)
        assert second.code == 1 and str(state) in second.stderr and "--state" in second.stderr
        port = cluster.base_url.rpartition(":")[2].removesuffix("/v1")
        third = await finished(up_argv(tmp_path / "another", "--port", port), 20)
        assert third.code == 1 and f"port {port} is in use" in third.stderr and "--port" in third.stderr

        killed = cluster.child("worker")[0]
        os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        while len(set(cluster.child("worker")) - {killed}) < 2 or not await _answers(http, cluster.base_url):
            assert time.monotonic() - began < 20, "the killed worker did not come back"
            await asyncio.sleep(0.1)
        assert any("starting it again" in line for line in cluster.said)
        killed = cluster.child("ingress")[0]
        os.kill(killed, signal.SIGKILL)
        while cluster.child("ingress") in ([], [killed]) or not await _answers(http, cluster.base_url):
            assert time.monotonic() - began < 40, "the killed ingress did not come back at its address"
            await asyncio.sleep(0.1)

        below = cluster.children()
        os.killpg(cluster.process.pid, signal.SIGINT)
        async with asyncio.timeout(30):
            code = await cluster.process.wait()
        assert code == 0, "".join(cluster.said)[-2_000:]
        assert len(below) >= 7 and not [command for pid, command in below.items() if alive(pid)]


async def _answers(http: httpx.AsyncClient, base_url: str) -> bool:
    body = {"model": "echo", "prompt": "hello", "max_tokens": 4}
    try:
        return (await http.post(base_url + "/completions", json=body, timeout=5)).status_code == 200
    except httpx.HTTPError:
        return False


async def test_ctrl_c_while_it_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    async with started(up_argv(tmp_path / "state", "--port", "0")) as process:
        began, below = time.monotonic(), {}
        while not any("services." in command for command in below.values()):
            assert process.returncode is None and time.monotonic() - began < 30
            await asyncio.sleep(0.02)
            below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        async with asyncio.timeout(30):
            _, err = await process.communicate()
        assert process.returncode == 130 and b"interrupted" in err and b"Traceback" not in err, err.decode()
        assert not [command for pid, command in below.items() if alive(pid)]


async def test_a_demo_without_a_model_takes_seconds(tmp_path: Path) -> None:
    """That it passes, and in time, is the slice of the claim 2-demo; here, that its exit code tells failure apart."""
    broken = await finished(
        [sys.executable, "-m", "cli", "demo", "--model", str(tmp_path / "none"), "--report", str(tmp_path)], 30
    )
    assert broken.code == 1 and "no such file or folder" in " ".join(broken.stderr.split())
    assert not any(path.suffix == ".json" for path in Path(tmp_path).iterdir())  # noqa: ASYNC240
