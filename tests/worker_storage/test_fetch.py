"""One object from several sources that do anything at all: right bytes or none, in bounded time, nothing left held."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.chunks.cost import CostMeter, Price
from libs.chunks.errors import AbortedError, MissingObjectError, SlowTierError, UnreachableError
from libs.chunks.tier import MemoryHeld, TierKind, Transfer
from services.worker.handlers import GroupPages, RestoreEnd
from services.worker.restore.needs import ObjectNeed
from services.worker.restore.settings import RestoreCounts, RestoreSettings
from services.worker.restore.sources import Fetch, Localized, Sources, Tiers
from tests.catalog.rig import until
from tests.chunks.samples import sample

ENCODED, WANTED = sample(1)
GOOD = ENCODED.to_bytes()
NEED = ObjectNeed(
    WANTED.metadata, WANTED.group, tuple(WANTED.tokens), GroupPages(WANTED.group.name, 0, 256, tuple(range(16))),
    WANTED.content, (),
)  # fmt: skip
KINDS = [TierKind.RAM, TierKind.SSD, TierKind.PEER, TierKind.OBJECT]


class Counted(MemoryHeld):
    """Bytes whose release is noted."""

    def __init__(self, source: Scripted, data: bytes) -> None:
        super().__init__(memoryview(bytearray(data)))
        self._source, self._once = source, False

    def release(self) -> None:
        if not self._once:
            self._once = True
            with self._source.lock:
                self._source.held -= 1


@dataclass(eq=False)
class Scripted:
    """Does what it says: good, missing, damaged, failed, or stalls until it is ended or out of time."""

    kind: TierKind
    does: str
    after_s: float = 0.0
    held: int = 0
    asked: int = 0
    rejected: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    meter: CostMeter = field(default_factory=lambda: CostMeter(Price(1.0, 1e6)))

    def get(self, key, size, *, within, abort: Transfer | None = None):
        self.asked += 1
        assert abort is not None
        ended = abort.wait(min(within, 60.0 if self.does == "stall" else self.after_s))
        if ended:
            raise AbortedError("ended", remedy="")
        match self.does:
            case "stall":
                raise SlowTierError("silent", remedy="")
            case "missing":
                raise MissingObjectError("missing", remedy="")
            case "failed":
                raise UnreachableError("failed", remedy="")
        abort.came(len(GOOD))
        with self.lock:
            self.held += 1
        data = bytearray(GOOD)
        if self.does == "damaged":
            data[len(data) // 2] ^= 1
        return Counted(self, bytes(data))

    def reject(self, key, error) -> None:
        self.rejected += 1


def fetching(sources: list[Scripted], **changes: object) -> tuple[Sources, RestoreCounts]:
    counts = RestoreCounts()
    made = Sources(Tiers(None, None, None), RestoreSettings(**changes), counts)  # type: ignore[arg-type]
    made.ordered = lambda need: [(source, WANTED) for source in sources]  # type: ignore[method-assign]
    return made, counts


async def ended(made: Sources) -> None:
    await made.settled()
    await asyncio.sleep(0)
    made.close()


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.sampled_from(["good", "missing", "damaged", "failed", "stall"]),
            st.sampled_from([0.0, 0.004, 0.02]),
        ),
        max_size=4,
        # As on a worker: one source of a kind, or the second would rest because the first has failed.
        unique_by=lambda one: one[0],
    ),
    hedges=st.integers(0, 2),
)
def test_whatever_the_sources_do(script, hedges) -> None:
    async def run() -> None:
        sources = [Scripted(*one) for one in script]
        made, counts = fetching(sources, fetch_timeout_s=0.25, hedges=hedges, hedge_floor_ms=5.0)
        started = time.monotonic()
        found = await Fetch(made, NEED).run()
        assert time.monotonic() - started < 5.0
        if isinstance(found, Localized):
            assert bytes(found.opened.view.data) == GOOD
            assert sum(source.held for source in sources if source.does == "good") >= 1
            found.opened.release()
        else:
            damaged = any(source.does == "damaged" and source.rejected for source in sources)
            late = any(source.does in ("failed", "stall") and source.asked for source in sources)
            assert found.end is (RestoreEnd.CORRUPT if damaged else RestoreEnd.UNAVAILABLE if late else RestoreEnd.GONE)
            # A good source is missed only behind one that stalls, where no hedge may begin.
            stalls = [source.does for source in sources].index("stall") if late and "stall" in [
                source.does for source in sources
            ] else len(sources)  # fmt: skip
            assert all(source.does != "good" for source in sources[:stalls])
            if hedges and not any(source.does == "stall" for source in sources[:-1]):
                assert all(source.does != "good" for source in sources)
        await ended(made)
        assert all(source.held == 0 for source in sources) and counts.hedging == 0
        assert counts.hedges_won <= counts.hedged

    asyncio.run(run())


@pytest.mark.parametrize("hedges", [1, 2])
async def test_a_stall_is_overtaken_and_what_it_moved_is_counted(hedges) -> None:
    slow, quick = Scripted(TierKind.PEER, "stall"), Scripted(TierKind.OBJECT, "good")
    made, counts = fetching([slow, quick], fetch_timeout_s=30.0, hedges=hedges)
    found = await Fetch(made, NEED).run()
    assert isinstance(found, Localized) and found.kind is TierKind.OBJECT
    assert (counts.hedged, counts.hedges_won) == (1, 1)
    found.opened.release()
    await ended(made)
    assert counts.ended_reads == 1 and counts.ended_bytes == 0 and made.rests(slow) and not made.rests(quick)


async def test_both_deliver_and_one_is_released() -> None:
    """The one that was late comes after all, before it could be ended."""
    late = Scripted(TierKind.SSD, "good", after_s=0.1)
    quick = Scripted(TierKind.OBJECT, "good", after_s=0.05)
    made, counts = fetching([late, quick], fetch_timeout_s=30.0, hedge_floor_ms=5.0)
    found = await Fetch(made, NEED).run()
    assert isinstance(found, Localized)
    found.opened.release()
    await ended(made)
    assert late.held == quick.held == 0 and counts.ended_reads == 1


async def test_without_a_hedge_it_waits() -> None:
    slow, quick = Scripted(TierKind.PEER, "good", after_s=0.2), Scripted(TierKind.OBJECT, "good")
    made, counts = fetching([slow, quick], hedges=0, hedge_floor_ms=1.0)
    found = await Fetch(made, NEED).run()
    assert isinstance(found, Localized) and found.kind is TierKind.PEER and quick.asked == counts.hedged == 0
    found.opened.release()
    await ended(made)


async def test_nobody_wants_it_any_more() -> None:
    made, counts = fetching([Scripted(TierKind.PEER, "stall"), Scripted(TierKind.OBJECT, "stall")], hedge_floor_ms=5.0)
    fetch = Fetch(made, NEED)
    running = asyncio.create_task(fetch.run())
    await until(lambda: counts.hedged > 0)
    fetch.end()
    found = await asyncio.wait_for(running, 5)
    assert not isinstance(found, Localized)
    await ended(made)
    assert counts.hedging == 0


async def test_a_hedge_that_begins_beyond_the_bound_would_be_seen() -> None:
    """Planted: with the bound ignored, more than `hedges` reads run at a time."""

    async def most(ignore: bool) -> int:
        made, _ = fetching(
            [Scripted(TierKind.PEER, "stall"), Scripted(TierKind.OBJECT, "stall")], hedge_floor_ms=5.0, hedges=1,
            fetch_timeout_s=0.3, fetches=8,
        )  # fmt: skip
        if ignore:
            made.may_hedge = lambda: True  # type: ignore[method-assign]
        seen = 0
        fetches = [asyncio.create_task(Fetch(made, NEED).run()) for _ in range(4)]
        give_up = time.monotonic() + 0.2
        while time.monotonic() < give_up:
            seen = max(seen, made._extra)
            await asyncio.sleep(0.002)
        await asyncio.gather(*fetches)
        await ended(made)
        return seen

    assert await most(ignore=False) == 1 and await most(ignore=True) > 1
