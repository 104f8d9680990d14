"""A real catalog, and workers as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli.embedded.ports import free_ports

if TYPE_CHECKING:
    from cli.embedded.etcd import EtcdServer
    from cli.embedded.seaweed import SeaweedServer


@dataclass
class Process:
    """A service process whose output is kept. `settings` by name, as its environment has them."""

    service: str
    settings: dict[str, str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    popen: subprocess.Popen[str] | None = None

    def start(self) -> Process:
        if self.service == "catalog":
            pytest.importorskip("aetcd", reason="needs the catalog's extra")
        env = {key: value for key, value in os.environ.items() if not key.startswith("SEGUE_")}
        prefix = f"SEGUE_{self.service.upper()}_"
        env |= {prefix + key.upper(): value for key, value in self.settings.items()} | {"OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", f"services.{self.service}"], env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self.popen,), daemon=True).start()
        return self

    def _read(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        self.lines.extend([])
        for line in popen.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def target(self) -> str:
        return self.settings["listen"]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.settings['metrics_listen']}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_ready(self, within: float = 30.0) -> Process:
        give_up = time.monotonic() + within
        while not self.ready():
            assert self.popen is not None
            if self.popen.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"{self.service} is not ready ({self.popen.poll()}):\n{self.output}")
            time.sleep(0.02)
        return self

    async def until_ready(self, within: float = 30.0) -> Process:
        return await asyncio.to_thread(self.wait_ready, within)

    def wait(self, within: float = 20.0) -> int:
        assert self.popen is not None
        return self.popen.wait(within)

    def kill(self, which: signal.Signals = signal.SIGKILL) -> None:
        assert self.popen is not None
        self.popen.send_signal(which)

    def stop(self) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait(10)


def listening(settings: dict[str, str]) -> dict[str, str]:
    one, two = free_ports(2)
    return {"listen": f"127.0.0.1:{one}", "metrics_listen": f"127.0.0.1:{two}", "uvloop": "false", **settings}


@pytest.fixture(scope="session")
def s3_settings(s3_server: SeaweedServer) -> dict[str, str]:
    return {
        "s3_endpoint": s3_server.url,
        "s3_bucket": s3_server.bucket,
        "s3_access_key": s3_server.access_key,
        "s3_secret_key": s3_server.secret_key,
    }


def catalog_process(etcd: str, s3: dict[str, str], ttl_s: int = 2) -> Process:
    prefix = f"worker-tests-{uuid.uuid4().hex}/"
    return Process(
        "catalog", listening({"etcd_endpoint": etcd, "etcd_prefix": prefix, "lease_ttl_s": str(ttl_s), **s3})
    )


@pytest.fixture(scope="session")
def catalog(etcd_server: EtcdServer, s3_settings: dict[str, str]) -> Iterator[Process]:
    """A running catalog with a short lease, for tests that leave it alone."""
    process = catalog_process(etcd_server.endpoint, s3_settings).start().wait_ready()
    yield process
    process.stop()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Whatever is put in here is gone after the test."""
    started: list[Process] = []
    yield started
    for process in reversed(started):
        process.stop()


def worker_process(catalog: Process, **settings: str) -> Process:
    given = {"worker": f"w-{uuid.uuid4().hex[:8]}", "catalog": catalog.target, "echo": "true", "startup_wait_s": "5"}
    return Process("worker", listening({**given, **settings}))


def said(process: Process) -> dict[str, object]:
    """The one JSON object a process printed."""
    found: dict[str, object] = json.loads(process.output)
    return found
