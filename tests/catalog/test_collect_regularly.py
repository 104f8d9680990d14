"""Collections by themselves: again after failures of every kind, and never two at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.regular import collect_regularly
from services.catalog.etcd.errors import EtcdUnavailableError
from services.catalog.facts.errors import CollectionLostError, CollectionRunningError
from services.catalog.store import StoreUnavailableError
from tests.catalog.rig import until

FAILURES = [
    CollectionRunningError("another"),
    EtcdUnavailableError("etcd:1", "away"),
    StoreUnavailableError("s3:1", "away"),
    CollectionLostError("its lease expired"),
]


class Collecting:
    """A collector that fails as often as it has failures, and what was counted."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = list(failures)
        self.runs = self.running = self.counted = 0

    async def collect(self, dry: bool) -> AsyncGenerator[pb.CollectGarbageResponse]:
        assert not dry and self.running == 0
        self.running += 1
        try:
            self.runs += 1
            yield pb.CollectGarbageResponse(collected=[pb.Collected(reason=pb.COLLECT_REASON_IDLE)])
            if self.failures:
                raise self.failures.pop(0)
        finally:
            self.running -= 1

    def collected(self, report: pb.CollectGarbageResponse | pb.PurgeResponse) -> None:
        self.counted += len(report.collected)


async def test_it_goes_on_after_every_failure_and_ends_when_cancelled() -> None:
    collecting = Collecting(FAILURES)
    task = asyncio.create_task(collect_regularly(collecting, 0.01, collecting))  # type: ignore[arg-type]
    await until(lambda: collecting.runs > len(FAILURES) + 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert collecting.counted >= collecting.runs - 1 and collecting.running == 0


async def test_a_bug_is_not_hidden() -> None:
    collecting = Collecting([KeyError("bug")])
    with pytest.raises(KeyError):
        async with asyncio.timeout(20):
            await collect_regularly(collecting, 0.01, collecting)  # type: ignore[arg-type]
