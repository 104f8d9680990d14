"""Host memory in heartbeats: beside the pages, as changes, and a snapshot for both when either needs one."""

from __future__ import annotations

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

    def since(self, version: int | None) -> MemoryChanges:
        self.asked.append(version)
        return self.said.pop(0)


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
