"""What clients can ask of a generation, on real workers, held against transformers' own forward."""

from __future__ import annotations

import asyncio
import itertools

import grpc.aio
import pytest

from cli.demo.talk import Answer
from libs.continuation.tenancy import DEFAULT_TENANT, salt
from libs.contracts.segue.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from prove.stage import Stage
from tests.e2e.chats import SAMPLED, Body, case, complete, prompt
from tests.e2e.oracle import Oracle
from tests.fixtures.load import Arrivals, chat_pieces, run_load

KINDS: dict[str, Body] = {
    "hot": {"temperature": 1.5, "seed": 3},
    "nucleus": {"temperature": 1.0, "top_p": 0.5, "seed": 4},
    "frequency": {"temperature": 0, "frequency_penalty": 1.5},
    "presence": {"temperature": 0, "presence_penalty": 2.0},
    "rewarded": {"temperature": 0.5, "frequency_penalty": -0.5, "presence_penalty": -0.25, "seed": 5},
    "everything": {**SAMPLED, "frequency_penalty": 0.5, "presence_penalty": 0.5},
}


async def test_draws_and_penalties_are_the_references(stage: Stage, oracle: Oracle) -> None:
    ids = prompt(120, seed=9)
    answers = await asyncio.gather(*(complete(stage, ids, 60, how) for how in KINDS.values()))
    assert not await oracle.inexact([case(name, one, KINDS[name]) for name, one in zip(KINDS, answers, strict=True)])
    greedy = await complete(stage, ids, 60)
    for name, answer in zip(KINDS, answers, strict=True):
        assert answer.served.token_ids != greedy.served.token_ids, f"{name} changed nothing"


async def test_penalties_are_not_the_references_if_they_are_left_out(stage: Stage, oracle: Oracle) -> None:
    """The judge can tell: the same tokens under other sampling are no longer exact."""
    how = KINDS["everything"]
    answer = await complete(stage, prompt(120, seed=9), 60, how)
    without = {name: value for name, value in how.items() if not name.endswith("penalty")}
    assert await oracle.inexact([case("without penalties", answer, without)])
    assert await oracle.inexact([case("another seed", answer, {**how, "seed": 12})])


async def test_a_seed_gives_the_same_tokens_on_every_worker(stage: Stage) -> None:
    """Each worker asked by itself, past the router; and the API's answer is theirs."""
    ids = prompt(90, seed=21)
    answer = await complete(stage, ids, 48, SAMPLED)
    secret = bytes.fromhex((stage.cluster.spec.state / "tenant.secret").read_text().strip())
    request = common_pb2.GenerationRequest(
        tenant=DEFAULT_TENANT,
        tenant_salt=salt(DEFAULT_TENANT, secret),
        model=stage.model,
        tokens=ids,
        output_start=len(ids),
        max_new_tokens=48,
        sampling=common_pb2.Sampling(**SAMPLED),
        stop_token_ids=[1, 5],
        deadline_ms=30_000,
    )
    by_worker = {}
    for name, worker in stage.cluster.workers.items():
        request.request_id = f"by-hand-{name}"
        async with grpc.aio.insecure_channel(worker.target) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            events = [
                event async for event in stub.Generate(worker_pb2.WorkerGenerateRequest(request=request), timeout=30)
            ]
        assert events[0].HasField("accepted") and events[-1].HasField("result")
        by_worker[name] = [token for event in events for token in event.delta.tokens]
    assert set(by_worker) == set(stage.cluster.workers)
    assert all(tokens == answer.served.token_ids for tokens in by_worker.values())


async def test_a_drawn_seed_differs_from_request_to_request(stage: Stage) -> None:
    answers = [await complete(stage, prompt(40, seed=2), 24, {"temperature": 1.0}) for _ in range(2)]
    assert answers[0].served.token_ids != answers[1].served.token_ids


async def test_a_stop_string_ends_a_stream_where_it_would_appear(stage: Stage) -> None:
    ids = prompt(150, seed=33)
    whole = await complete(stage, ids, 80)
    cut = len(whole.text) // 2
    stop = next(whole.text[cut : cut + n] for n in (3, 2, 1) if whole.text[cut : cut + n].isprintable())
    body = {"model": stage.model, "prompt": ids, "max_tokens": 80, "temperature": 0, "stop": [stop]}
    headers = {"x-segue-token-ids": "1"}
    reply = await stage.http.post(stage.cluster.base_url + "/completions", json=body, headers=headers, timeout=30)
    answer = reply.json()
    choice = answer["choices"][0]
    assert choice["text"] == whole.text[: whole.text.index(stop)] and choice["finish_reason"] == "stop"
    used = answer["usage"]["completion_tokens"]
    assert used == len(answer["segue"]["token_ids"]) < 80
    assert answer["segue"]["token_ids"] == whole.served.token_ids[:used]
    assert answer["segue"]["workers"] == [answer["segue"]["worker"]] and answer["segue"]["timings"]["ttft_ms"] > 0
    pieces = [piece async for piece in chat_pieces(stage.http, stage.cluster.base_url, body)]
    assert "".join(pieces) == choice["text"]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 512, 513, 1_023])
async def test_every_length_of_prompt_is_exact_cold_and_warm(stage: Stage, oracle: Oracle, length: int) -> None:
    """Around the borders of pages, chunks and the window; once from nothing, once from what is resident."""
    ids = prompt(length, seed=1_000 + length)
    cold, warm = [await complete(stage, ids, 20) for _ in range(2)]
    assert cold.served.cached_tokens == 0 and cold.served.computed_tokens == length
    assert warm.served.token_ids == cold.served.token_ids
    assert not await oracle.inexact([case("cold", cold), case("warm", warm)])


async def test_many_arrive_at_once_and_none_fails(stage: Stage) -> None:
    """Open loop, prompts of all sizes, some of one family, greedy and sampled mixed: zero errors."""

    def body(index: int) -> dict[str, object]:
        family = prompt(64 * (1 + index % 6), seed=500 + index % 5)
        sampling: Body = {**SAMPLED, "seed": index} if index % 2 else {"temperature": 0}
        return {"model": stage.model, "prompt": family + prompt(10, seed=index)[1:], "max_tokens": 24, **sampling}

    send = lambda index: chat_pieces(stage.http, stage.cluster.base_url, body(index))  # noqa: E731
    report = await run_load(send, Arrivals(rate=20, count=60, within_s=6, seed=1), patience_s=30)
    assert len(report.samples) == 60 and not report.errors, report.summary()


async def test_concurrent_answers_are_those_given_alone(stage: Stage) -> None:
    """Eight lanes, lengths mixed: what a request gets does not depend on who sits beside it."""
    prompts = [prompt(30 + 97 * n, seed=700 + n) for n in range(8)]
    hows = list(itertools.islice(itertools.cycle([None, SAMPLED]), 8))
    together: list[Answer] = await asyncio.gather(
        *(complete(stage, ids, 40, how) for ids, how in zip(prompts, hows, strict=True))
    )
    alone = [await complete(stage, ids, 40, how) for ids, how in zip(prompts, hows, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.served.token_ids == other.served.token_ids
