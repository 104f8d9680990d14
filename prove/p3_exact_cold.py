"""Exactness of cold requests, one at a time: nothing of them is anywhere."""

from __future__ import annotations

from prove.exactness import scene
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "3-exact-cold",
    "200 prompts x 64 tokens cold are the reference's tokens up to float ties",
    seed=31,
)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    async with scene(size, stage, CLAIM.seed) as play:
        plan = play.plan
        await play.histories(play.prompts(plan.many), plan.long, judged=True)
        return await play.docket.outcome()
