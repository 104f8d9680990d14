"""The pool's knobs as text: how an operator names and gives them, and reads them back."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import Any

from libs.pool.knobs import PolicyError, PoolPolicy

_TRUTH = {"true": True, "false": False}


class KnobError(ValueError):
    """A name or a value that cannot be. `knob` is the name; `remedy` what to give instead."""

    def __init__(self, knob: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.knob, self.remedy = knob, remedy


def spelled(policy: PoolPolicy) -> dict[str, str]:
    """Every knob, as `changed` takes it."""
    return {field.name: _text(getattr(policy, field.name)) for field in fields(policy)}


def changed(policy: PoolPolicy, knobs: Mapping[str, str]) -> PoolPolicy:
    """The policy with these knobs. Raises KnobError."""
    known = spelled(policy)
    for name in knobs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "GetPool shows every knob"
            raise KnobError(name, f"the pool has no knob {name!r}", remedy)
    try:
        given: dict[str, Any] = {name: _value(name, getattr(policy, name), text) for name, text in knobs.items()}
        return replace(policy, **given)
    except PolicyError as error:
        raise KnobError(error.field, str(error), "nothing was changed") from None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(name: str, now: object, text: str) -> object:
    """Of the type that the knob has now."""
    text = text.strip()
    try:
        if isinstance(now, bool):
            return _TRUTH[text.lower()]
        if isinstance(now, Enum):
            return type(now)(text)
        if isinstance(now, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return float(text) if isinstance(now, float) else int(text)
    except (KeyError, ValueError):
        wanted = _wanted(now)
        raise KnobError(name, f"{name} = {text!r} is not {wanted}", f"give {wanted}") from None


def _wanted(now: object) -> str:
    if isinstance(now, bool):
        return "true or false"
    if isinstance(now, Enum):
        return "one of " + ", ".join(str(member.value) for member in type(now))
    return "a number" if isinstance(now, float) else "a whole number"
