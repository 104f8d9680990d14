"""The tiny model, once, and a worker of it that keeps no chunks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prove.worker_bench import Bench
from services.worker.model.tiny import write_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(made)
    return made


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[Bench]:
    async with Bench(folder, {"kv_bytes": 16 << 20, "lanes": 4}) as running:
        yield running
