"""The official `openai` client against the cluster: models, chat and completions, streamed and not, usage, errors."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

import openai
from openai import AsyncOpenAI

from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage, on

CLAIM = Claim(
    "2-openai-client",
    "the official openai client works: models, chat and completions, streamed and not, usage, errors",
    seed=7,
)
_MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
_PROMPT = "The old man looked at the sea and"
_TOKENS = 24


@dataclass(frozen=True)
class _Got:
    text: str
    finish: str | None
    prompt: int
    completion: int
    total: int


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    checks = Checks()
    async with on(stage) as at, AsyncOpenAI(base_url=at.cluster.base_url, api_key="none", max_retries=0) as client:
        listed = [model.id async for model in client.models.list()]
        checks.equal("models.list", [*listed], [at.model])
        checks.equal("models.retrieve", (await client.models.retrieve(at.model)).id, at.model)
        for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": CLAIM.seed}):
            kind = "greedy" if sampling["temperature"] == 0 else "sampled"
            whole = await _chat(client, at.model, sampling)
            _sound(checks, f"chat, {kind}", whole)
            streamed = await _chat_streamed(client, at.model, sampling)
            checks.equal(f"chat streamed as whole, {kind}", streamed.__dict__, whole.__dict__)
            whole = await _completion(client, at.model, sampling)
            _sound(checks, f"completion, {kind}", whole)
            streamed = await _completion_streamed(client, at.model, sampling)
            checks.equal(f"completion streamed as whole, {kind}", streamed.__dict__, whole.__dict__)
        await _errors(checks, client, at.model)
    return checks.outcome({"openai": openai.__version__, "model": at.model})


def _sound(checks: Checks, name: str, got: _Got) -> None:
    checks.check(f"{name}: text", got.text[:60], "some", bool(got.text))
    checks.check(f"{name}: end", got.finish, ["length", "stop"], got.finish in ("length", "stop"))
    full = got.finish == "length"
    counted = got.completion == _TOKENS if full else 0 < got.completion <= _TOKENS
    checks.check(f"{name}: completion tokens", got.completion, _TOKENS, counted)
    checks.check(f"{name}: prompt tokens", got.prompt, "> 0", got.prompt > 0)
    checks.equal(f"{name}: total tokens", got.total, got.prompt + got.completion)


async def _chat(client: AsyncOpenAI, model: str, sampling: dict[str, float]) -> _Got:
    answer = await client.chat.completions.create(
        model=model, messages=_MESSAGES, max_completion_tokens=_TOKENS, **sampling
    )
    choice, usage = answer.choices[0], answer.usage
    assert usage is not None
    return _Got(
        choice.message.content or "",
        choice.finish_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
    )


async def _chat_streamed(client: AsyncOpenAI, model: str, sampling: dict[str, float]) -> _Got:
    stream = await client.chat.completions.create(
        model=model,
        messages=_MESSAGES,
        max_completion_tokens=_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        **sampling,
    )
    text, finish, usage = "", None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert usage is not None
    return _Got(text, finish, usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


async def _completion(client: AsyncOpenAI, model: str, sampling: dict[str, float]) -> _Got:
    answer = await client.completions.create(model=model, prompt=_PROMPT, max_tokens=_TOKENS, **sampling)
    choice, usage = answer.choices[0], answer.usage
    assert usage is not None
    return _Got(choice.text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


async def _completion_streamed(client: AsyncOpenAI, model: str, sampling: dict[str, float]) -> _Got:
    stream = await client.completions.create(
        model=model,
        prompt=_PROMPT,
        max_tokens=_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        **sampling,
    )
    text, finish, usage = "", None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    assert usage is not None
    return _Got(text, finish, usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


async def _errors(checks: Checks, client: AsyncOpenAI, model: str) -> None:
    chat = client.chat.completions.create
    error = await _raised(chat(model="no-such-model", messages=_MESSAGES))
    checks.equal("unknown model", _told(error), ["NotFoundError", 404, "model_not_found", "model"])
    error = await _raised(chat(model=model, messages=_MESSAGES, max_tokens=10_000_000))
    checks.equal("over the context", _told(error), ["BadRequestError", 400, "context_length_exceeded", "max_tokens"])
    error = await _raised(client.models.retrieve("no-such-model"))
    checks.equal("unknown model, retrieved", _told(error)[:2], ["NotFoundError", 404])


async def _raised(call: Awaitable[object]) -> openai.APIStatusError | None:
    try:
        await call
    except openai.APIStatusError as error:
        return error
    return None


def _told(error: openai.APIStatusError | None) -> list[str | int | None]:
    if error is None:
        return ["no error"]
    return [type(error).__name__, error.status_code, error.code, error.param]
