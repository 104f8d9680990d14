"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from services.ingress.answering import answer_streamed, answer_whole
from services.ingress.api import Api, Exchange
from services.ingress.errors import bad_request
from services.ingress.generation import Origin, plan
from services.ingress.http_io import JsonAnswer, read_body, while_connected
from services.ingress.memo import Scope
from services.ingress.metrics import RequestCounters
from services.ingress.model_directory import ServedModel
from services.ingress.prompts import ChatPrompt, NoChatTemplateError, chat_prompt, remember_turn
from services.ingress.responses import Envelope
from services.ingress.schemas import ChatBody, Message, parse
from services.ingress.template import Message as TemplateMessage
from services.ingress.template import TemplateRefusedError
from services.ingress.tenants import Tenant


async def chat_completions(api: Api, exchange: Exchange) -> JsonAnswer | None:
    tenant = exchange.tenant(api.tenants)
    body = parse(ChatBody, await read_body(exchange.request, int(api.settings.max_body_bytes)))
    model = await api.directory.find(body.model)
    return await while_connected(exchange.receive, api.closing, _chat(api, exchange, tenant, body, model))


async def _chat(api: Api, exchange: Exchange, tenant: Tenant, body: ChatBody, model: ServedModel) -> JsonAnswer | None:
    scope = Scope(tenant.id, model.name)
    prompt = await render(api, model, scope, body.messages)
    _count(api.metrics.counters, prompt)
    named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    choice = plan(
        body,
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        api.settings.default_max_tokens,
        model,
        Origin(exchange.id, tenant, api.settings.request_deadline_s),
        prompt.ids,
        model.text.chat_stop_ids,
        budget_param=named if named in body.model_fields_set else "messages",
        spliced=prompt.spliced,
    )
    envelope = Envelope("chat", f"chatcmpl-{exchange.id}", model.name, int(time.time()))
    answer = None
    if body.stream:
        await answer_streamed(api, exchange, envelope, [choice], body)
    else:
        _, answer = await answer_whole(api, exchange, envelope, [choice])
    remember_turn(model.text, api.memo, scope, prompt, choice.text.text, choice.text.ids)
    return answer


async def render(api: Api, model: ServedModel, scope: Scope, messages: Sequence[Message]) -> ChatPrompt:
    """The prompt of a conversation. Raises ApiError (400) if the template does not take it."""
    try:
        return await chat_prompt(model.text, api.memo, scope, [_plain(message) for message in messages])
    except (NoChatTemplateError, TemplateRefusedError) as error:
        raise bad_request(f"Invalid 'messages': {error}.", "messages", "invalid_value") from None


def _plain(message: Message) -> TemplateMessage:
    # Templates know no `developer`: it is OpenAI's newer name for `system`.
    return {"role": "system" if message.role == "developer" else message.role, "content": message.text}


def _count(counters: RequestCounters, prompt: ChatPrompt) -> None:
    counters.memo_hits += prompt.entry is not None
    counters.memo_misses += prompt.entry is None and any(said["role"] == "assistant" for said in prompt.messages)
    counters.memo_spliced_tokens += prompt.spliced
