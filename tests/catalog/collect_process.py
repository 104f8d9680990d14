"""A process that collects and dies where it is told: one child per order, forked before gRPC is used.

Orders come as JSON lines on standard input: {"now_ms", "step", "nth", "repair"}. The child runs one collection (or one
repair) and ends itself with SIGKILL at the nth time it has done `step` ("" = never). The answer is a JSON line:
{"signal"} or {"removed"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from prometheus_client import CollectorRegistry

from services.catalog.collect.run import Step
from services.catalog.metrics import CatalogMetrics
from services.catalog.server import assemble
from services.catalog.settings import CatalogSettings


async def collect(settings: CatalogSettings, order: dict[str, Any]) -> int:
    left = order["nth"]

    async def reached(step: Step) -> None:
        nonlocal left
        if step.value == order["step"]:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    catalog = assemble(
        settings, CatalogMetrics(CollectorRegistry()), now_ms=lambda: int(order["now_ms"]), reached=reached
    )
    removed = 0
    repair = order.get("repair", False)
    async for report in catalog.collector.repair("", "", False) if repair else catalog.collector.collect(dry=False):
        removed += len(report.collected)
    return removed


def main() -> None:
    settings = CatalogSettings(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        pipe_out, pipe_in = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                removed = asyncio.run(collect(settings, json.loads(line)))
                os.write(pipe_in, str(removed).encode())
            finally:
                os._exit(0)
        os.close(pipe_in)
        with os.fdopen(pipe_out, "rb") as answer:
            removed_text = answer.read().decode()
        _, status = os.waitpid(child, 0)
        done = {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"removed": int(removed_text)}
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
