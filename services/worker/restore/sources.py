"""One object, from the cheapest source that delivers it whole; one that stalls is overtaken by the next.

Each fetch tries its sources in the order of measured cost. A source that fails, is late or has nothing is followed by
the next one at once; one that is merely slower than nearly all its reads of late (`libs.chunks.patience`) is *hedged*:
the next cheapest is asked as well, the first to deliver wins, the other is ended and what it had moved is counted.
Hedges are bounded over all fetches, reads that were ended and still run included, and have threads of their own.

Near sources (memory, disk) and far ones (peers, the object store) have threads of their own: a store that hangs cannot
hold up what lies here. The chunk directory and the host memory are asked by what lies there, not by facts alone: a fact
may be late. Whatever computation an object came from, it is as good: the receipt's own content id is only preferred. A
damaged object is put out of the way by its tier and the next source is tried. A source that failed or was overtaken
rests for a while, so that a store which hangs costs one request its wait and not every one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from libs.chunks.cost import Price
from libs.chunks.errors import (
    AbortedError,
    BusyPeerError,
    OtherObjectError,
    StaleEpochError,
    TierClosedError,
    TierError,
)
from libs.chunks.local import LocalDirectory
from libs.chunks.memory import HostMemory
from libs.chunks.object_store import ObjectStore
from libs.chunks.patience import Patience
from libs.chunks.peer import Peer
from libs.chunks.tier import Source, TierKind, Transfer, Wanted
from libs.chunks.verified import Opened, open_verified
from libs.continuation.errors import ObjectError
from services.worker.handlers import RestoreEnd
from services.worker.restore.needs import ObjectNeed
from services.worker.restore.settings import RestoreCounts, RestoreSettings

# A farther source must be clearly cheaper: a read that stays here burdens nobody, and prices of small reads are noisy.
_FARTHER = {TierKind.PEER: 2.0, TierKind.OBJECT: 4.0}
_NEAR = frozenset({TierKind.RAM, TierKind.SSD})
_HEDGE_AGAIN_S = 0.02
_GRACE_S = 0.2
"""Past its deadline, how long a read may take to end by itself before it is left to end alone."""


@dataclass(frozen=True, slots=True)
class Localized:
    """A verified object in place. `damaged`: copies of it that were found damaged on the way."""

    opened: Opened
    wanted: Wanted
    kind: TierKind
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class NotLocalized:
    """No source delivered."""

    end: RestoreEnd
    detail: str
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class Tiers:
    """What this worker can read from; None = it has no such tier. `peer_of`: the worker that claims a directory now."""

    memory: HostMemory | None
    local: LocalDirectory | None
    store: ObjectStore | None
    peer_of: Callable[[str], Peer | None] = lambda node: None

    @property
    def directory(self) -> str:
        """UUID of the chunk directory, empty if there is none."""
        return "" if self.local is None else self.local.node


class Sources:
    """Made inside the event loop that will use it."""

    def __init__(self, tiers: Tiers, settings: RestoreSettings, counts: RestoreCounts) -> None:
        self.tiers, self.counts = tiers, counts
        self.timeout_s, self._rest_s, self._hedges = settings.fetch_timeout_s, settings.rest_s, settings.hedges
        self.patience = {kind: Patience(settings.hedge_floor_ms) for kind in TierKind}
        self._resting_until: dict[str, float] = {}
        self._near = ThreadPoolExecutor(settings.fetches, thread_name_prefix="near")
        self._far = ThreadPoolExecutor(settings.fetches, thread_name_prefix="far")
        # Of their own: reads that stall may hold every other thread.
        self._hedging = ThreadPoolExecutor(max(1, settings.hedges), thread_name_prefix="hedge")
        self._extra = 0
        self._running: set[asyncio.Future[Opened]] = set()

    def pool(self, source: Source, hedge: bool) -> ThreadPoolExecutor:
        """The threads that read from it."""
        if source.kind in _NEAR:
            return self._near
        return self._hedging if hedge else self._far

    # --- resting ---

    def rests(self, source: Source) -> bool:
        """Whether it failed a moment ago."""
        return time.monotonic() < self._resting_until.get(_name(source), 0.0)

    def failed(self, source: Source) -> None:
        self._resting_until[_name(source)] = time.monotonic() + self._rest_s

    def delivered(self, source: Source) -> None:
        self._resting_until.pop(_name(source), None)

    # --- hedging ---

    def may_hedge(self) -> bool:
        return self._extra < self._hedges

    def beyond(self, more: int) -> None:
        """Reads beyond one per fetch."""
        self._extra += more
        self.counts.hedging = self._extra

    def track(self, read: asyncio.Future[Opened]) -> None:
        """Owned until it has ended, also when its fetch is over."""
        self._running.add(read)
        read.add_done_callback(self._running.discard)

    # --- order ---

    def ordered(self, need: ObjectNeed) -> list[tuple[Source, Wanted]]:
        """Where the object may be had, cheapest first."""
        tiers, found = self.tiers, list[tuple[Source, Wanted]]()
        for tier in (tiers.memory, tiers.local):
            if tier is not None:
                there = [key.content_id for key in tier.find(*need.identity)]
                preferred = [content for content in (need.durable, *need.replicas) if content in there]
                found += [(tier, need.wanted(content)) for content in dict.fromkeys([*preferred, *there])]
        found += self._peers(need)
        if tiers.store is not None and need.durable:
            found.append((tiers.store, need.wanted(need.durable)))
        if len(found) > 1:
            size = need.bytes
            found.sort(key=lambda source: source[0].meter.price().ms(size) * _FARTHER.get(source[0].kind, 1.0))
        return found

    def _peers(self, need: ObjectNeed) -> Iterable[tuple[Source, Wanted]]:
        for place in need.elsewhere:
            content, peer = place.content or need.durable, self.tiers.peer_of(place.node)
            if content and peer is not None:
                yield peer, need.wanted(content)

    def expected_ms(self, needs: Iterable[ObjectNeed]) -> float:
        """For all of these from their cheapest sources, which are read side by side; 0 where a price is a guess."""
        sizes: Counter[TierKind] = Counter()
        prices: dict[TierKind, Price] = {}
        for need in needs:
            cheapest = next(iter(self.ordered(need)), None)
            if cheapest is not None:
                source, _ = cheapest
                sizes[source.kind] += need.bytes
                prices[source.kind] = source.meter.price()
        if not all(price.samples for price in prices.values()):
            return 0.0
        return max((prices[kind].ms(size) for kind, size in sizes.items()), default=0.0)

    def close(self) -> None:
        """Blocks until every read has ended."""
        self._near.shutdown(wait=True, cancel_futures=True)
        self._far.shutdown(wait=True, cancel_futures=True)
        self._hedging.shutdown(wait=True, cancel_futures=True)

    async def settled(self) -> None:
        """Until every read that was ended has ended."""
        while self._running:
            await asyncio.wait(set(self._running))


@dataclass(slots=True, eq=False)
class _Attempt:
    source: Source
    wanted: Wanted
    transfer: Transfer
    began: float
    expected_ms: float
    hedge: bool


class Fetch:
    """One object on its way here. `end`: nobody wants it any more."""

    def __init__(self, sources: Sources, need: ObjectNeed) -> None:
        self._sources, self._need = sources, need
        self._running: dict[asyncio.Future[Opened], _Attempt] = {}
        self._active = True
        self._extra = 0
        self._ended = False
        self._errors: list[str] = []
        self._damaged, self._unavailable = 0, False

    def end(self) -> None:
        """Ends every read under way. Idempotent."""
        self._ended = True
        for attempt in self._running.values():
            attempt.transfer.set()

    async def run(self) -> Localized | NotLocalized:
        """Never raises for a fault of storage."""
        deadline = time.monotonic() + self._sources.timeout_s
        waiting = deque(self._sources.ordered(self._need))
        try:
            while not self._ended:
                if not self._running and not self._begin_next(waiting, deadline):
                    break
                won = await self._wait(waiting, deadline)
                if won is not None:
                    return won
                if time.monotonic() >= deadline + _GRACE_S:
                    self._unavailable = True
                    self._errors.append("out of time")
                    break
        finally:
            ended, self._active = self._ended, False
            self.end()
            self._balance()
        otherwise = RestoreEnd.UNAVAILABLE if self._unavailable else RestoreEnd.GONE
        end = RestoreEnd.CORRUPT if self._damaged else otherwise
        detail = "; ".join(self._errors) or ("ended" if ended else "no source has it")
        return NotLocalized(end, f"{self._need.metadata.group} of {self._need.metadata.hash}: {detail}", self._damaged)

    # --- reads ---

    def _begin_next(self, waiting: deque[tuple[Source, Wanted]], deadline: float) -> bool:
        """Begins with the next source that does not rest; False: there is none."""
        while waiting:
            source, wanted = waiting.popleft()
            if self._sources.rests(source):
                self._sources.counts.resting += 1
                self._unavailable = True
                self._errors.append(f"{_name(source)} rests after a failure")
                continue
            within = max(0.001, deadline - time.monotonic())
            expected_ms = source.meter.price().ms(self._need.bytes)
            attempt = _Attempt(source, wanted, Transfer(), time.monotonic(), expected_ms, bool(self._running))
            read = asyncio.get_running_loop().run_in_executor(
                self._sources.pool(source, attempt.hedge), _read, source, wanted, within, attempt.transfer
            )
            self._running[read] = attempt
            self._sources.track(read)
            self._balance()
            return True
        return False

    async def _wait(self, waiting: deque[tuple[Source, Wanted]], deadline: float) -> Localized | None:
        """Until a read has ended, or is late and another has begun, or the time is over."""
        now = time.monotonic()
        left = deadline + _GRACE_S - now
        newest = next(reversed(self._running.values()))
        due = newest.began + self._sources.patience[newest.source.kind].delay_ms(newest.expected_ms) / 1e3 - now
        # A hedge that is due and may not begin yet is tried again soon.
        pause = min(left, due if due > 0 else _HEDGE_AGAIN_S) if waiting and not self._ended else left
        if waiting and due <= 0 and not self._ended and self._sources.may_hedge():
            if self._begin_next(waiting, deadline):
                self._sources.counts.hedged += 1
            return None
        done, _ = await asyncio.wait(self._running, timeout=max(0.0, pause), return_when=asyncio.FIRST_COMPLETED)
        won: Localized | None = None
        for read in done:
            attempt = self._running.pop(read)
            found = self._result(read, attempt)
            if found is not None and won is None and not self._ended:
                won = Localized(found, attempt.wanted, attempt.source.kind, self._damaged)
                self._overtaken(attempt)
            elif found is not None:
                self._sources.counts.ended_reads += 1
                self._sources.counts.ended_bytes += attempt.transfer.moved
                found.release()
        self._balance()
        return won

    def _overtaken(self, winner: _Attempt) -> None:
        """The sources that were asked before the winner and still read have stalled: they rest."""
        if winner.hedge:
            self._sources.counts.hedges_won += 1
            for attempt in self._running.values():
                if attempt.began < winner.began:
                    self._sources.failed(attempt.source)

    def _result(self, read: asyncio.Future[Opened], attempt: _Attempt) -> Opened | None:
        """What it delivered, or None after the fault has been noted."""
        source, name = attempt.source, _name(attempt.source)
        try:
            opened = read.result()
        except (ObjectError, OtherObjectError) as error:
            self._damaged += 1
            self._errors.append(f"{name}: {error}")
        except TierError as error:
            self._errors.append(f"{name}: {error}")
            if not error.absent:
                self._unavailable = True
                if not isinstance(error, AbortedError | BusyPeerError | StaleEpochError | TierClosedError):
                    self._sources.failed(source)
        else:
            self._sources.delivered(source)
            if opened.fresh:
                took_ms = (time.monotonic() - attempt.began) * 1e3
                self._sources.patience[source.kind].observe(attempt.expected_ms, took_ms)
            return opened
        return None

    def _balance(self) -> None:
        """Once the fetch is over, what still runs is left to end alone."""
        if not self._active:
            for read, attempt in self._running.items():
                read.add_done_callback(partial(self._lost, attempt))
            self._set_extra(len(self._running))
        else:
            self._set_extra(max(0, len(self._running) - 1))

    def _set_extra(self, count: int) -> None:
        self._sources.beyond(count - self._extra)
        self._extra = count

    def _lost(self, attempt: _Attempt, read: asyncio.Future[Opened]) -> None:
        """A read that was ended has ended."""
        counts = self._sources.counts
        counts.ended_reads += 1
        counts.ended_bytes += attempt.transfer.moved
        self._set_extra(self._extra - 1)
        if read.cancelled():
            return
        if read.exception() is None:
            read.result().release()


def _read(source: Source, wanted: Wanted, within: float, transfer: Transfer) -> Opened:
    return open_verified(source, wanted, within=within, abort=transfer)


def _name(source: Source) -> str:
    return f"peer {source.address}" if isinstance(source, Peer) else source.kind.value
