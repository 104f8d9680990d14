"""The worker's cases, each measured in one way: what a user waited, what lay where, what moved, what was computed.

A case is played on a bench for one length of history; while it plays, the pool's occupancy is sampled, and what the
counters gained is taken when all it staged is durable. A cancelled case is followed by the same request again: its
times are those of the second one, and `boundary_ms` is how long the first held its pages after the cancel.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from libs.controller.protocol import Tier
from libs.controller.worker_table import Phase
from prove import paths
from prove.p3_offer_reply import quantile
from prove.paths import History, Played
from prove.peer_server import peer_server
from prove.prose import Prose
from prove.worker_bench import Ask, Bench, fresh_salt

_MEMORY_BYTES = 512 << 20
MORE = 24
"""Tokens a next turn adds."""


@dataclass
class Case:
    """A row of the table. `exact` is filled in by the judge. Times in ms; `overlap`: share of the bytes captured while
    the request was still under way.
    """

    case: str
    history: int
    ttft_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    pages: dict[str, dict[str, int]]
    bytes_by_tier: dict[str, int]
    cached_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    evictions: dict[str, int]
    staged_bytes: int
    dropped: int
    overlap: float
    boundary_ms: float
    played: Played
    exact: bool | None = None

    def row(self) -> dict[str, JsonValue]:
        """As reported."""
        return {
            "case": self.case,
            "history": self.history,
            "ttft_ms": round(self.ttft_ms, 2),
            "itl_p50_ms": round(self.itl_p50_ms, 2),
            "itl_p99_ms": round(self.itl_p99_ms, 2),
            "pages": {group: dict[str, JsonValue](counts) for group, counts in self.pages.items()},
            "bytes_by_tier": dict[str, JsonValue](self.bytes_by_tier),
            "cached_tokens": self.cached_tokens,
            "restored_tokens": self.restored_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "evictions": dict[str, JsonValue](self.evictions),
            "staged_bytes": self.staged_bytes,
            "dropped": self.dropped,
            "overlap": self.overlap,
            "boundary_ms": round(self.boundary_ms, 2),
            "exact": self.exact,
        }


@dataclass
class Player:
    """Plays cases on `bench` (with room for all) and on `tight` (with room for a few histories)."""

    bench: Bench
    tight: Bench
    prose: Prose
    new: int
    cases: list[Case] = field(default_factory=list)

    async def all(self, history: int) -> None:
        """Every case, for one length of processed history."""
        first = await self._cold(history)
        await self._resident(history, first)
        await self._partial(history)
        await self._fork(history)
        await self._live(history)
        for phase in (Phase.PREFILLING, Phase.DECODING):
            await self._cancelled(self.bench, phase, history, lambda: self._fresh(history))
        await self.bench.restart()
        await self._restored("ssd", Tier.SSD, history, first)
        await self.bench.restart()
        await self._cancelled(self.bench, Phase.RESTORING, history, lambda: self._next(first, Tier.SSD))
        epoch = self.bench.epoch
        await self.bench.restart()
        one = first
        await self._measured(
            "restart",
            history,
            self.bench,
            lambda: paths.restarted(self.bench, one, self.prose.continuation(MORE), self.new, epoch),
        )
        origin = self.bench.chunk_dir
        await self.bench.restart(fresh_directory=True)
        await self._restored("object store", Tier.OBJECT, history, first)
        await self._peer(history, first, origin)
        await self._memory(history)
        await self._evicted(history)

    async def _cold(self, history: int) -> History:
        salt = fresh_salt()
        prompt = self.prose.prompt(history + 1 - self.new)
        played = await self._measured(
            "cold", history, self.bench, lambda: paths.cold(self.bench, prompt, self.new, salt)
        )
        return played.history(salt, await self.bench.durable(played.exchange.processed, salt))

    async def _there(self, bench: Bench, processed: int) -> History:
        """A history of its own, resident and durable."""
        salt = fresh_salt()
        played = await paths.cold(bench, self.prose.prompt(processed), 1, salt)
        return played.history(salt, await bench.durable(played.exchange.processed, salt))

    async def _resident(self, history: int, first: History) -> None:
        more = self.prose.continuation(MORE)
        await self._measured("resident", history, self.bench, lambda: paths.resident(self.bench, first, more, self.new))

    async def _partial(self, history: int) -> None:
        """The resident text goes on otherwise than the request's: it shares all of `history`, or nearly."""
        longer = await self._there(self.bench, history + (0 if history % 256 > 200 else 40))
        keep = min(history + 1, len(longer.processed) - 8)
        more = [token for token in self.prose.continuation(MORE + 4) if token != longer.tokens[keep]]
        tokens = [*longer.tokens[:keep], *more]

        async def play() -> Played:
            there = self.bench.resident(tokens[:-1], longer.salt)
            exchange = await self.bench.run(Ask(tokens, self.new, longer.salt))
            played = Played("partial", exchange, tokens, list(exchange.tokens))
            played.expect("cached tokens", exchange.usage.cached_tokens, there)
            played.require("part of it resident", 0 < there < len(longer.processed))
            return played

        await self._measured("partial", history, self.bench, play)

    async def _fork(self, history: int) -> None:
        trunk = await self._there(self.bench, history)
        mores = [self.prose.continuation(MORE) for _ in range(2)]

        async def play() -> Played:
            one, other = await paths.forked(self.bench, trunk, mores, self.new)
            other.missed += one.missed
            return other

        await self._measured("fork", history, self.bench, play)

    async def _live(self, history: int) -> None:
        """A generation long enough that its own chunks are captured while it goes on."""
        new = 256 + self.new
        prompt = self.prose.prompt(history + 1 - self.new)

        async def play() -> Played:
            return await paths.cold(self.bench, prompt, new)

        await self._measured("checkpoint under live decode", history, self.bench, play)
        case = self.cases[-1]
        case.played.require("chunks captured while it decoded", case.overlap > 0)

    async def _restored(self, name: str, tier: Tier, history: int, first: History) -> None:
        more = self.prose.continuation(MORE)
        await self._measured(name, history, self.bench, lambda: paths.restored(self.bench, first, tier, more, self.new))

    async def _peer(self, history: int, first: History, origin: Path) -> None:
        """Another worker has taken over the directory in which the history was written; this one begins with none."""
        await self.bench.restart(fresh_directory=True)
        assert self.bench.channel is not None
        async with peer_server(origin, self.bench.channel, f"peer-{fresh_salt()[:8]}") as peer:
            await self._measured(
                "peer",
                history,
                self.bench,
                lambda: paths.from_peer(self.bench, first, peer, self.prose.continuation(MORE), self.new),
            )

    async def _memory(self, history: int) -> None:
        await self.tight.restart(values={"ram_bytes": _MEMORY_BYTES})
        mine = await self._there(self.tight, history)
        await self._measured(
            "RAM",
            history,
            self.tight,
            lambda: paths.from_memory(self.tight, self.prose, mine, self.prose.continuation(MORE), self.new),
        )
        await self.tight.restart(values={"ram_bytes": 0})

    async def _evicted(self, history: int) -> None:
        mine = await self._there(self.tight, history)

        async def play() -> Played:
            return await paths.evicted(
                self.tight, self.prose, mine, self.prose.continuation(MORE), self.new, chain=True
            )

        await self._measured("eviction under pressure", history, self.tight, play)

    def _fresh(self, history: int) -> Ask:
        return Ask(self.prose.prompt(history + 1 - self.new), self.new, fresh_salt())

    def _next(self, history: History, tier: Tier) -> Ask:
        tokens = [*history.tokens, *self.prose.continuation(MORE)]
        return Ask(tokens, self.new, history.salt, chain=history.nodes, tier=tier)

    async def _cancelled(self, bench: Bench, phase: Phase, history: int, ask_of: Callable[[], Ask]) -> None:
        ask, machine = ask_of(), bench.interpreter.machine
        cut = await bench.accepted(ask)
        while machine.phase(cut.assignment) not in (phase, Phase.GONE):  # noqa: ASYNC110
            await asyncio.sleep(0.0002)
        came = machine.phase(cut.assignment) is phase
        began = time.perf_counter()
        cut.cancel()
        while machine.phase(cut.assignment) is not Phase.GONE:  # noqa: ASYNC110
            await asyncio.sleep(0.0002)
        boundary_ms = (time.perf_counter() - began) * 1e3
        faults = await bench.rest()

        async def play() -> Played:
            exchange = await bench.run(ask)
            played = Played("cancelled", exchange, list(ask.tokens), list(exchange.tokens))
            played.require(f"the cancel came while {phase.value}", came)
            played.missed += faults
            return played

        await self._measured(f"cancelled while {phase.value}", history, bench, play, boundary_ms)

    async def _measured(
        self,
        name: str,
        history: int,
        bench: Bench,
        play: Callable[[], Awaitable[Played]],
        boundary_ms: float = 0.0,
    ) -> Played:
        metrics = bench.storage.checkpointer.metrics
        staged, dropped, evictions = metrics.captured_bytes, metrics.dropped, bench.evicted()
        with _sampling(bench) as fullest:
            played = await play()
        beside = metrics.captured_bytes - staged
        faults = await bench.rest(60.0)
        played.missed += faults
        usage, gaps = played.exchange.usage, sorted(played.exchange.gaps_ms) or [0.0]
        resident = usage.cached_tokens - usage.restored_tokens
        tiers = {"gpu": resident * bench.engine.bytes_per_token}
        tiers |= {share.tier.name.lower(): share.bytes for share in usage.restored_by_tier}
        whole = metrics.captured_bytes - staged
        gained = {reason: count - evictions.get(reason, 0) for reason, count in bench.evicted().items()}
        self.cases.append(
            Case(
                case=name,
                history=history,
                ttft_ms=played.exchange.ttft_ms,
                itl_p50_ms=statistics.median(gaps),
                itl_p99_ms=quantile(gaps, 0.99),
                pages=dict(fullest),
                bytes_by_tier=tiers,
                cached_tokens=usage.cached_tokens,
                restored_tokens=usage.restored_tokens,
                recomputed_tokens=usage.computed_tokens,
                evictions={reason: count for reason, count in gained.items() if count},
                staged_bytes=whole,
                dropped=metrics.dropped - dropped,
                overlap=round(beside / whole, 3) if whole else 0.0,
                boundary_ms=boundary_ms,
                played=played,
            )
        )
        return played


@contextmanager
def _sampling(bench: Bench) -> Iterator[dict[str, dict[str, int]]]:
    """Occupancy by group, at the moment when the fewest pages were free."""
    fullest: dict[str, dict[str, int]] = {}

    def take() -> None:
        for group, pages in bench.engine.pool.pages().items():
            if group not in fullest or pages.free < fullest[group]["free"]:
                fullest[group] = {
                    "total": pages.total, "free": pages.free, "reserved": pages.reserved, "loading": pages.loading,
                    "resident": pages.resident, "evicting": pages.evicting,
                }  # fmt: skip

    async def sample() -> None:
        while True:
            take()
            await asyncio.sleep(0.005)

    take()
    task = asyncio.get_running_loop().create_task(sample())
    try:
        yield fullest
    finally:
        task.cancel()
        take()
