"""A herd: requests that begin with one prompt, all sent at once, and what each of them waited for and had computed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from prove.stage import Stage
from prove.streams import Seen, stream

_NEW = 2
_REST_S, _LOOK_S = 60.0, 0.2
_PENDING = ("segue_worker_checkpoint_pending", "segue_worker_replicas_waiting")


@dataclass(frozen=True)
class Run:
    """One herd. `ttft_ms`: ascending; `shared`: tokens of the common beginning, whole chunks; `stranger_ms`: that of a
    prompt that nobody has seen and that was sent with them; 0 = none was.
    """

    shared: int
    own: int
    seen: Sequence[Seen]
    ttft_ms: Sequence[float]
    faults: Sequence[str]
    stranger_ms: float = 0.0

    @property
    def copies(self) -> float:
        """How often the common beginning was computed in all: its tokens computed, over its length."""
        computed = (max(0, int(one.served.get("computed_tokens", 0)) - self.own) for one in self.seen)
        return sum(computed) / self.shared

    @property
    def by_worker(self) -> dict[str, int]:
        return dict(sorted(Counter(str(one.served.get("worker", "")) for one in self.seen).items()))

    def max_over_mean(self, workers: int) -> float:
        """Of requests a worker."""
        return max(self.by_worker.values()) * workers / len(self.seen)


class Herd:
    """Sends them, each over a connection of its own. `vocab`: token ids below it are drawn."""

    def __init__(self, stage: Stage, http: httpx.AsyncClient, seed: int, vocab: int = 500) -> None:
        self._stage, self._http, self._vocab = stage, http, vocab
        self._draw = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(6, self._vocab) for _ in range(length)]

    async def together(self, shared: Sequence[int], count: int, own: int, *, stranger: bool = False) -> Run:
        """`count` requests at once, each with `own` tokens of its own behind the common ones; with them a `stranger` of
        that length.
        """
        prompts = [[*shared, *self.prompt(own)] for _ in range(count)]
        strangers = [self.alone(len(shared) + own)] if stranger else []
        *first, done = await asyncio.gather(*strangers, self._all(prompts))
        faults = [fault for prompt, (seen, _) in zip(prompts, done, strict=True) for fault in seen.faults(prompt)]
        ttft_ms = sorted(ttft for _, ttft in done)
        return Run(len(shared), own, [seen for seen, _ in done], ttft_ms, faults, *first)

    async def _all(self, prompts: Sequence[Sequence[int]]) -> list[tuple[Seen, float]]:
        return await asyncio.gather(*(self._one(prompt) for prompt in prompts))

    async def alone(self, length: int) -> float:
        """TTFT in ms of a prompt that nobody has seen, and that shares nothing with whatever runs beside it."""
        prompt = self.prompt(length)
        seen, ttft_ms = await self._one(prompt)
        if seen.served.get("cached_tokens") != 0 or seen.faults(prompt):
            raise RuntimeError(f"no cold prompt's answer: {seen.faults(prompt)}, {seen.served}")
        return ttft_ms

    async def rest(self) -> None:
        """Until what was computed is durable: who comes next does not pay for the writing. Raises TimeoutError."""
        pages = [worker.metrics_url for worker in self._stage.cluster.workers.values()]
        async with asyncio.timeout(_REST_S):
            while True:
                if all([_written((await self._http.get(page)).text) for page in pages]):
                    return
                await asyncio.sleep(_LOOK_S)  # a gauge tells nobody that it has changed

    async def _one(self, prompt: Sequence[int]) -> tuple[Seen, float]:
        began, first = time.perf_counter(), 0.0

        async def piece(_request_id: str, _pieces: int) -> None:
            nonlocal first
            first = first or time.perf_counter()

        stage = self._stage
        body = {"max_tokens": _NEW}
        seen = await stream(self._http, stage.cluster.base_url, stage.model, prompt, body, piece)
        return seen, ((first or time.perf_counter()) - began) * 1e3


def _written(metrics: str) -> bool:
    """Whether a worker's metrics say that nothing is left to write. Raises KeyError if they do not say it."""
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line and not line.startswith("#"))
    return all([float(values[name]) == 0 for name in _PENDING])
