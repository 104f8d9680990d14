"""Choices out, whole or streamed: what follows once prompts are token ids."""

from __future__ import annotations

from collections.abc import Sequence

from services.ingress.api import Api, Exchange
from services.ingress.generation import Choice, Generated, generate_all
from services.ingress.http_io import JsonAnswer
from services.ingress.responses import Envelope, served
from services.ingress.schemas import GenerationBody


async def answer_whole(
    api: Api, exchange: Exchange, envelope: Envelope, choices: Sequence[Choice]
) -> tuple[list[Generated], JsonAnswer]:
    """Generates all choices and then answers."""

    async def show(_index: int, _text: str) -> None:
        """Kept by the choice itself."""

    generated = await generate_all(api.upstream, choices, show, api.metrics)
    body = envelope.whole(generated, served(generated, exchange.wants_token_ids))
    return generated, JsonAnswer(body, headers=exchange.headers)


async def answer_streamed(
    api: Api, exchange: Exchange, envelope: Envelope, choices: Sequence[Choice], body: GenerationBody
) -> list[Generated]:
    """Generates all choices, sending text as it comes; then how each ended, usage if asked for, and `[DONE]`."""
    stream = exchange.open_stream(api.settings.client_stall_s)
    opened: set[int] = set()
    # With include_usage every chunk has the field; only the last one has a value.
    extra = {"usage": None} if body.include_usage else {}

    async def open_choice(index: int) -> None:
        if index not in opened:
            opened.add(index)
            if envelope.kind == "chat":
                await stream.data(envelope.opening(index) | extra)

    async def show(index: int, text: str) -> None:
        await open_choice(index)
        await stream.data(envelope.piece(index, text) | extra)

    generated = await generate_all(api.upstream, choices, show, api.metrics)
    for index, one in enumerate(generated):
        await open_choice(index)
        await stream.data(envelope.closing(index, one.choice.text.finish_reason) | extra)
    if body.include_usage:
        await stream.data(envelope.final_usage(generated, served(generated, exchange.wants_token_ids)))
    await stream.text("[DONE]")
    await stream.close()
    return generated
