"""What clients may send, field by field. Everything else is refused by name: an option that is silently ignored is a
wrong answer that nobody notices.

Values are as the OpenAI API has them. A field may be null where that API has it optional; null means "not given".
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from services.ingress.errors import ApiError, bad_request

R = TypeVar("R", bound=BaseModel)

Number = Annotated[StrictFloat | StrictInt, Field(allow_inf_nan=False)]
TokenId = Annotated[StrictInt, Field(ge=0, le=0xFFFF_FFFF)]
StopString = Annotated[StrictStr, Field(min_length=1, max_length=1_000)]

_MAX_PROMPTS = 16


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(_Body):
    include_usage: StrictBool | None = None


class Message(_Body):
    """Text only. `refusal`, `tool_calls` and the like may be there as null, as clients send back what they were
    given."""

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[TextPart], Field(min_length=1)]
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class TextPart(_Body):
    type: Literal["text"]
    text: StrictStr


class GenerationBody(_Body):
    """What chat and completions share."""

    model: Annotated[StrictStr, Field(min_length=1)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    n: Literal[1] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    """Accepted and ignored: a client's word is no tenant."""

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: give either max_tokens or max_completion_tokens, not both")
        return self


class CompletionBody(GenerationBody):
    prompt: (
        StrictStr
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[StrictStr], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=_MAX_PROMPTS)]
    )

    @property
    def prompts(self) -> tuple[str | list[int], ...]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (self.prompt,)
        return tuple(self.prompt)


class TokenizeBody(_Body):
    model: Annotated[StrictStr, Field(min_length=1)]
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


def parse(shape: type[R], raw: bytes) -> R:
    """The request body. Raises ApiError (400) naming the field."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(content, dict):
        raise bad_request("The body is not a JSON object.", code="invalid_json")
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_request("The body holds half a surrogate pair, which is no text.", code="invalid_json") from None
    try:
        return shape.model_validate(content)
    except ValidationError as error:
        raise _refusal(error, content) from None


def _refusal(error: ValidationError, content: dict[str, Any]) -> ApiError:
    """The first problem, unknown fields before others: they are what a client has to learn first."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = min(problems, key=lambda one: one["type"] != "extra_forbidden")
    if not problem["loc"]:  # a rule over several fields; its text begins with the field's name
        name, _, rest = problem["msg"].removeprefix("Value error, ").partition(": ")
        return bad_request(f"Invalid '{name}': {rest}.", name, "invalid_value")
    # Of a union pydantic reports every branch, with the branch's label in the path; the client knows its own path only.
    path = _path(problem["loc"], content, problem["type"] == "missing")
    if problem["type"] == "extra_forbidden":
        return bad_request(
            f"Unsupported parameter: '{path}' is not supported here; leave it out.", path, "unsupported_parameter"
        )
    if problem["type"] == "missing":
        return bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    if path == "n":
        return bad_request(
            "Unsupported value: 'n' must be 1; send the request several times.", "n", "unsupported_value"
        )
    said = sorted({one["msg"] for one in problems if _path(one["loc"], content, False) == path})
    return bad_request(f"Invalid '{path}': {'; or '.join(said)}.", path, "invalid_value")


def _path(location: tuple[int | str, ...], content: object, missing: bool) -> str:
    """`messages[0].content`: the part of a pydantic location that exists in what was sent, and the missing step."""
    path, at = "", content
    for index, step in enumerate(location):
        absent = missing and index == len(location) - 1
        if isinstance(step, int) and isinstance(at, list):
            path, at = f"{path}[{step}]", at[step] if step < len(at) else None
        elif isinstance(step, str) and isinstance(at, dict) and (step in at or absent):
            path, at = f"{path}.{step}" if path else step, at.get(step)
    return path
