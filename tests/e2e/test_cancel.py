"""Whoever leaves, whenever: nothing stays reserved, loading or assigned. (Each test ends with that check.)"""

from __future__ import annotations

import asyncio
import json
import random
import time

import grpc
import httpx
import pytest

from libs.contracts.segue.v1 import router_pb2
from prove.stage import Stage
from tests.e2e.chats import complete, prompt
from tests.e2e.leaks import held, nothing_held

LEFT_WITHIN_S = 2.0
LONG = 3_000
"""Tokens nobody waits for: a worker that does not notice works on for many seconds."""


def body(stage: Stage, length: int, tokens: int, seed: int) -> dict[str, object]:
    # 400 tokens of seed 0, 1 or 4, 100 of seed 9 and 300 of seed 3 lead to no stop token for 1,200 and more.
    ids = prompt(length, seed)
    return {"model": stage.model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True}


async def leave_after(stage: Stage, request: dict[str, object], pieces: int) -> None:
    """Reads so many pieces of a stream, then closes the connection."""
    async with stage.http.stream("POST", stage.cluster.base_url + "/completions", json=request, timeout=30) as reply:
        assert reply.status_code == 200, await reply.aread()
        seen = 0
        async for line in reply.aiter_lines():
            seen += line.startswith("data: {")
            if seen >= pieces:
                return
    raise AssertionError(f"the stream ended after {seen} pieces")


@pytest.mark.parametrize(("pieces", "seed"), [(1, 0), (2, 1), (40, 4)])
async def test_a_client_that_leaves_during_decode(stage: Stage, pieces: int, seed: int) -> None:
    await leave_after(stage, body(stage, 400, LONG, seed), pieces)
    await nothing_held(stage, LEFT_WITHIN_S)


async def test_clients_that_leave_at_any_moment(stage: Stage) -> None:
    """Queue, offer, restore, prefill, decode, checkpoint: wherever a random moment of many requests falls."""
    draw = random.Random(4)

    async def one(index: int) -> None:
        request = body(stage, draw.choice([20, 700, 4_000]), draw.choice([4, LONG]), seed=900 + index % 7)
        async with httpx.AsyncClient() as own:
            task = asyncio.create_task(own.post(stage.cluster.base_url + "/completions", json=request, timeout=30))
            await asyncio.wait([task], timeout=draw.uniform(0.0, 0.6))
            task.cancel()
            await asyncio.wait([task])

    await asyncio.gather(*(one(index) for index in range(24)))
    await nothing_held(stage, LEFT_WITHIN_S)
    answer = await complete(stage, prompt(50, seed=1), 8)
    assert len(answer.served.token_ids) == 8, "and the cluster serves on"


async def test_more_than_all_lanes_leave_while_most_of_them_wait(stage: Stage) -> None:
    async def one(index: int) -> None:
        async with httpx.AsyncClient() as own:
            task = asyncio.create_task(
                own.post(stage.cluster.base_url + "/completions", json=body(stage, 64, LONG, 40 + index), timeout=30)
            )
            await asyncio.wait([task], timeout=0.5)
            task.cancel()
            await asyncio.wait([task])

    await asyncio.gather(*(one(index) for index in range(40)))
    await nothing_held(stage, LEFT_WITHIN_S)


async def test_cancel_by_request_id_ends_the_stream(stage: Stage) -> None:
    request = body(stage, 100, LONG, seed=9)
    lines: list[str] = []
    async with stage.http.stream("POST", stage.cluster.base_url + "/completions", json=request, timeout=30) as reply:
        source = reply.aiter_lines()
        while sum(line.startswith("data: {") for line in lines) < 5:
            lines.append(await anext(source))
        cancel = router_pb2.CancelRequest(request_id=reply.headers["x-request-id"])
        await stage.facts.router.Cancel(cancel, timeout=5)
        began = time.monotonic()
        lines += [line async for line in source]
    assert time.monotonic() - began < 1.0, "closed within a second"
    assert "data: [DONE]" not in lines, "a cut stream never looks like a finished one"
    assert "error" in json.loads(
        next(line for line in reversed(lines) if line.startswith("data: ")).removeprefix("data: ")
    )
    await nothing_held(stage, LEFT_WITHIN_S)
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await stage.facts.router.Cancel(cancel, timeout=5)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_reservation_that_is_held_is_seen(stage: Stage) -> None:
    """The check of all these tests finds what it looks for."""
    async with stage.http.stream(
        "POST", stage.cluster.base_url + "/completions", json=body(stage, 300, LONG, seed=3), timeout=30
    ) as reply:
        lines = reply.aiter_lines()  # kept: once it is collected, the connection is closed
        while not (await anext(lines)).startswith("data: {"):
            pass
        found = await held(stage)
        assert any("assignment" in one for one in found) and any("reserved" in one for one in found), found
        with pytest.raises(AssertionError, match="still held"):
            await nothing_held(stage, 0.1)
    await nothing_held(stage, LEFT_WITHIN_S)
