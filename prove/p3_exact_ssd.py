"""Exactness of next turns whose chunks come from the worker's own disk, in another process of the worker."""

from __future__ import annotations

from libs.controller.protocol import Tier
from prove import paths
from prove.exactness import MORE, gathered, scene
from prove.paths import History
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "3-exact-ssd",
    "200 prompts x 64 tokens restored from SSD are the reference's tokens up to float ties",
    seed=34,
)
_AT_ONCE = 3


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    async with scene(size, stage, CLAIM.seed) as play:
        plan, bench = play.plan, play.bench
        histories = await play.histories(play.prompts(plan.many), 4, at_once=_AT_ONCE)
        await bench.restart()

        async def turn(history: History) -> None:
            more = play.prose.continuation(MORE)
            await play.docket.add(await paths.restored(bench, history, Tier.SSD, more, plan.long))

        await gathered(turn, histories, _AT_ONCE)
        return await play.docket.outcome()
