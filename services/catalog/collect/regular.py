"""Collections at regular intervals, by whichever replica is first.

Every replica tries, at a random moment of each interval; the lock lets one through at a time. A collection that fails
is logged and taken up at the next interval: nothing depends on its being on time.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from typing import Protocol

from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import ServiceError
from libs.service.logs import get_logger
from services.catalog.collect.collector import Collector
from services.catalog.collect.ownership import OF_ANOTHER
from services.catalog.etcd.errors import EtcdError
from services.catalog.facts.errors import CollectionRunningError
from services.catalog.store import StoreError

log = get_logger(__name__)


class Counting(Protocol):
    """Told what each report says was removed."""

    def collected(self, report: pb.CollectGarbageResponse | pb.PurgeResponse) -> None: ...


async def collect_regularly(collector: Collector, interval_s: float, counting: Counting) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(interval_s * random.uniform(0.5, 1.5))  # noqa: S311 - spread over the replicas
        began, last = time.monotonic(), pb.CollectGarbageResponse()
        try:
            async with aclosing(collector.collect(dry=False)) as progress:
                async for report in progress:
                    counting.collected(report)
                    last = report
        except CollectionRunningError:
            continue
        except (ServiceError, EtcdError, StoreError) as error:
            log.warning("collection failed", error=str(error), next_within_s=interval_s * 1.5)
            continue
        if last.bucket_of_another:
            log.warning(OF_ANOTHER)
        log.info(
            "collection",
            seconds=round(time.monotonic() - began, 1),
            chunks=last.totals.chunks_removed,
            of=last.totals.chunks_examined,
            objects=last.totals.objects_removed,
            bytes=last.totals.bytes_removed,
            waiting=last.totals.objects_waiting,
        )
