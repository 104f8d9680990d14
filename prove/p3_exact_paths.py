"""Exactness path by path: each run is seen to have taken the path it stands for."""

from __future__ import annotations

from libs.controller.protocol import Tier
from prove import paths
from prove.exactness import MORE, Scene, scene
from prove.paths import History
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "3-exact-paths",
    "40 prompts x 32 tokens resident, partial, forked, evicted, restarted and from S3 are the reference's tokens up to "
    "float ties",
    seed=35,
)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    async with scene(size, stage, CLAIM.seed) as play:
        plan, bench, prose, docket = play.plan, play.bench, play.prose, play.docket
        histories = await play.histories(play.prompts(plan.few), plan.short)
        for one in histories:
            await _resident(play, one)
        before = bench.epoch
        await bench.restart(values={"kv_bytes": plan.tight})
        for one in histories:
            await docket.add(await paths.restarted(bench, one, prose.continuation(MORE), plan.short, before))
        for number, one in enumerate(histories):
            # Most of the pages that the restarts brought are gone already; the others are flooded out.
            chain = number % 2 == 0
            await docket.add(await paths.evicted(bench, prose, one, prose.continuation(MORE), plan.short, chain=chain))
        await bench.restart(values={"kv_bytes": plan.kv_bytes}, fresh_directory=True)
        for one in histories:
            await docket.add(await paths.restored(bench, one, Tier.OBJECT, prose.continuation(MORE), plan.short))
        return await docket.outcome()


async def _resident(play: Scene, history: History) -> None:
    """Again while its pages are there: from within, at once in two branches, and as it is."""
    bench, prose, new = play.bench, play.prose, play.plan.short
    here = await play.again(history)
    await play.docket.add(await paths.partial(bench, here, play.draw, prose.continuation(MORE), new))
    await play.docket.add(*await paths.forked(bench, here, [prose.continuation(MORE) for _ in range(2)], new))
    await play.docket.add(await paths.resident(bench, await play.again(history), prose.continuation(MORE), new))
