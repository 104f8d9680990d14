"""Whether a cluster is whole, and whether it holds anything that nobody uses."""

from __future__ import annotations

import asyncio
import time

from cli.demo.facts import describe
from prove.stage import Stage


async def whole(stage: Stage, within: float = 60.0) -> None:
    """Waits until every worker is ready and the router hears the process that runs now."""
    began = time.monotonic()
    for worker in stage.cluster.workers.values():
        await worker.child.wait_ready(within)
        epoch = (await describe(worker.target)).endpoint.epoch
        await stage.facts.worker_heard(worker.name, newer_than=epoch - 1, within=within - (time.monotonic() - began))


async def held(stage: Stage) -> list[str]:
    """What the workers hold for somebody now, in words; empty if nothing."""
    found = []
    for worker in stage.cluster.workers.values():
        said = await describe(worker.target)
        found += [f"{worker.name}: assignment {one.request_id} attempt {one.attempt}" for one in said.assignments]
        for group, pages in said.pages.items():
            found += [f"{worker.name}: {n} pages of {group} {what}" for what, n in _in_use(pages).items() if n]
    return found


def _in_use(pages: object) -> dict[str, int]:
    return {state: getattr(pages, state) for state in ("reserved", "loading")}


async def nothing_held(stage: Stage, within: float = 5.0) -> None:
    """AssertionError with what is still held after `within` seconds: an end takes effect at the next boundary."""
    began = time.monotonic()
    while found := await held(stage):
        assert time.monotonic() - began < within, f"still held after {within:g} s: {found}"
        await asyncio.sleep(0.02)
