"""Exactness by teacher forcing, path by path, on prose: each run is seen to have taken the path it stands for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from libs.controller.protocol import Tier
from prove import paths
from prove.checks import Checks
from prove.judging import Judge, Tally
from prove.paths import History, Played
from prove.prose import Prose
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.worker_bench import Backing, Bench, backed, fresh_salt

CLAIM = Claim(
    "3-exact",
    "200 prompts x 64 tokens cold, batched with strangers and restored from SSD, and 40 x 32 on every other path, are "
    "the reference's tokens up to float ties",
    seed=31,
)
LANES = 8


@dataclass(frozen=True)
class _Plan:
    """`many` x `long` tokens on the main paths, `few` x `short` on the others; prompts of `shortest`..`longest`."""

    many: int
    long: int
    few: int
    short: int
    shortest: int
    longest: int
    kv_bytes: int
    judge_threads: int


_FULL = _Plan(200, 64, 40, 32, 280, 1_100, 1 << 30, 2)
_SLICE = _Plan(9, 12, 2, 8, 270, 620, 6 << 20, 1)
_MORE = 24
"""Tokens a next turn adds."""


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    plan = _FULL if size is Size.FULL else _SLICE
    async with backed(stage) as backing:
        played = await _play(plan, backing)
        return await _judge(plan, backing, played)


async def _play(plan: _Plan, backing: Backing) -> list[Played]:
    prose, draw = Prose(backing.folder, CLAIM.seed), random.Random(CLAIM.seed)

    def prompts(count: int) -> list[list[int]]:
        return [prose.prompt(draw.randint(plan.shortest, plan.longest)) for _ in range(count)]

    values = {"kv_bytes": plan.kv_bytes, "lanes": LANES, "threads": plan.judge_threads}
    found: list[Played] = []
    async with Bench(backing.folder, values, backing) as bench:
        histories = await _cold(bench, prompts(plan.many), plan.long, found)
        found += await paths.with_strangers(bench, prompts(plan.many), plan.long, LANES)
        short = await _cold(bench, prompts(plan.few), plan.short, [])
        found += await _resident(bench, prose, draw, short, plan.short)
        found += await _others(bench, prose, draw, prompts(2 * plan.few), plan)
        before = bench.epoch
        await bench.restart()
        found += [
            await paths.restarted(bench, one, prose.continuation(_MORE), plan.short, before)
            for one in short[: plan.few]
        ]
        found += [await paths.restored(bench, one, Tier.SSD, prose.continuation(_MORE), plan.long) for one in histories]
        gone = short[: plan.few]
        for number, one in enumerate(gone):
            # The pages that the restarts brought are flooded out again.
            found.append(
                await paths.evicted(bench, prose, one, prose.continuation(_MORE), plan.short, chain=number % 2 == 0)
            )
        await bench.restart(fresh_directory=True)
        found += [
            await paths.restored(bench, one, Tier.OBJECT, prose.continuation(_MORE), plan.short)
            for one in histories[: plan.few]
        ]
    return found


async def _cold(bench: Bench, prompts: Sequence[list[int]], new: int, found: list[Played]) -> list[History]:
    """Cold turns, one at a time; their histories, durable."""
    histories: list[History] = []
    for prompt in prompts:
        salt = fresh_salt()
        played = await paths.cold(bench, prompt, new, salt)
        found.append(played)
        nodes = await bench.durable(played.exchange.processed, salt)
        histories.append(played.history(salt, nodes))
    return histories


async def _resident(
    bench: Bench, prose: Prose, draw: random.Random, histories: Sequence[History], new: int
) -> list[Played]:
    """Each history again while its pages are there: from within, at once in two branches, and as it is."""
    found: list[Played] = []
    for one in histories:
        here = await _again(bench, one)
        found.append(await paths.partial(bench, here, draw, prose.continuation(_MORE), new))
        found += await paths.forked(bench, here, [prose.continuation(_MORE) for _ in range(2)], new)
        found.append(await paths.resident(bench, await _again(bench, one), prose.continuation(_MORE), new))
    return found


async def _again(bench: Bench, history: History) -> History:
    """The same tokens for another tenant, resident and of nobody else."""
    salt = fresh_salt()
    played = await paths.cold(bench, history.tokens, 2, salt)
    return played.history(salt)


async def _others(
    bench: Bench, prose: Prose, draw: random.Random, prompts: Sequence[list[int]], plan: _Plan
) -> list[Played]:
    found: list[Played] = []
    bias = prose.continuation(40)
    ways = paths.options(CLAIM.seed, [bias[0], next(token for token in bias if token != bias[0])])
    for number, prompt in enumerate(prompts[: plan.few]):
        after = draw.randint(1, plan.short // 2)
        option = None if number % 2 == 0 else ways[number % len(ways)]
        found.append(await paths.resumed(bench, prompt, plan.short, after, option))
    for option in ways:
        for prompt in prompts[plan.few :]:
            played = await paths.sampled(bench, prompt, plan.short, option)
            played.path = f"sampled {option.name}"
            found.append(played)
    return found


async def _judge(plan: _Plan, backing: Backing, played: Sequence[Played]) -> Outcome:
    checks, judge = Checks(), Judge(backing.folder, plan.judge_threads)
    by_path: dict[str, list[Played]] = {}
    for one in played:
        by_path.setdefault(one.path, []).append(one)
    whole = Tally()
    tallies = await judge.judge_groups(
        {path: [one.generation(number) for number, one in enumerate(ones)] for path, ones in by_path.items()}
    )
    for path, tally in tallies.items():
        missed = [why for one in by_path[path] for why in one.missed]
        checks.check(
            f"{path}: the path was taken", {"of": len(by_path[path]), "missed": [*missed[:10]]}, [], not missed
        )
        checks.check(f"{path}: exact", tally.figures(), "no wrong token", tally.exact)
        whole.add(tally)
    outcome = checks.outcome({"all": whole.figures()})
    figure = {"checks": outcome.figure, "flips_per_100000": whole.figures()["flips_per_100000"], "tokens": whole.tokens}
    return Outcome(figure, outcome.limit, outcome.passed, outcome.details)
