"""How far the predicted time to first token is from the measured one, on a mixed live load, tier by tier."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import httpx
from pydantic import JsonValue

from libs.contracts.segue.v1 import catalog_pb2
from libs.controller.protocol import Tier
from prove.checks import Checks
from prove.mixed_load import Lengths, Level, MixedLoad
from prove.report import Claim, Outcome, Size
from prove.stage import Stage, on, staged

CLAIM = Claim(
    "5-ttft",
    "median |predicted - measured| / measured time to first token on a mixed live load (cold, resident, forked, from "
    "memory, disk and store; 1 to 4 clients that read their answers), after a warm-up: by tier with Gemma, in all with "
    "the tiny model: <= 20 %",
    seed=57,
)
LIMIT = 0.20
_ENOUGH, _TIERS = 10, 3
"""Requests of a tier from which on its median is held against the limit, and tiers that must have as many."""
_CALL_S = 10.0
_RECORDED_S = 60.0
_FULL = Lengths((200, 1_400), (16, 80), (4, 24), 1_800)
_SLICE = Lengths((100, 600), (16, 40), (2, 6), 800)
_WARM = (4, 80)
_LEVELS = ((1, 60), (2, 60), (4, 80))
"""Clients, and requests of all of them."""
_CROWDED = 120
Busy = dict[int, float]
"""By number of clients: the share of the processors' time that was used."""


@dataclass(frozen=True)
class Subject:
    """A model and its workers: pages for four requests and a few conversations at rest, memory and directory for some
    more each. `pause_s`: for which a client reads. With the tiny model it is long enough to leave the processors of a
    small machine some rest: where a first token takes 10 ms and the processors are all taken, it waits for its turn at
    them, which no router knows of. How much of them was used is told with each level, and how far predictions are off
    with `crowd` clients that take all there is; that is not judged. `by_tier`: whether each tier is judged besides all
    requests; a restore of the tiny model is 5 to 10 ms of handing over between threads, and told.
    """

    model: str
    pause_s: float
    settings: Mapping[str, str]
    by_tier: bool
    crowd: int = 0


def _settings(device: str, memory: str, directory: str) -> Mapping[str, str]:
    return MappingProxyType(
        {"kv_bytes": device, "ram_bytes": memory, "chunk_dir_cap": directory, "chunk_dir_free": "0"}
    )


SUBJECTS = (
    Subject("gemma3-270m", 2.0, _settings("384MiB", "300MiB", "700MiB"), by_tier=True),
    Subject("tiny", 0.5, _settings("12MiB", "9MiB", "21MiB"), by_tier=False, crowd=16),
)


@dataclass(frozen=True)
class Pair:
    """One attempt that delivered. Times in ms; terms as predicted and as the worker measured them."""

    kind: str
    clients: int
    predicted: float
    measured: float
    terms: dict[str, tuple[float, float]]

    @property
    def tier(self) -> str:
        """The same whether it forks or not."""
        return self.kind.removeprefix("forked, ")

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. As a slice without a limit: it measures a machine that does other things."""
    checks, told = Checks(), dict[str, JsonValue]()
    if stage is not None or size is not Size.FULL:
        async with on(stage) as at, httpx.AsyncClient() as http:
            load = MixedLoad(at, http, _SLICE, CLAIM.seed)
            told["slice"] = _told(*await _play(at, load, ((1, 6), (4, 10)), checks))
        return checks.outcome(told)
    for subject in SUBJECTS:
        pairs, busy, crowded = await measured(subject, checks)
        tiers = {tier: of for tier, of in _by(pairs, lambda pair: pair.tier).items() if len(of) >= _ENOUGH}
        name, reached = f"{subject.model}: tiers with {_ENOUGH} requests and more", len(tiers)
        checks.check(name, reached, f">= {_TIERS}", reached >= _TIERS)
        for tier, of in {**(tiers if subject.by_tier else {}), "all": pairs}.items():
            error = round(statistics.median(pair.error for pair in of), 3)
            checks.check(f"{subject.model}: median error, {tier}", error, f"<= {LIMIT}", error <= LIMIT)
        told[subject.model] = _told(pairs, busy) | crowded
    return checks.outcome(told)


async def measured(subject: Subject, checks: Checks) -> tuple[list[Pair], Busy, dict[str, JsonValue]]:
    """The whole load on a cluster of its own, after a warm-up; and what the crowd found."""
    at_work = staged(subject.model, workers=2, threads=1, worker_settings=subject.settings)
    async with at_work as at, httpx.AsyncClient() as http:
        load = MixedLoad(at, http, _FULL, CLAIM.seed, subject.pause_s)
        warm = await load.play(*_WARM)
        checks.check("every answer of the warm-up complete", warm.faults[:10], [], not warm.faults)
        pairs, busy = await _play(at, load, _LEVELS, checks)
        if not subject.crowd:
            return pairs, busy, {}
        return pairs, busy, {"crowded": _told(*await _play(at, load, ((subject.crowd, _CROWDED),), checks))}


async def _play(at: Stage, load: MixedLoad, plan: Sequence[tuple[int, int]], checks: Checks) -> tuple[list[Pair], Busy]:
    levels = [await load.play(clients, requests) for clients, requests in plan]
    faults = [fault for level in levels for fault in level.faults]
    checks.check("every answer complete, usage exact", faults[:10], [], not faults)
    pairs = await _pairs(at, levels)
    asked = sum(level.requests for level in levels)
    checks.check("decisions with a measured time", len(pairs), f">= {asked}", len(pairs) >= asked)
    return pairs, {level.clients: round(level.busy, 2) for level in levels}


async def _pairs(stage: Stage, levels: Sequence[Level]) -> list[Pair]:
    """From the recorded decisions, once they are all there."""
    wanted = sum(level.requests for level in levels)
    loop = asyncio.get_running_loop()
    give_up = loop.time() + _RECORDED_S
    while True:
        found = [pair for level in levels for pair in await _level(stage, level)]
        if len(found) >= wanted or loop.time() > give_up:
            return found
        await asyncio.sleep(0.5)


async def _level(stage: Stage, level: Level) -> list[Pair]:
    found: list[Pair] = []
    token = ""
    while True:
        asked = catalog_pb2.ListDecisionsRequest(
            from_ms=level.began_ms, until_ms=level.ended_ms + 1, model=stage.model, page_size=200, page_token=token
        )
        reply = await stage.facts.catalog.ListDecisions(asked, timeout=_CALL_S)
        for record in reply.records:
            found += [_pair(record, attempt, level) for attempt in record.attempts if attempt.measured_ttft_ms > 0]
        token = reply.next_page_token
        if not token:
            return found


def _pair(record: catalog_pb2.DecisionRecord, attempt: catalog_pb2.DecisionAttempt, level: Level) -> Pair:
    chosen, told = record.ranked[attempt.choice], attempt.timings
    kind = {Tier.NONE: "cold", Tier.GPU: "resident"}.get(Tier(chosen.tier), Tier(chosen.tier).name.lower())
    if record.request_id in level.forks:
        kind = f"forked, {kind}"
    terms = {
        "queue": (max(chosen.queue_ms, chosen.load_ms) - chosen.load_ms, told.queue_ms),
        "restore": (chosen.load_ms + chosen.restore_ms, told.restore_ms),
        "prefill": (chosen.compute_tokens * chosen.prefill_ms_per_token, told.prefill_ms),
        "first": (chosen.first_token_ms, told.first_token_ms),
        "way": (0.0, attempt.measured_ttft_ms - told.ttft_ms),
    }
    return Pair(kind, level.clients, attempt.predicted_ttft_ms, attempt.measured_ttft_ms, terms)


def _by(pairs: Iterable[Pair], of: Callable[[Pair], str]) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(of(pair), []).append(pair)
    return dict(sorted(found.items()))


def _told(pairs: Sequence[Pair], busy: Busy) -> dict[str, JsonValue]:
    def figures(of: Sequence[Pair]) -> dict[str, object]:
        median = statistics.median
        return {
            "n": len(of),
            "error": round(median(pair.error for pair in of), 3),
            "predicted_over_measured": round(median(pair.predicted / pair.measured for pair in of), 3),
            "measured_ms": round(median(pair.measured for pair in of), 1),
            "terms_ms": {
                name: [round(median(pair.terms[name][side] for pair in of), 1) for side in (0, 1)]
                for name in of[0].terms
            },
        }

    parts = {
        "by_tier": {kind: figures(of) for kind, of in _by(pairs, lambda pair: pair.kind).items()},
        "processors_busy": {str(clients): share for clients, share in busy.items()},
        "by_clients": {name: figures(of) for name, of in _by(pairs, lambda pair: str(pair.clients)).items()},
    }
    told: dict[str, JsonValue] = json.loads(json.dumps(parts))
    return told
