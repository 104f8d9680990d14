"""Frozen dataclasses from JSON and back, strictly: what is unknown, missing or of another type is an error with a path.

Defaults are left out when written, so that a saved schedule shows what is special about it.
"""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from libs.simulation.schedule import Schedule, ScheduleError, check

T = TypeVar("T")


def parse(text: str) -> Schedule:
    """A schedule file's text. Raises ScheduleError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ScheduleError("file", f"is no JSON: {error}") from error
    schedule: Schedule = _load(Schedule, value, "schedule")
    return check(schedule)


def render(schedule: Schedule) -> str:
    """The text `parse` reads."""
    return json.dumps(_plain(schedule), indent=1) + "\n"


def _load(kind: Any, value: Any, where: str) -> Any:
    if typing.get_origin(kind) is tuple:
        if type(value) is not list:
            raise ScheduleError(where, f"is a list, not {value!r}")
        item = typing.get_args(kind)[0]
        return tuple(_load(item, part, f"{where}[{index}]") for index, part in enumerate(value))
    if isinstance(kind, types.UnionType):
        return None if value is None else _load(typing.get_args(kind)[0], value, where)
    if is_dataclass(kind):
        return _object(typing.cast(type, kind), value, where)
    if issubclass(kind, Enum):
        known = [member.value for member in kind]
        if value not in known:
            raise ScheduleError(where, f"is {value!r}: one of {', '.join(map(str, known))}")
        return kind(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ScheduleError(where, f"is {value!r}, not a finite {kind.__name__}")
    return value


def _object(kind: type[T], value: Any, where: str) -> T:
    if type(value) is not dict:
        raise ScheduleError(where, f"is an object, not {value!r}")
    hints = typing.get_type_hints(kind)
    names = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(value) - set(names))
    if unknown:
        raise ScheduleError(where, f"has no {', '.join(unknown)}; it has {', '.join(names)}")
    for name, field in names.items():
        if name not in value and field.default is MISSING:
            raise ScheduleError(where, f"needs {name}")
    return kind(**{name: _load(hints[name], part, f"{where}.{name}") for name, part in value.items()})


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in fields(value)
            if getattr(value, field.name) != field.default
        }
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value.value if isinstance(value, Enum) else value
