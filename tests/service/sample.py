"""A service for the tests, run as a process of its own: `python -m tests.service.sample --help`.

It speaks the health service alone and says on stdout what it lives through, one word a line. SAMPLE_FAULT plants a
fault.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from libs.service.errors import StartError
from libs.service.lifecycle import Service, main
from libs.service.settings import ServiceSettings


class SampleSettings(ServiceSettings):
    """A service without work."""

    service: ClassVar[str] = "sample"


@dataclass
class Counters:
    seen: int = field(default=0, metadata={"help": "Requests seen"})


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


@asynccontextmanager
async def resource(name: str) -> AsyncIterator[None]:
    say(f"open-{name}")
    try:
        yield
    finally:
        say(f"close-{name}")


async def background(fault: str) -> None:
    try:
        if fault == "crash":
            raise ValueError("planted")
        await asyncio.Event().wait()
    finally:
        say("task-end")


def register(_servicer: object, _server: object) -> None:
    """Only a name for health: there is no method to serve."""


async def build(settings: SampleSettings, service: Service) -> None:
    fault = os.environ.get("SAMPLE_FAULT", "")
    await service.enter(resource("first"))
    await service.enter(resource("second"))
    service.metrics.export("", Counters(seen=3))

    async def drain(within: float) -> None:
        say(f"drain-{within:.0f}")
        if fault == "stuck-drain":
            await asyncio.Event().wait()
        say("drained")

    service.on_drain(drain)
    service.add(None, register, "test.Sample")
    port = await service.start()
    say(f"port-{port}")
    if fault == "start-error":
        raise StartError("no coffee", remedy="make some")
    if fault == "not-ready":
        await service.set_ready("no tea yet")
    if fault == "slow-start":
        await asyncio.Event().wait()
    service.spawn(background(fault), "sample work")
    say(f"metrics-{service.metrics.port}")


if __name__ == "__main__":
    main(SampleSettings, build)
