"""What a client gets when all goes well, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from libs.continuation.tenancy import salt
from tests.ingress.fake_router import Exchange, answering
from tests.ingress.models import BOS, END, EOS, byte_level
from tests.ingress.rig import SECRET, events, running, text_of_events

TOKENIZER = byte_level()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


HELLO = [*ids_of("the hall é🙂"), END]


async def test_chat_whole(folder: Path) -> None:
    async with running(folder, answering(HELLO)) as rig:
        answer = await rig.chat("hi", seed=3, temperature=0.5, presence_penalty=0.25)
        body = answer.json()
        assert answer.status_code == 200
        assert body["object"] == "chat.completion"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "the hall é🙂"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        (exchange,) = rig.router.exchanges
        request = exchange.submit.request
        text = "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
        assert list(request.tokens) == TOKENIZER.encode(text, add_special_tokens=False).ids
        assert request.tokens[0] == BOS
        assert request.tokens[1] != BOS
        assert request.output_start == len(request.tokens)
        assert (request.tenant, request.tenant_salt) == ("default", salt("default", bytes.fromhex(SECRET)))
        assert list(request.stop_token_ids) == [EOS, END]
        assert (request.sampling.seed, request.sampling.temperature) == (3, 0.5)
        assert (request.sampling.top_p, request.sampling.presence_penalty) == (1.0, 0.25)
        assert 0 < request.deadline_ms <= 600_000
        assert request.max_new_tokens == 1_024
        prompt, cached = len(request.tokens), len(request.tokens) // 4 * 2
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": len(HELLO),
            "total_tokens": prompt + len(HELLO),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        served = body["segue"]
        assert served["request_id"] == request.request_id == answer.headers["x-request-id"]
        assert (served["worker"], served["workers"], served["epoch"]) == ("w2", ["w1", "w2"], 7)
        assert (served["attempts"], served["tier"], served["routers"]) == (2, "object", 1)
        assert served["restored_by_tier"] == {"object": {"tokens": prompt // 4, "bytes": 1_000}}
        assert served["computed_tokens"] == prompt - cached
        assert served["timings"]["prefill_ms"] == 5
        assert served["ttft_ms"] > 0
        assert "token_ids" not in served
        await rig.at_rest()


@pytest.mark.parametrize("batch", [1, 3, 100])
async def test_chat_streamed(folder: Path, batch: int) -> None:
    async with running(folder, answering(HELLO, batch=batch)) as rig:
        answer = await rig.chat(stream=True, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        parsed = events(answer.text)
        assert parsed[-1] == "[DONE]"
        assert parsed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert text_of_events(parsed) == "the hall é🙂"
        assert parsed[-3]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert parsed[-2]["choices"] == []
        assert parsed[-2]["usage"]["completion_tokens"] == len(HELLO)
        assert parsed[-2]["segue"]["worker"] == "w2"
        assert all(event["usage"] is None for event in parsed[:-2])
        assert {event["object"] for event in parsed[:-1]} == {"chat.completion.chunk"}
        assert len({event["id"] for event in parsed[:-1]}) == 1
        await rig.at_rest()


async def test_a_stream_has_no_usage_unless_asked(folder: Path) -> None:
    async with running(folder, answering(HELLO)) as rig:
        parsed = events((await rig.chat(stream=True)).text)
        assert not any("usage" in event for event in parsed[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(folder: Path, stream: bool) -> None:
    async with running(folder, answering(ids_of("the hall"))) as rig:
        body = {"model": "m", "prompt": "say ", "max_tokens": 3, "stream": stream}
        answer = await rig.http.post("/v1/completions", json=body)
        said = "the ha"[: len(TOKENIZER.decode(ids_of("the hall")[:3]))]
        if stream:
            parsed = events(answer.text)
            assert text_of_events(parsed) == said
            assert parsed[-2]["choices"][0]["finish_reason"] == "length"
        else:
            assert answer.json()["object"] == "text_completion"
            assert answer.json()["choices"][0] == {
                "index": 0, "text": said, "logprobs": None, "finish_reason": "length",
            }  # fmt: skip
        request = rig.router.exchanges[0].submit.request
        assert list(request.tokens) == [BOS, *ids_of("say ")]
        assert list(request.stop_token_ids) == [EOS]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        (["a", "b"], [[BOS, *ids_of("a")], [BOS, *ids_of("b")]]),
        ("<bos>a", [[BOS, *ids_of("a")]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_kinds_of_prompts(folder: Path, prompt: Any, expected: list[list[int]], stream: bool) -> None:
    async with running(folder, answering(ids_of("hall"))) as rig:
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = await rig.http.post("/v1/completions", json=body)
        sent = [list(exchange.submit.request.tokens) for exchange in rig.router.exchanges]
        assert sorted(sent) == sorted(expected)
        assert len({exchange.id for exchange in rig.router.exchanges}) == len(expected)
        if stream:
            parsed = events(answer.text)
            assert [text_of_events(parsed, index) for index in range(len(expected))] == ["hall"] * len(expected)
            usage = parsed[-2]["usage"]
        else:
            assert [choice["text"] for choice in answer.json()["choices"]] == ["hall"] * len(expected)
            usage = answer.json()["usage"]
        assert usage["completion_tokens"] == len(ids_of("hall")) * len(expected)
        await rig.at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_generation_and_usage_counts_up_to_it(folder: Path, stream: bool) -> None:
    text = "one\ntwo\nthree four five"
    tokens = byte_level(()).encode(text, add_special_tokens=False).ids
    async with running(folder, answering(tokens, batch=5, pause_s=0.01)) as rig:
        fields: dict[str, Any] = {"stop": ["wo\nth", "zzz"], "stream": stream}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        answer = await rig.chat(**fields)
        upto = text.index("wo\nth") + len("wo\nth")
        if stream:
            parsed = events(answer.text)
            said, end = text_of_events(parsed), parsed[-2]
            assert parsed[-3]["choices"][0]["finish_reason"] == "stop"
        else:
            said, end = answer.json()["choices"][0]["message"]["content"], answer.json()
            assert end["choices"][0]["finish_reason"] == "stop"
        assert said == "one\nt"
        usage, served = end["usage"], end["segue"]
        assert usage["completion_tokens"] == upto
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 4 * 2
        assert (served["worker"], served["workers"], served["epoch"]) == ("w2", ["w1", "w2"], 7)
        assert (served["tier"], served["timings"]["prefill_ms"]) == ("object", 5)
        exchange = rig.router.exchanges[0]
        await exchange.ended.wait()
        assert exchange.cancelled.is_set()
        await rig.at_rest()


async def test_a_stop_string_does_not_wait_for_a_router_that_says_no_more(folder: Path) -> None:
    tokens = byte_level(()).encode("one two three", add_special_tokens=False).ids

    async def script(exchange: Exchange) -> None:
        exchange.tokens(tokens, 0)
        await exchange.ended.wait()

    async with running(folder, script) as rig:
        rig.router.last_words = False
        async with asyncio.timeout(5):
            answer = (await rig.chat(stop="two")).json()
        assert answer["choices"][0]["message"]["content"] == "one "
        assert "worker" not in answer["segue"]
        await rig.router.exchanges[0].ended.wait()
        assert rig.ingress.api.upstream.counters.cancels == 1
        await rig.at_rest()


async def test_an_unset_seed_is_drawn_anew(folder: Path) -> None:
    async with running(folder, answering(HELLO)) as rig:
        await rig.chat()
        await rig.chat(seed=-1)
        await rig.chat()
        seeds = [exchange.submit.request.sampling.seed for exchange in rig.router.exchanges]
        assert seeds[1] == 2**64 - 1
        assert len(set(seeds)) == 3


async def test_top_p_zero_is_not_off(folder: Path) -> None:
    async with running(folder, answering(HELLO)) as rig:
        await rig.chat(top_p=0)
        assert 0 < rig.router.exchanges[0].submit.request.sampling.top_p < 1e-3


async def test_the_next_turn_sends_the_generated_ids(folder: Path) -> None:
    odd = byte_level(()).encode("the hall", add_special_tokens=False).ids  # not how the tokenizer says it
    async with running(folder, answering([*odd, END])) as rig:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "m", "messages": messages}
        headers = {"x-segue-token-ids": "1"}
        first = (await rig.http.post("/v1/chat/completions", json=body, headers=headers)).json()
        assert first["segue"]["token_ids"] == [*odd, END]
        messages += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
        told = (await rig.http.post("/tokenize", json=body)).json()
        second = (await rig.http.post("/v1/chat/completions", json=body, headers=headers)).json()
        spliced = first["segue"]["prompt_token_ids"] + odd
        assert second["segue"]["spliced_tokens"] == told["spliced_tokens"] == len(spliced)
        assert second["segue"]["prompt_token_ids"][: len(spliced)] == spliced
        assert list(rig.router.exchanges[1].submit.request.tokens) == told["tokens"]
        assert rig.ingress.api.metrics.counters.memo_hits == 1  # tokenizing is not counted
        streamed = events((await rig.http.post("/v1/chat/completions", json=body | {"stream": True})).text)
        assert streamed[-1] == "[DONE]"


async def test_models_and_tokenize(folder: Path) -> None:
    async with running(folder, answering(HELLO)) as rig:
        models = (await rig.http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["m"]
        assert (await rig.http.get("/v1/models/m")).json() == models["data"][0]
        tokens = (await rig.http.post("/tokenize", json={"model": "m", "prompt": "hall"})).json()
        assert (tokens["tokens"], tokens["count"]) == ([BOS, *ids_of("hall")], 1 + len(ids_of("hall")))
        chat = {"model": "m", "messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]},
                                           {"role": "user", "content": "y"}]}  # fmt: skip
        text = "<bos><start_of_turn>user\nx\n\ny<end_of_turn>\n<start_of_turn>model\n"
        expected = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert (await rig.http.post("/tokenize", json=chat)).json()["tokens"] == expected
        assert (await rig.http.get("/healthz")).status_code == 200
        await rig.at_rest()


async def test_names_come_and_go_with_the_catalog(folder: Path) -> None:
    from tests.ingress.rig import eventually

    async with running(folder, answering(HELLO)) as rig:
        rig.catalog.names = ["m", "unknown here"]
        asked = rig.catalog.asked
        await eventually(lambda: rig.catalog.asked > asked + 1, "asked again")
        assert [one["id"] for one in (await rig.http.get("/v1/models")).json()["data"]] == ["m"]
        rig.catalog.names = []
        await eventually(lambda: not rig.ingress.api.directory.all(), "name gone")
        assert (await rig.chat()).status_code == 404
        await eventually(lambda: rig.ingress.api.why_not_ready == "no model is served", "not ready")
        assert (await rig.http.get("/readyz")).status_code == 503
        rig.catalog.names = ["m"]
        await eventually(lambda: not rig.ingress.api.why_not_ready, "ready again")
        assert (await rig.chat()).status_code == 200


async def test_serving_goes_on_without_the_catalog(folder: Path) -> None:
    from tests.ingress.rig import eventually

    async with running(folder, answering(HELLO)) as rig:
        await rig.catalog.stop()
        failures = rig.ingress.api.directory.counters.failures
        await eventually(lambda: rig.ingress.api.directory.counters.failures > failures + 1, "catalog missed")
        assert (await rig.chat()).status_code == 200


async def test_api_keys_make_tenants(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys]\nsk-a = "alice"\nsk-b = "bob"\n')
    async with running(folder, answering(HELLO), keys_file=keys) as rig:
        for key, status in ((None, 401), ("sk-c", 401), ("sk-a", 200), ("sk-b", 200)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            answer = await rig.http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert "sk-" not in answer.text
        requests = [exchange.submit.request for exchange in rig.router.exchanges]
        assert [request.tenant for request in requests] == ["alice", "bob"]
        assert [request.tenant_salt for request in requests] == [
            salt(name, bytes.fromhex(SECRET)) for name in ("alice", "bob")
        ]
        # Alice's turns are no use to Bob.
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the hall é🙂"},
                {"role": "user", "content": "x"}]  # fmt: skip
        for key, found in (("sk-a", True), ("sk-b", True)):
            told = await rig.http.post(
                "/tokenize", json={"model": "m", "messages": chat}, headers={"authorization": f"Bearer {key}"}
            )
            assert (told.json()["spliced_tokens"] > 0) is found


async def test_the_official_client(folder: Path) -> None:
    openai = pytest.importorskip("openai")
    async with running(folder, answering(HELLO)) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.base}/v1", api_key="none", max_retries=0)
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).id == "m"
        said: list[Any] = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="m", messages=said)
        assert whole.choices[0].message.content == "the hall é🙂"
        assert whole.usage.prompt_tokens_details.cached_tokens > 0
        # Given back as the client's own object, as people do.
        again = [*said, whole.choices[0].message, {"role": "user", "content": "x"}]
        assert (await client.chat.completions.create(model="m", messages=again)).model_extra["segue"][
            "spliced_tokens"
        ] > 0
        pieces, usage = [], None
        stream = await client.chat.completions.create(
            model="m", messages=said, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(pieces) == "the hall é🙂"
        assert usage.completion_tokens == len(HELLO)
        text = await client.completions.create(model="m", prompt="a", max_tokens=2)
        assert text.choices[0].finish_reason == "length"
        stream = await client.completions.create(model="m", prompt="a", max_tokens=2, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text.choices[0].text
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=said)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=said, logprobs=True)
        assert refused.value.param == "logprobs"
        await client.close()
        await rig.at_rest()
