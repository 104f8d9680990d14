"""What the end-to-end tests say to a cluster, and how its answers are judged."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from cli.demo.exact import Case
from cli.demo.talk import Answer, Pieces
from cli.embedded.cluster import WorkerHandle
from prove.stage import Stage

Body = Mapping[str, object]
SAMPLED: Body = {"temperature": 0.75, "top_p": 0.875, "seed": 11}
"""Numbers that are exact in 32 bits, so that the reference draws from the same ones."""


def prompt(length: int, seed: int, vocab: int = 512) -> list[int]:
    """Token ids of no special token, different for each seed from the first one on."""
    draw = random.Random(seed)
    return [2, *(draw.randrange(6, vocab) for _ in range(length - 1))]


async def complete(
    stage: Stage, ids: Sequence[int], max_tokens: int, sampling: Body | None = None, pieces: Pieces | None = None
) -> Answer:
    """A streamed completion of token ids, greedy if no sampling is given."""
    body: dict[str, object] = {"prompt": list(ids), "max_tokens": max_tokens, **(sampling or {})}
    return await stage.talker._stream("/completions", body, pieces)


def case(name: str, answer: Answer, sampling: Body | None = None) -> Case:
    """For the reference."""
    return Case(name, answer.served.prompt_token_ids, answer.served.token_ids, sampling)


def worker_of(stage: Stage, answer: Answer) -> WorkerHandle:
    """The worker of the last attempt."""
    return stage.cluster.workers[answer.served.worker]
