"""POST /v1/completions. A prompt is text or token ids; several prompts are several choices of one answer."""

from __future__ import annotations

import time

from services.ingress.answering import answer_streamed, answer_whole
from services.ingress.api import Api, Exchange
from services.ingress.errors import bad_request
from services.ingress.generation import Choice, Origin, plan
from services.ingress.http_io import JsonAnswer, read_body, while_connected
from services.ingress.model_directory import ServedModel
from services.ingress.responses import Envelope
from services.ingress.schemas import CompletionBody, parse
from services.ingress.tenants import Tenant

# What the API has always had; chats go on until the model ends them.
_DEFAULT_MAX_TOKENS = 16


async def completions(api: Api, exchange: Exchange) -> JsonAnswer | None:
    tenant = exchange.tenant(api.tenants)
    body = parse(CompletionBody, await read_body(exchange.request, int(api.settings.max_body_bytes)))
    model = await api.directory.find(body.model)
    return await while_connected(exchange.receive, api.closing, _complete(api, exchange, tenant, body, model))


async def _complete(
    api: Api, exchange: Exchange, tenant: Tenant, body: CompletionBody, model: ServedModel
) -> JsonAnswer | None:
    origin = Origin(exchange.id, tenant, api.settings.request_deadline_s)
    choices: list[Choice] = []
    for index, prompt in enumerate(body.prompts):
        ids = await prompt_ids(model, prompt)
        choices.append(
            plan(body, body.max_tokens, _DEFAULT_MAX_TOKENS, model, origin, ids, model.text.stop_ids, index=index)
        )
    envelope = Envelope("completion", f"cmpl-{exchange.id}", model.name, int(time.time()))
    if body.stream:
        await answer_streamed(api, exchange, envelope, choices, body)
        return None
    _, answer = await answer_whole(api, exchange, envelope, choices)
    return answer


async def prompt_ids(model: ServedModel, prompt: str | list[int]) -> list[int]:
    """Token ids of a raw prompt; given ids are taken as they are. Raises ApiError (400)."""
    if isinstance(prompt, str):
        return await model.text.encode_prompt(prompt)
    beyond = next((token for token in prompt if token >= model.vocab_size), None)
    if beyond is not None:
        raise bad_request(
            f"Invalid 'prompt': token id {beyond} is not below the vocabulary's {model.vocab_size}.",
            "prompt",
            "invalid_value",
        )
    return prompt
