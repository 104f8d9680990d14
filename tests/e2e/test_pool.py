"""An operator steers a live cluster's tunnels: no stream is altered by it; `segue top` shows it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.demo.talk import Answer
from libs.contracts.segue.v1 import router_pb2
from prove.router_pool import WITHIN_S, router_of, shown, until
from prove.stage import Stage
from tests.e2e.chats import SAMPLED, Body, case, complete, prompt
from tests.e2e.oracle import Oracle

ROOT = Path(__file__).resolve().parents[2]
HOWS: tuple[Body | None, ...] = (None, SAMPLED, None, SAMPLED)
TOKENS = 400
"""Of each stream: long enough to be still running when something is done in its midst."""


async def disturbed(stage: Stage, act: Any, seed: int) -> list[tuple[Answer, Answer]]:
    """(undisturbed, disturbed) of several streams; `act` runs once, in mid-stream of all."""
    prompts = [prompt(200 + 60 * n, seed=seed + n) for n in range(len(HOWS))]
    alone = [await complete(stage, ids, TOKENS, how) for ids, how in zip(prompts, HOWS, strict=True)]
    begun = 0
    everybody = asyncio.Event()

    def watcher() -> Any:
        async def on_pieces(pieces: int) -> None:
            nonlocal begun
            if pieces == 8:
                begun += 1
                if begun == len(HOWS):
                    everybody.set()
                    await act()

        return on_pieces

    together = await asyncio.gather(
        *(complete(stage, ids, TOKENS, how, watcher()) for ids, how in zip(prompts, HOWS, strict=True))
    )
    assert everybody.is_set()
    return list(zip(alone, together, strict=True))


async def all_exact(oracle: Oracle, pairs: list[tuple[Answer, Answer]]) -> None:
    for before, after in pairs:
        assert after.served.token_ids == before.served.token_ids and after.text == before.text
    cases = [case(str(n), after, how) for n, ((_, after), how) in enumerate(zip(pairs, HOWS, strict=True))]
    assert not await oracle.inexact(cases)


@pytest.mark.parametrize("close", [False, True])
async def test_a_swap_under_load_alters_no_stream(stage: Stage, oracle: Oracle, close: bool) -> None:
    async with router_of(stage) as router:
        await router.SetPoolPolicy(router_pb2.SetPoolPolicyRequest(knobs={"close_covered": str(close)}), timeout=30)
        first = await shown(router)
        before = first.generation

        async def swap() -> None:
            await router.SwapGeneration(router_pb2.SwapGenerationRequest(), timeout=30)
            await until(router, lambda pool: pool.generation > before)

        pairs = await disturbed(stage, swap, seed=5_000 + 100 * close)
        await router.SetPoolPolicy(router_pb2.SetPoolPolicyRequest(knobs={"close_covered": "false"}), timeout=30)
        retired = (await shown(router)).counters.route_ends["retired"] - first.counters.route_ends["retired"]
    await all_exact(oracle, pairs)
    resumed = sum(after.served.attempts > 1 for _, after in pairs)
    assert resumed == retired and (resumed > 0) == close, f"{retired} routes retired, {resumed} streams resumed"


async def test_a_worker_drained_at_the_router_finishes_what_it_runs_and_gets_nothing_new(
    stage: Stage, oracle: Oracle
) -> None:
    name = sorted(stage.cluster.workers)[0]
    async with router_of(stage) as router:

        async def drain() -> None:
            await router.DrainEndpoint(router_pb2.DrainEndpointRequest(worker=name), timeout=30)

        before = (await shown(router)).counters.route_ends["retired"]
        pairs = await disturbed(stage, drain, seed=6_000)
        assert (await shown(router)).counters.route_ends["retired"] == before
        late = await asyncio.gather(*(complete(stage, prompt(60, seed=6_100 + n), 8) for n in range(6)))
        assert name not in {answer.served.worker for answer in late}
        await router.DrainEndpoint(router_pb2.DrainEndpointRequest(worker=name, resume=True), timeout=30)
        await until(router, lambda pool: all(one.active for one in pool.endpoints))
    await all_exact(oracle, pairs)


async def top(stage: Stage, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", "top", "--router", stage.cluster.router_target, *arguments, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_top_shows_the_tunnels(stage: Stage) -> None:
    code, text, _ = await top(stage, "--json")
    found = json.loads(text)
    assert code == 0 and found["readiness"] == "ready"
    assert {one["worker"] for one in found["endpoints"]} == set(stage.cluster.workers)
    code, text, _ = await top(stage, "--once")
    assert code == 0 and "generation" in text
    for name in stage.cluster.workers:
        assert name in text
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", "top", "--router", "127.0.0.1:1", "--once", cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(WITHIN_S):
        _, err = await process.communicate()
    assert process.returncode == 1 and b"router at 127.0.0.1:1" in err and b"Traceback" not in err
