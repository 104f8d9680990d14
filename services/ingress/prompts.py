"""From a conversation to the token ids of its prompt, with the ids of remembered turns spliced in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.ingress.detokenizer import Detokenizer
from services.ingress.memo import Entry, Scope, TurnMemo
from services.ingress.template import Message, TemplateRefusedError
from services.ingress.text_model import TextModel


class NoChatTemplateError(ValueError):
    """The model has no chat template."""


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation: `ids` stand for `text`."""

    messages: tuple[Message, ...]
    text: str
    ids: list[int]
    entry: Entry | None
    """The remembered turn its ids begin with."""
    spliced: int
    """How many ids came from it."""


async def chat_prompt(model: TextModel, memo: TurnMemo, scope: Scope, messages: Sequence[Message]) -> ChatPrompt:
    """Renders and tokenizes. Raises NoChatTemplateError, TemplateRefusedError."""
    if model.template is None:
        raise NoChatTemplateError(f"model {model.name} has no chat template: use /v1/completions, or configure one")
    text = model.template.render(messages, add_generation_prompt=True)
    found = memo.longest(scope, text, model.boundary)
    if found is None:
        return ChatPrompt(tuple(messages), text, await model.encode(text), None, 0)
    ids = found.ids + await model.encode(text[found.length :])
    return ChatPrompt(tuple(messages), text, ids, found.entry, len(found.ids))


def remember_turn(
    model: TextModel, memo: TurnMemo, scope: Scope, prompt: ChatPrompt, answer: str, generated: Sequence[int]
) -> bool:
    """Notes which ids stand behind the conversation up to the end of `answer`, as it was given to the client.

    `generated` are the ids the model produced; the answer may be shorter than their text (a stop string, a stop
    token), and the template may show it trimmed. Whether something could be noted without changing the text.
    """
    if model.template is None or model.boundary is None:
        return False
    try:
        shown = model.template.render(
            [*prompt.messages, {"role": "assistant", "content": answer}], add_generation_prompt=False
        )
    except TemplateRefusedError:
        return False
    if not shown.startswith(prompt.text):
        return False  # a template that shows past turns otherwise than the one being generated
    kept, text = _longest_shown(model, generated, shown[len(prompt.text) :])
    if kept is None:
        return False
    memo.remember(scope, prompt.text + text, [*prompt.ids, *generated[:kept]], prompt.entry)
    return True


def _longest_shown(model: TextModel, generated: Sequence[int], shown: str) -> tuple[int | None, str]:
    """How many generated ids have a text that `shown` begins with and a boundary follows, and that text."""
    assert model.boundary is not None
    detokenizer, at = Detokenizer(model.bytes_of), 0
    best: tuple[int | None, str] = (None, "")
    for count in range(len(generated) + 1):
        if count:
            token = generated[count - 1]
            if not model.bytes_of[token]:
                break  # a special token: it has no text to be shown, and the template writes its own
            piece = detokenizer.feed(token)
            if not shown.startswith(piece, at):
                break
            at += len(piece)
        if detokenizer.complete and model.boundary.match(shown, at):
            best = (count, shown[:at])
    return best
