"""Bad requests: each a clear error of the right shape, nothing lost or hung."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.ingress.fake_router import Exchange, answering
from tests.ingress.models import CONTEXT, byte_level
from tests.ingress.rig import Rig, events, running

SAID = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": SAID}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(folder: Path) -> AsyncIterator[Rig]:
    async with running(folder, answering([50, 51])) as running_rig:
        yield running_rig
        assert running_rig.router.exchanges == [], "a refused request reached the router"


pytestmark = pytest.mark.asyncio(loop_scope="module")

REFUSED_IN_CHAT = {
    "audio": {}, "echo": True, "function_call": "auto", "functions": [], "frobnicate": 1, "guided_json": {},
    "logit_bias": {}, "logprobs": True, "metadata": {}, "min_p": 0.1, "modalities": ["text"], "prediction": {},
    "parallel_tool_calls": True, "prompt": "x", "prompt_cache_key": "x", "reasoning_effort": "low", "top_k": 5,
    "repetition_penalty": 1.1, "response_format": {}, "safety_identifier": "x", "service_tier": "auto", "store": True,
    "tool_choice": "none", "tools": [], "top_logprobs": 2, "verbosity": "low", "web_search_options": {},
}  # fmt: skip
REFUSED_IN_TEXT = {
    "best_of": 2, "echo": False, "logit_bias": {}, "logprobs": 1, "max_completion_tokens": 3, "messages": SAID,
    "suffix": "x", "top_k": 5,
}  # fmt: skip


def told(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"].startswith("req-")
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("name", REFUSED_IN_CHAT)
async def test_every_other_field_of_a_chat_is_refused_by_name(rig: Rig, name: str) -> None:
    for value in (REFUSED_IN_CHAT[name], None):
        error = told(await rig.http.post("/v1/chat/completions", json=CHAT | {name: value}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert f"'{name}'" in error["message"]


@pytest.mark.parametrize("name", REFUSED_IN_TEXT)
async def test_every_other_field_of_a_completion_is_refused_by_name(rig: Rig, name: str) -> None:
    error = told(await rig.http.post("/v1/completions", json=TEXT | {name: REFUSED_IN_TEXT[name]}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


BAD_VALUES: list[tuple[str, Any]] = [
    ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", "3"), ("max_tokens", True),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("top_p", 1.1), ("top_p", -1),
    ("frequency_penalty", 3), ("presence_penalty", -3), ("seed", 1.5), ("seed", 2**64), ("seed", "x"),
    ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 5), ("stop", 3), ("n", 2), ("n", 0), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("model", ""), ("model", 3), ("model", None), ("user", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
async def test_values_out_of_range_are_refused_by_name(rig: Rig, name: str, value: Any) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        error = told(await rig.http.post(path, json=body | {name: value}))
        assert error["param"].split("[")[0] == name
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "name": "bob"}], "messages[0].name"),
        ([*SAID, {"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[1].tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].image_url"),
        ([*SAID, *SAID], "messages"),  # the template wants turns to alternate
    ],
)
async def test_bad_messages_are_located(rig: Rig, messages: Any, param: str) -> None:
    assert told(await rig.http.post("/v1/chat/completions", json=CHAT | {"messages": messages}))["param"] == param


@pytest.mark.parametrize("prompt", [None, [], [[]], {}, [1, "a"], [-1], [2**40], [600], ["a"] * 17, [[1], ["a"]]])
async def test_bad_prompts(rig: Rig, prompt: Any) -> None:
    error = told(await rig.http.post("/v1/completions", json=TEXT | {"prompt": prompt}))
    assert error["param"].split("[")[0] == "prompt"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe\x00", b"[" * 100_000, b'{"model": NaN}', b'{"model":"m","prompt":"\\ud800"}'],
)
async def test_malformed_json(rig: Rig, raw: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        told(await rig.http.post(path, content=raw))


async def test_missing_fields(rig: Rig) -> None:
    assert told(await rig.http.post("/v1/chat/completions", json={"model": "m"}))["param"] == "messages"
    assert told(await rig.http.post("/v1/chat/completions", json={"messages": SAID}))["param"] == "model"
    assert told(await rig.http.post("/v1/completions", json={"model": "m"}))["param"] == "prompt"
    assert told(await rig.http.post("/tokenize", json={"model": "m"}))["param"] == "prompt"
    both = CHAT | {"max_tokens": 3, "max_completion_tokens": 3}
    assert told(await rig.http.post("/v1/chat/completions", json=both))["param"] == "max_tokens"


async def test_unknown_model_and_paths(rig: Rig) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/tokenize", TEXT)):
        error = told(await rig.http.post(path, json=body | {"model": "nope"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    told(await rig.http.get("/v1/models/org/nope"), 404)
    told(await rig.http.get("/v1/nothing"), 404)
    told(await rig.http.get("/v1/completions"), 405)


async def test_prompt_and_budget_over_the_context(rig: Rig) -> None:
    for path, body, name in (
        ("/v1/chat/completions", CHAT, "max_completion_tokens"),
        ("/v1/chat/completions", CHAT, "max_tokens"),
        ("/v1/completions", TEXT, "max_tokens"),
    ):
        error = told(await rig.http.post(path, json=body | {name: CONTEXT}))
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
        assert str(CONTEXT) in error["message"]
    long = CHAT | {"messages": [{"role": "user", "content": "x" * CONTEXT}]}
    assert told(await rig.http.post("/v1/chat/completions", json=long))["code"] == "context_length_exceeded"


async def test_bodies_are_bounded(folder: Path) -> None:
    async with running(folder, answering([50]), max_body_bytes=2_000) as small:
        told(await small.chat("x" * 3_000), 413)

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"x" * 500

        told(await small.http.post("/v1/completions", content=endless()), 413)
        assert (await small.chat("x")).status_code == 200


async def test_too_many_requests_at_once(folder: Path) -> None:
    async def held(exchange: Exchange) -> None:
        await exchange.cancelled.wait()

    async with running(folder, held, max_requests=1) as busy:
        first = asyncio.create_task(busy.chat())
        await busy.router.next()
        answer = await busy.chat()
        assert told(answer, 429)["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        assert (await busy.http.get("/healthz")).status_code == 200
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await busy.at_rest()


Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        (Code.INVALID_ARGUMENT, 400, None),
        (Code.OUT_OF_RANGE, 400, "context_length_exceeded"),
        (Code.NOT_FOUND, 404, "model_not_found"),
        (Code.RESOURCE_EXHAUSTED, 429, "overloaded"),
        (Code.UNAVAILABLE, 503, "service_unavailable"),
        (Code.DEADLINE_EXCEEDED, 504, "deadline_exceeded"),
        (Code.INTERNAL, 500, "internal_error"),
        (Code.UNKNOWN, 500, "internal_error"),
    ],
)
async def test_what_a_router_says(folder: Path, code: grpc.StatusCode, status: int, name: str | None) -> None:
    async def at_once(exchange: Exchange) -> None:
        exchange.fail(code, "said so", 2_300)

    async def later(exchange: Exchange) -> None:
        exchange.tokens(byte_level().encode("the", add_special_tokens=False).ids, 0)
        exchange.fail(code, "said so")

    async with running(folder, at_once) as failing:
        for stream in (False, True):
            answer = await failing.chat(stream=stream)
            error = told(answer, status)
            assert error["code"] == name
            if status == 500:
                assert answer.headers["x-request-id"] in error["message"]
            if status in (429, 503):
                assert answer.headers["retry-after"] == "3"
        await failing.at_rest()
        failing.router.script = later
        parsed = events((await failing.chat(stream=True)).text)
        assert "[DONE]" not in parsed
        assert parsed[-1]["error"]["code"] == name
        assert told(await failing.chat(), status)["code"] == name
        await failing.at_rest()


async def test_a_silent_router_meets_the_deadline(folder: Path) -> None:
    async def silent(exchange: Exchange) -> None:
        if exchange.submit.request.sampling.seed == 1:
            exchange.tokens([60], 0)
        await exchange.cancelled.wait()

    async with running(folder, silent, request_deadline_s=0.2) as slow:
        assert told(await slow.chat(), 504)["code"] == "deadline_exceeded"
        parsed = events((await slow.chat(stream=True, seed=1)).text)
        assert parsed[-1]["error"]["code"] == "deadline_exceeded"
        for exchange in slow.router.exchanges:
            await exchange.ended.wait()
            assert exchange.cancelled.is_set()
        await slow.at_rest()


async def test_an_operators_cancel_is_told(folder: Path) -> None:
    from libs.contracts.segue.v1.router_pb2 import CancelledDelivery

    async def cancelled(exchange: Exchange) -> None:
        exchange.send(cancelled=CancelledDelivery(usage=exchange.usage(0)))

    async with running(folder, cancelled) as stopped:
        assert told(await stopped.chat(), 503)["code"] == "cancelled"
        await stopped.at_rest()


async def test_no_router_is_a_503_in_bounded_time(folder: Path) -> None:
    async with running(folder, router_wait_s=0.1) as alone:
        answer = await alone.chat()
        assert told(answer, 503)["code"] == "service_unavailable"
        assert "retry-after" in answer.headers
        assert (await alone.http.get("/readyz")).status_code == 503
        assert (await alone.http.get("/v1/models")).status_code == 200
