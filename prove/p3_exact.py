"""Exactness by teacher forcing, path by path, on prose: each run is seen to have taken the path it stands for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.controller.protocol import Tier
from prove import paths
from prove.checks import Checks
from prove.judging import Court, Judge, Tally
from prove.paths import History, Played
from prove.prose import Prose
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.worker_bench import Backing, Bench, backed, fresh_salt

CLAIM = Claim(
    "3-exact",
    "200 prompts x 64 tokens cold, batched with strangers and restored from SSD, and 40 x 32 resident, partial, "
    "forked, evicted, restarted and from S3, are the reference's tokens up to float ties",
    seed=31,
)
LANES = 8


@dataclass(frozen=True)
class _Plan:
    """`many` x `long` tokens on the main paths, `few` x `short` on the others; prompts of `shortest`..`longest` tokens.
    In `tight` bytes of pages not all of the few have room.
    """

    many: int
    long: int
    few: int
    short: int
    shortest: int
    longest: int
    kv_bytes: int
    tight: int


_FULL = _Plan(200, 64, 40, 32, 265, 900, 1 << 30, 128 << 20)
_SLICE = _Plan(9, 12, 2, 8, 270, 620, 6 << 20, 3 << 20)
_MORE = 24
"""Tokens a next turn adds."""


class Docket:
    """What was played, submitted to the reference as it comes."""

    def __init__(self, court: Court) -> None:
        self._court = court
        self.by_path: dict[str, list[Played]] = {}

    async def add(self, *played: Played) -> None:
        for one in played:
            ones = self.by_path.setdefault(one.path, [])
            ones.append(one)
            await self._court.submit(one.path, one.generation(len(ones)))


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The bench and the reference have a core each: they work side by side."""
    plan = _FULL if size is Size.FULL else _SLICE
    async with backed(stage) as backing, Judge(backing.folder).court() as court:
        docket = Docket(court)
        await _play(plan, backing, docket)
        return outcome(docket.by_path, await court.verdicts())


async def _play(plan: _Plan, backing: Backing, docket: Docket) -> None:
    prose, draw = Prose(backing.folder, CLAIM.seed), random.Random(CLAIM.seed)

    def prompts(count: int) -> list[list[int]]:
        # Log-uniform: as many lengths around one window and chunk as around two.
        span = plan.longest / plan.shortest
        return [prose.prompt(round(plan.shortest * span ** draw.random())) for _ in range(count)]

    async with Bench(backing.folder, {"kv_bytes": plan.kv_bytes, "lanes": LANES}, backing) as bench:
        histories = await _cold(bench, prompts(plan.many), plan.long, docket)
        await docket.add(*await paths.with_strangers(bench, prompts(plan.many), plan.long, LANES))
        short = await _cold(bench, prompts(plan.few), plan.short)
        await _resident(bench, prose, draw, short, plan.short, docket)
        before = bench.epoch
        await bench.restart(values={"kv_bytes": plan.tight})
        for one in short:
            await docket.add(await paths.restarted(bench, one, prose.continuation(_MORE), plan.short, before))
        for number, one in enumerate(short):
            # Most of the pages that the restarts brought are gone already; the others are flooded out.
            chain = number % 2 == 0
            await docket.add(await paths.evicted(bench, prose, one, prose.continuation(_MORE), plan.short, chain=chain))
        await bench.restart(values={"kv_bytes": plan.kv_bytes})
        for one in histories:
            await docket.add(await paths.restored(bench, one, Tier.SSD, prose.continuation(_MORE), plan.long))
        await bench.restart(fresh_directory=True)
        for one in histories[: plan.few]:
            await docket.add(await paths.restored(bench, one, Tier.OBJECT, prose.continuation(_MORE), plan.short))


async def _cold(bench: Bench, prompts: Sequence[list[int]], new: int, docket: Docket | None = None) -> list[History]:
    """Cold turns, one at a time; their histories, durable."""
    histories: list[History] = []
    for prompt in prompts:
        salt = fresh_salt()
        played = await paths.cold(bench, prompt, new, salt)
        if docket is not None:
            await docket.add(played)
        nodes = await bench.durable(played.exchange.processed, salt)
        histories.append(played.history(salt, nodes))
    return histories


async def _resident(
    bench: Bench, prose: Prose, draw: random.Random, histories: Sequence[History], new: int, docket: Docket
) -> None:
    """Each history again while its pages are there: from within, at once in two branches, and as it is."""
    for one in histories:
        here = await _again(bench, one)
        await docket.add(await paths.partial(bench, here, draw, prose.continuation(_MORE), new))
        await docket.add(*await paths.forked(bench, here, [prose.continuation(_MORE) for _ in range(2)], new))
        await docket.add(await paths.resident(bench, await _again(bench, one), prose.continuation(_MORE), new))


async def _again(bench: Bench, history: History) -> History:
    """The same tokens for another tenant, resident and of nobody else."""
    salt = fresh_salt()
    played = await paths.cold(bench, history.tokens, 2, salt)
    return played.history(salt)


def outcome(by_path: Mapping[str, Sequence[Played]], tallies: Mapping[str, Tally]) -> Outcome:
    """Every path taken, every token exact, and few ties among them."""
    checks, whole = Checks(), Tally()
    for path, tally in tallies.items():
        missed = [why for one in by_path[path] for why in one.missed]
        checks.check(
            f"{path}: the path was taken", {"of": len(by_path[path]), "missed": [*missed[:10]]}, [], not missed
        )
        checks.check(f"{path}: exact", tally.figures(), "no wrong token", tally.exact)
        whole.add(tally)
    agreed = 1 - whole.flips / max(1, whole.tokens)
    checks.check("the argmax, or the same draw", round(agreed, 6), ">= 0.999", agreed >= 0.999)
    found = checks.outcome({"all": whole.figures()})
    figure = {"checks": found.figure, "flips_per_100000": whole.figures()["flips_per_100000"], "tokens": whole.tokens}
    return Outcome(figure, found.limit, found.passed, found.details)
