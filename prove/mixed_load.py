"""A mixed live load: conversations that begin, go on and fork, picked by how long ago they were last used.

Device pages, host memory and the chunk directory each hold the most recent of them, each more than the last; all are in
the object store. So a turn finds its history in any tier, or on another worker. So many clients at a time, each with
one request under way, or reading its answer.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass, field

import httpx

from prove.processors import Processors
from prove.prose import Prose
from prove.stage import Stage
from prove.streams import stream

_COLD, _FORKS = 0.25, 0.3
"""Shares of requests that begin a conversation, and, of the others, that fork one."""


@dataclass(frozen=True)
class Lengths:
    """Tokens. `longest`: of a conversation; longer ones are not gone on with."""

    first: tuple[int, int]
    more: tuple[int, int]
    new: tuple[int, int]
    longest: int


@dataclass
class Level:
    """So many clients between two moments (unix ms); `busy`: the share of the machine's processors' time that was used
    meanwhile, by whomever; `forks`: ids of the requests that forked.
    """

    clients: int
    began_ms: int = 0
    ended_ms: int = 0
    busy: float = 0.0
    requests: int = 0
    forks: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


class MixedLoad:
    """Conversations of one cluster, by when they were last used. `pause_s`: how long a client reads, on average."""

    def __init__(
        self, stage: Stage, http: httpx.AsyncClient, lengths: Lengths, seed: int, pause_s: float = 0.0
    ) -> None:
        self._stage, self._http, self._lengths, self._pause_s = stage, http, lengths, pause_s
        self._draw, self._prose = random.Random(seed), Prose(stage.folder, seed)
        self._conversations: list[list[int]] = []

    async def play(self, clients: int, requests: int) -> Level:
        """`requests` in all."""
        level, before = Level(clients, began_ms=round(time.time() * 1e3)), Processors.now()
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                await self._one(level)
                if self._pause_s:
                    await asyncio.sleep(self._draw.expovariate(1 / self._pause_s))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(client())
        level.ended_ms, level.busy = round(time.time() * 1e3), Processors.now().busy_since(before)
        return level

    async def _one(self, level: Level) -> None:
        draw, lengths, forks = self._draw, self._lengths, False
        known = self._conversations
        if not known or draw.random() < _COLD:
            low, high = lengths.first
            prompt = self._prose.prompt(round(low * (high / low) ** draw.random()))
        else:
            # Log-uniform in how many were used since.
            at = len(known) - min(len(known), math.floor(len(known) ** draw.random()))
            history = known.pop(at)
            forks = draw.random() < _FORKS
            if forks:
                known.append(history)
                history = history[: draw.randint(len(history) // 2, len(history) - 1)]
            prompt = [*history, *self._prose.continuation(draw.randint(*lengths.more))]
        body: dict[str, object] = {"max_tokens": draw.randint(*lengths.new)}
        stage = self._stage
        seen = await stream(self._http, stage.cluster.base_url, stage.model, prompt, body)
        level.requests += 1
        level.faults += seen.faults(prompt)
        if forks:
            level.forks.add(seen.request_id)
        if len(prompt) < lengths.longest:
            known.append([*prompt, *seen.tokens])
