"""Chat templates: the model's own Jinja source, rendered as transformers renders it.

The environment is that of `apply_chat_template` (sandboxed, immutable, trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escaping, `{% generation %}`), so that a conversation becomes
the text its model was trained on. Templates are code from elsewhere: they see plain strings, lists and mappings only,
and are not given a clock or the file system beyond `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]
"""`role` and `content`."""


class TemplateRefusedError(ValueError):
    """The template does not take this conversation; the text says why, in the template's own words."""


class InvalidTemplateError(ValueError):
    """The source is not a template."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: the tokenizer's named special tokens, e.g. `bos_token`. Raises InvalidTemplateError."""
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidTemplateError(f"line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation's text, with the opening of the assistant's turn if asked for. Raises
        TemplateRefusedError."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
            raise TemplateRefusedError(str(error) or type(error).__name__) from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it as an instance variable)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as transformers has it


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
