"""Host memory in heartbeats: beside the pages, as changes, and a snapshot for both when either needs one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from libs.controller.protocol import Gone, Tier
from services.worker.assembly import Unstored
from services.worker.handlers import InMemory, MemoryChanges
from tests.worker.rig import running

FINGERPRINT = "ab" * 32


@dataclass
class Scripted:
    """A journal that says what it is told to."""

    said: list[MemoryChanges]
    asked: list[int | None] = field(default_factory=list)
    came: Callable[[], None] = lambda: None

    def since(self, version: int | None) -> MemoryChanges:
        self.asked.append(version)
        return self.said.pop(0)

    def listen(self, came: Callable[[], None]) -> None:
        self.came = came


async def test_memory_travels_beside_the_pages() -> None:
    whole, part = InMemory(256, FINGERPRINT, ()), InMemory(512, FINGERPRINT, ("full",))
    journal = Scripted(
        [
            MemoryChanges(3, {"aa": whole}, (), snapshot=True),
            MemoryChanges(5, {"bb": part}, ("aa",), snapshot=False),
            # The journal no longer reaches back: a snapshot, although the pages' does.
            MemoryChanges(9, {"bb": whole}, (), snapshot=True),
        ]
    )

    def handlers(pool):
        made = Unstored(pool)
        made.memory = journal
        return made

    async with running(handlers) as worker:
        observer, interpreter = worker.worker.observer, worker.worker.interpreter
        first, told = observer.heartbeat(interpreter, 1, None)
        assert first.snapshot and [(r.hash, r.end, r.tier, r.groups) for r in first.resident] == [
            ("aa", 256, Tier.RAM, ())
        ]
        second, told = observer.heartbeat(interpreter, 2, told)
        assert not second.snapshot and second.gone == (Gone("aa", Tier.RAM),)
        assert [(r.hash, r.groups) for r in second.resident] == [("bb", ("full",))]
        third, told = observer.heartbeat(interpreter, 3, told)
        assert third.snapshot and [(r.hash, r.groups) for r in third.resident] == [("bb", ())]
        assert journal.asked == [None, 3, 5] and told.memory == 9


async def test_what_comes_into_memory_is_told_soon() -> None:
    """Requests may be held at routers until it can be fetched."""
    journal = Scripted([])

    def handlers(pool):
        made = Unstored(pool)
        made.memory = journal
        return made

    async with running(handlers) as worker:
        hurried = asyncio.Event()
        worker.worker.heartbeats.hurry = hurried.set
        await asyncio.to_thread(journal.came)
        async with asyncio.timeout(5):
            await hurried.wait()
