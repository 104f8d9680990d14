"""One real cluster on the tiny model for all end-to-end tests.

After each test that played on it, it must be whole again and must hold nothing: every worker back and heard,
no assignment under way, no page reserved or loading.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prove.stage import UNHURRIED, Stage, staged
from tests.e2e.leaks import nothing_held, whole
from tests.e2e.oracle import Oracle
from tests.e2e.oracle import oracle as reference


class Log:
    """What every child of a cluster has said, for the moment a test fails."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self.path = path

    def __call__(self, name: str, line: str) -> None:
        self._file.write(f"{name:<10} | {line}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


# No fact is waited for in vain for a machine that is busy with other things.
ROUTERS = {"lookup_budget_ms": "2000"}
# In steps as short a prompt token of this model costs so much that hardly a restore looks dearer than computing anew.
WORKERS = {**UNHURRIED, "step_tokens": "16"}


@pytest.fixture(scope="session")
async def tiny_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("tiny-cluster")
    log = Log(folder / "children.log")
    try:
        async with staged(
            "tiny", state=folder / "state", threads=1, worker_settings=WORKERS, router_settings=ROUTERS, sink=log
        ) as stage:
            yield stage
    finally:
        log.close()


@pytest.fixture
async def fresh() -> AsyncIterator[Stage]:
    """A cluster that has learned no prices from what was played on it, as a test of each tier needs it."""
    async with staged("tiny", threads=1, worker_settings=WORKERS, router_settings=ROUTERS) as stage:
        yield stage
        await whole(stage)
        await nothing_held(stage)


@pytest.fixture(scope="session")
async def oracle(tiny_cluster: Stage) -> AsyncIterator[Oracle]:
    async with reference(tiny_cluster.folder) as running:
        yield running


@pytest.fixture
async def stage(tiny_cluster: Stage) -> AsyncIterator[Stage]:
    """The tiny cluster, whole before and after, with nothing held after."""
    await whole(tiny_cluster)
    yield tiny_cluster
    await whole(tiny_cluster)
    await nothing_held(tiny_cluster)
