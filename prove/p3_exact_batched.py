"""Exactness in company: other tenants' requests come and go in the other lanes."""

from __future__ import annotations

from prove import paths
from prove.exactness import LANES, scene
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "3-exact-batched",
    "200 prompts x 64 tokens batched with strangers at 8 lanes are the reference's tokens up to float ties",
    seed=33,
)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    async with scene(size, stage, CLAIM.seed) as play:
        plan = play.plan
        await paths.with_strangers(play.bench, play.prompts(plan.many), plan.long, LANES, play.docket.add)
        return await play.docket.outcome()
