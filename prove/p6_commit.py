"""Generations committed under load, their old tunnels covered and full of streams: by default the routes drain, with
the knob `close_covered` they are closed and resumed. Either way no stream is altered.

The same requests are played alone first; what the streams say is held against that, and every token against the
reference.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import httpx
from pydantic import JsonValue

from prove.checks import Checks
from prove.commit_waves import Pool, Wave, pool_of, settled, wave
from prove.cut_streams import Cut, Rounds
from prove.judging import Judge, Tally
from prove.report import Claim, Outcome, Size
from prove.stage import UNHURRIED, Stage, staged

CLAIM = Claim(
    "6-commit",
    "a commit with covered old writers under load: their routes drain by default, or, with the knob, are closed and "
    "resumed: no stream altered",
    seed=6_600,
)
DRAINS, CLOSES = "routes drain", "routes are closed and resumed"
_FORCED = ("deadline", "threshold", "lost")
"""Ends of a tunnel that no commit may bring: by force, or unasked."""


@dataclass(frozen=True)
class _Play:
    """For each way a commit treats its covered tunnels."""

    waves: int
    streams: int
    commits: int
    new: int
    longest: int


_FULL = _Play(6, 8, 3, 400, 700)
_SLICE = _Play(1, 4, 2, 200, 200)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. At full size on a cluster of two workers."""
    checks, told = Checks(), dict[str, JsonValue]()
    play = _FULL if size is Size.FULL else _SLICE
    async with AsyncExitStack() as stack:
        at = stage or await stack.enter_async_context(
            staged("tiny", workers=2, threads=1, worker_settings=UNHURRIED)
        )  # fmt: skip
        http = await stack.enter_async_context(httpx.AsyncClient())
        pool = await stack.enter_async_context(pool_of(at, http))
        rounds = Rounds(at, http, play.new, play.longest, CLAIM.seed)
        checks.equal("close_covered by default", (await pool.shown()).policy["close_covered"], "false")
        waves = {DRAINS: await _played(pool, rounds, DRAINS, play), CLOSES: []}
        async with pool.knobs(close_covered="true"):
            waves[CLOSES] = await _played(pool, rounds, CLOSES, play)
        cuts = {name: [cut for one in of for cut in one.cuts] for name, of in waves.items()}
        cases = {name: [cut.generation(number) for number, cut in enumerate(of)] for name, of in cuts.items()}
        tallies = await Judge(at.folder).judge_groups(cases)
    for name, of in waves.items():
        tunnels(checks, name, of)
        streams(checks, name, cuts[name], tallies[name])
        told[name] = json.loads(json.dumps(figures(of)))
    return checks.outcome(told)


async def _played(pool: Pool, rounds: Rounds, name: str, play: _Play) -> list[Wave]:
    found = []
    for number in range(play.waves):
        await settled(pool)
        found.append(await wave(pool, rounds, name, play.streams, play.commits, number * play.streams))
    return found


def tunnels(checks: Checks, name: str, waves: Sequence[Wave]) -> None:
    """What became of the covered tunnels and of their routes."""
    met = [one for each in waves for one in each.commits if one.tunnels and one.running]
    checks.check(f"{name}: commits in mid-stream", len(met), f">= {len(waves)}", len(met) >= len(waves))
    removals = sum((each.removals for each in waves), Counter[str]())
    retired, resumes = sum(each.ends["retired"] for each in waves), sum(each.resumes for each in waves)
    attempts = [cut.seen.attempts for each in waves for cut in each.cuts]
    covered = sum(one.tunnels for one in met)
    if name == DRAINS:
        drained = sum(one.draining for one in met)
        checks.check(f"{name}: covered tunnels that were seen to drain", drained, f"> 0 of {covered}", drained > 0)
        checks.equal(f"{name}: routes closed, and resumed", [retired, resumes], [0, 0])
        checks.equal(f"{name}: streams of more than one attempt", sum(made > 1 for made in attempts), 0)
        emptied = removals["emptied"]
        checks.check(f"{name}: tunnels that ended once empty", emptied, f">= {covered}", emptied >= covered)
        checks.equal(f"{name}: tunnels closed at once", removals["at-once"], 0)
    else:
        # Whoever has met its stop string needs no more of a stream whose route is closed then.
        stopped = sum(bool(cut.stop) for each in waves for cut in each.cuts)
        enough = retired > 0 and retired - stopped <= resumes
        checks.check(f"{name}: resumed, of routes closed", [resumes, retired], f"> 0, all but {stopped}", enough)
        again = sum(made > 1 for made in attempts)
        most = max((one.running for one in met), default=0)
        checks.check(f"{name}: streams of more than one attempt", again, f">= {most}", again >= most > 0)
        closed = removals["at-once"]
        checks.check(f"{name}: tunnels closed at once", closed, f">= {covered}", closed >= covered)
    checks.equal(f"{name}: tunnels that ended by force", {why: removals[why] for why in _FORCED if removals[why]}, {})
    checks.equal(f"{name}: older tunnels left", [one for each in waves for one in each.left], [])
    checks.equal(f"{name}: held at rest", [sum(held) for held in zip(*(w.held for w in waves), strict=True)], [0] * 4)


def streams(checks: Checks, name: str, cuts: Sequence[Cut], tally: Tally) -> None:
    """What their clients got."""
    faults = [f"{cut.way.name}: {why}" for cut in cuts for why in cut.faults]
    checks.check(f"{name}: complete, one finish reason, usage exact", [*faults[:10]], [], not faults)
    altered = [cut for cut in cuts if cut.seen.tokens != cut.expected.tokens]
    # The reference tells a float tie, where either token is right, from a wrong one.
    ties = len(altered) <= tally.flips
    checks.check(f"{name}: streams unlike those alone", len(altered), f"<= {tally.flips} float ties", ties)
    texts = [cut.way.name for cut in cuts if cut not in altered and cut.seen.text != cut.expected.text]
    checks.equal(f"{name}: texts of the same tokens that differ", [*texts], [])
    checks.check(f"{name}: exact", tally.figures(), "no wrong token", tally.exact)


def figures(waves: Sequence[Wave]) -> dict[str, object]:
    """For a report."""
    return {
        "streams": sum(len(each.cuts) for each in waves),
        "tokens": sum(len(cut.seen.tokens) for each in waves for cut in each.cuts),
        "commits": [asdict(one) for each in waves for one in each.commits],
        "routes_retired": sum(each.ends["retired"] for each in waves),
        "resumes": sum(each.resumes for each in waves),
    }
