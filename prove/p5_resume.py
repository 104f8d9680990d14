"""Streams that go on over kill -9 of their worker or their router, token for token; and a prompt that kills workers."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
from pydantic import JsonValue

from prove.checks import Checks
from prove.cut_streams import Cut, Rounds, figures
from prove.deadly_prompts import deadly
from prove.judging import Judge
from prove.report import Claim, Outcome, Size
from prove.stage import UNHURRIED, Stage, staged

CLAIM = Claim(
    "5-resume",
    "kill -9 of the decoding worker in mid-stream, 20 times on the tiny model and 3 on Gemma, greedy and sampled, with "
    "penalties and stop strings, and of the router as often: every stream complete and exact, one finish reason, usage "
    "exact; a prompt that crashes every worker it meets fails after two, the third lives, the prompt rests",
    seed=55,
)


@dataclass(frozen=True)
class _Play:
    """On one model: so many kills of each kind."""

    model: str
    kills: int
    new: int
    longest: int


_FULL = (_Play("tiny", 20, 400, 900), _Play("gemma3-270m", 3, 64, 500))
_SLICE = _Play("", 1, 120, 300)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. At full size on clusters of two workers and two routers."""
    checks, told = Checks(), dict[str, JsonValue]()
    for play in (_SLICE,) if stage is not None else _FULL:
        async with AsyncExitStack() as stack:
            at = stage or await stack.enter_async_context(
                staged(play.model, workers=2, routers=2, threads=1, worker_settings=UNHURRIED)
            )
            http = await stack.enter_async_context(httpx.AsyncClient())
            cuts = await _cut(at, http, play)
            told |= await _judged(checks, at, cuts, play.model or at.model)
    await deadly(checks, echo=size is Size.SLICE, seed=CLAIM.seed)
    return checks.outcome(told)


async def _cut(stage: Stage, http: httpx.AsyncClient, play: _Play) -> list[Cut]:
    rounds = Rounds(stage, http, play.new, play.longest, CLAIM.seed)
    cuts: list[Cut] = []
    for number in range(play.kills):
        cuts += await rounds.worker_killed(number)
    for number in range(play.kills):
        cuts += await rounds.router_killed(number)
    return cuts


async def _judged(checks: Checks, stage: Stage, cuts: list[Cut], model: str) -> dict[str, JsonValue]:
    """By group: the path was taken, nothing for a client to complain of, every token exact."""
    told: dict[str, JsonValue] = {}
    groups: dict[str, list[Cut]] = {}
    for cut in cuts:
        groups.setdefault(cut.group, []).append(cut)
    cases = {name: [cut.generation(number) for number, cut in enumerate(of)] for name, of in groups.items()}
    tallies = await Judge(stage.folder).judge_groups(cases)
    for name, of in groups.items():
        where = f"{model}: {name}"
        missed = [f"{cut.way.name}: {why}" for cut in of for why in cut.missed]
        checks.check(f"{where} in mid-stream", [*missed[:10]], [], not missed)
        faults = [f"{cut.way.name}: {why}" for cut in of for why in cut.faults]
        checks.check(f"{where}: complete, one finish reason, usage exact", [*faults[:10]], [], not faults)
        tally = tallies[name]
        checks.check(f"{where}: exact", tally.figures(), "no wrong token", tally.exact)
        told[where] = json.loads(json.dumps(figures(of)))
    return told
