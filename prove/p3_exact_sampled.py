"""Exactness of drawn tokens: each sampling option, a mask and log-probabilities, and each across a cut and a resume."""

from __future__ import annotations

import random

from prove import paths
from prove.exactness import Docket
from prove.judging import Judge
from prove.prose import Prose
from prove.report import Claim, Outcome, Size
from prove.stage import Stage
from prove.worker_bench import Bench, backed, fresh_salt, loaded

CLAIM = Claim(
    "3-exact-sampled",
    "40 prompts x 32 tokens with each sampling option, a mask and log-probabilities, and 40 x 32 resumed with each in "
    "turn, are the draws done again on the reference's logits",
    seed=32,
)


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module. The bench and the reference have a core each."""
    prompts, new, longest = (40, 32, 900) if size is Size.FULL else (2, 8, 300)
    async with backed(stage) as backing, Judge(backing.folder).court() as court:
        docket = Docket(court)
        prose, draw = Prose(backing.folder, CLAIM.seed), random.Random(CLAIM.seed)
        bias = prose.continuation(40)
        ways = paths.options(CLAIM.seed, [bias[0], next(token for token in bias if token != bias[0])])
        masks = paths.masks(loaded(backing.folder).descriptor.vocab)
        async with Bench(backing.folder, {"kv_bytes": 256 << 20, "lanes": 2}, backing, masks) as bench:
            for _ in range(prompts):
                prompt, salt = prose.prompt(draw.randint(20, longest)), fresh_salt()
                for option in ways:
                    await docket.add(await paths.sampled(bench, prompt, new, option, salt))
            for number in range(max(prompts, len(ways) + 1)):
                option = None if number == 0 else ways[number % len(ways)]
                # A cancel keeps whole chunks: with less than one, the second attempt would begin at nothing.
                prompt = prose.prompt(draw.randint(paths.CHUNK + 8, longest))
                await docket.add(await paths.resumed(bench, prompt, new, draw.randint(1, new // 2), option))
        return await docket.outcome()
