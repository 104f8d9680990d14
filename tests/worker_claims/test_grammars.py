"""Named masks from assembly to the draw, on both kinds of handlers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from libs.controller.protocol import ResultStatus, Sampling
from prove.prose import Prose
from prove.worker_bench import Ask, Bench, fresh_salt

ALLOWED = ((40, 41, 42), (50,))


class Alternating:
    """One of three ids at even places of the output, a fourth at odd ones."""

    def __init__(self) -> None:
        self.length = 0

    def advance(self, token: int) -> None:
        self.length += 1

    def allowed(self) -> Tensor | None:
        mask = torch.zeros(512, dtype=torch.bool)
        mask[list(ALLOWED[self.length % 2])] = True
        return mask


def follows(output: Sequence[int]) -> bool:
    return all(token in ALLOWED[place % 2] for place, token in enumerate(output))


@pytest.mark.parametrize("handlers", ["batched", "serialized"])
async def test_a_named_mask_shapes_the_output_and_goes_on_where_it_was(folder: Path, handlers: str) -> None:
    values = {"handlers": handlers, "lanes": 2, "kv_bytes": 8 << 20}
    prompt = Prose(folder, 8).prompt(50)
    async with Bench(folder, values, masks={"alternating": Alternating}) as bench:
        drawn = Sampling(temperature=1.0, seed=7, grammar="alternating")
        whole = (await bench.run(Ask(prompt, 9, fresh_salt(), drawn))).tokens
        assert follows(whole)
        plain = (await bench.run(Ask(prompt, 9, fresh_salt(), Sampling(temperature=1.0, seed=7)))).tokens
        assert not follows(plain)
        for cut in (1, 4):
            resumed = Ask([*prompt, *whole[:cut]], 9 - cut, fresh_salt(), drawn, output_start=len(prompt))
            assert (await bench.run(resumed)).tokens == whole[cut:]


@pytest.mark.parametrize("handlers", ["batched", "serialized"])
async def test_an_unknown_grammar_fails_that_request_alone_and_names_it(folder: Path, handlers: str) -> None:
    values = {"handlers": handlers, "lanes": 2, "kv_bytes": 8 << 20}
    async with Bench(folder, values, masks={"alternating": Alternating}) as bench:
        refused = bench.offer(Ask(Prose(folder, 9).prompt(50), 4, fresh_salt(), Sampling(grammar="sonnet")))
        await refused.finished(10.0)
        assert refused.result is not None and refused.result.status is ResultStatus.FAILED
        assert "sonnet" in refused.result.error and "alternating" in refused.result.error
        assert await bench.rest() == []
        await bench.run(Ask(Prose(folder, 9).prompt(50), 4, fresh_salt()))
