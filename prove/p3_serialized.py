"""The same requests through the batched and the serialized handlers: the same tokens, the same pages, wave by wave."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from cli.embedded.models import default_cache, prepare
from libs.controller.protocol import Sampling
from prove.checks import Checks
from prove.judging import Generation, Judge
from prove.prose import Prose
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.worker_bench import Ask, Bench, Exchange, tiny_folder

CLAIM = Claim("3-serialized", "serialized and batched handlers: the same tokens and the same page accounting", seed=33)


_REST_S = 20.0


@dataclass(frozen=True)
class _Plan:
    chats: int
    new: int
    shortest: int
    longest: int
    kv_bytes: int


@dataclass(frozen=True)
class Wave:
    """What one side made of a wave: per request its tokens and usage; then, at rest, what the pool holds."""

    tokens: list[list[int]]
    usage: list[tuple[int, int, int, int]]
    pages: dict[str, tuple[int, int]]
    """Free and resident, by group."""
    resident: frozenset[str]
    faults: list[str]


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    checks = Checks()
    tiny = await tiny_folder(stage)
    plan = _Plan(3, 10, 260, 700, 24 << 20) if size is Size.SLICE else _Plan(60, 24, 260, 1_500, 512 << 20)
    await compare(checks, "tiny", tiny, plan)
    if size is Size.FULL:
        gemma = await prepare("gemma3-270m", default_cache(), lambda _doing, _done: None)
        await compare(checks, "gemma", gemma, _Plan(10, 32, 280, 900, 1_500 << 20))
    return checks.outcome()


async def compare(checks: Checks, name: str, folder: Path, plan: _Plan) -> None:
    """Both sides, each from an empty pool, then wave by wave side by side."""
    batched = await play(folder, plan, {"handlers": "batched", "lanes": 4})
    serialized = await play(folder, plan, {"handlers": "serialized"})
    for number, (one, other) in enumerate(zip(batched, serialized, strict=True), 1):
        about = f"{name}, wave {number}"
        checks.equal(f"{about}: usage", differing(one.usage, other.usage), [])
        checks.equal(
            f"{about}: pages at rest", dict[str, JsonValue](_listed(one)), dict[str, JsonValue](_listed(other))
        )
        checks.equal(f"{about}: prefixes resident", sorted(one.resident ^ other.resident), [])
        checks.equal(f"{about}: integrity", [*one.faults, *other.faults], [])
        await _same_tokens(checks, f"{about}: tokens", folder, one, other)


def differing(one: list[tuple[int, int, int, int]], other: list[tuple[int, int, int, int]]) -> list[JsonValue]:
    """Where (prompt, cached, computed, generated) tokens differ."""
    return [[list(a), list(b)] for a, b in zip(one, other, strict=True) if a != b]


def _listed(wave: Wave) -> dict[str, JsonValue]:
    return {group: list(counts) for group, counts in wave.pages.items()}


async def _same_tokens(checks: Checks, name: str, folder: Path, one: Wave, other: Wave) -> None:
    """Equal, or (a float tie fell the other way in another batch) both the reference's."""
    unlike = [index for index, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1]]
    if not unlike or any(len(one.tokens[index]) != len(other.tokens[index]) for index in unlike):
        checks.equal(name, [*unlike], [])
        return
    lengths = [one.usage[index][0] for index in unlike]
    cases = [
        Generation(f"{index}", side.tokens[index][:length], side.tokens[index][length:])
        for side in (one, other)
        for index, length in zip(unlike, lengths, strict=True)
    ]
    tally = await Judge(folder).judge(cases)
    checks.check(name, {"unlike": [*unlike]} | tally.figures(), "float ties only", tally.exact)


async def play(folder: Path, plan: _Plan, values: Mapping[str, object]) -> list[Wave]:
    """Three waves of chats: cold; each goes on and branches; each goes on, drawn."""
    prose, draw = Prose(folder, CLAIM.seed), random.Random(CLAIM.seed)
    salts = [f"{number:064x}" for number in range(plan.chats)]
    chats = [prose.prompt(draw.randint(plan.shortest, plan.longest)) for _ in range(plan.chats)]
    waves: list[Wave] = []
    async with Bench(folder, {**values, "kv_bytes": plan.kv_bytes, "max_control_tasks": 2 * plan.chats + 8}) as bench:
        first = await _wave(bench, [Ask(chat, plan.new, salt) for chat, salt in zip(chats, salts, strict=True)], waves)
        # What follows is drawn from the prompts alone, so that both sides are asked the same whatever they answered.
        histories = [[*one.offer.request.tokens, *one.tokens] for one in first]
        branches = [
            Ask([*history, *prose.continuation(17)], plan.new, salt)
            for history, salt in zip(histories, salts, strict=True)
            for _ in range(2)
        ]
        await _wave(bench, branches, waves)
        drawn = [
            Ask([*history, *prose.continuation(40)], plan.new, salt, Sampling(temperature=0.8, top_k=30, seed=number))
            for number, (history, salt) in enumerate(zip(histories, salts, strict=True))
        ]
        await _wave(bench, drawn, waves)
    return waves


async def _wave(bench: Bench, asks: list[Ask], waves: list[Wave]) -> list[Exchange]:
    exchanges = [await bench.accepted(ask) for ask in asks]
    for exchange in exchanges:
        await exchange.completed()
    faults = await bench.rest(_REST_S)
    pool = bench.engine.pool
    usages = [exchange.usage for exchange in exchanges]
    waves.append(
        Wave(
            [[*exchange.offer.request.tokens, *exchange.tokens] for exchange in exchanges],
            [(one.prompt_tokens, one.cached_tokens, one.computed_tokens, one.generated_tokens) for one in usages],
            {group: (pages.free, pages.resident) for group, pages in pool.pages().items()},
            frozenset(pool.changes(None).came),
            faults,
        )
    )
    return exchanges
