"""How one class of values is translated: its fields by form, and the two functions compiled from them. Pure.

Like `dataclasses` makes `__init__`, this makes for every class the source of a function that tests the types of all
fields at once and names the arguments of its message's constructor (nested ones as dictionaries), and of one that reads
them back: half the time of a loop over fields, for the busiest code of a router. What goes into the source is names of
our own classes' fields and numbers, nothing from outside.

The compiled test only says that something is amiss; `wrong` says what, by its path.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any

from google.protobuf.message import Message

from libs.controller.errors import EncodingError, LocalOnlyError

_SHARED = 4_096  # values of a class that are kept


class UnfitError(Exception):
    """A value is not of its field's type."""


class Form(Enum):
    """Of a field."""

    SCALAR = "scalar"
    ENUM = "enum"
    NESTED = "nested"
    SCALARS = "scalars"
    NESTEDS = "nesteds"
    PAIRS = "pairs"  # (int, float), ascending, here; a map there


@dataclass(frozen=True, slots=True)
class Part:
    """One field. `kind`: of its value, or of the items of its tuple."""

    name: str
    form: Form
    kind: type

    @property
    def allowed(self) -> tuple[type, ...]:
        """Types of a scalar or an item."""
        return (int, float) if self.kind is float else (self.kind,)


def part(name: str, hint: Any) -> Part:
    """By the field's type hint. Raises TypeError for a union: no field of a message holds one."""
    if typing.get_origin(hint) is tuple:
        item, _ = typing.get_args(hint)
        if typing.get_origin(item) is tuple:
            return Part(name, Form.PAIRS, tuple)
        return Part(name, Form.NESTEDS if is_dataclass(item) else Form.SCALARS, item)
    if isinstance(hint, types.UnionType):
        raise TypeError(f"{name}: unions have no field to go to")
    if is_dataclass(hint):
        return Part(name, Form.NESTED, typing.cast(type, hint))
    return Part(name, Form.ENUM if issubclass(hint, IntEnum) else Form.SCALAR, hint)


class _Members(dict[int, IntEnum]):
    """Of an enum by number; a number this version does not know is member 0."""

    def __init__(self, kind: type[IntEnum]) -> None:
        super().__init__((member.value, member) for member in kind)
        first = kind["INTERNAL"] if "INTERNAL" in kind.__members__ else next(iter(kind))
        self._unknown = self.get(0, first)

    def __missing__(self, number: int) -> IntEnum:
        return self._unknown


class Shape:
    """Of one class. `tell(value)`: the arguments of its message's constructor, or UnfitError; `read(message,
    **outside)`: the value, `outside` being the fields the message does not hold itself.

    `known`: the shapes of the classes it nests; `outside`: there are such fields; `shared`: of values read of late,
    equal ones are one object.
    """

    def __init__(
        self,
        kind: type,
        proto: type[Message],
        parts: Sequence[Part],
        known: Mapping[type, Shape],
        outside: bool,
        shared: bool,
    ) -> None:
        self.kind, self.proto, self.parts, self._known = kind, proto, parts, known
        made = lru_cache(_SHARED)(kind) if shared else kind
        self._scope: dict[str, Any] = {"Kind": kind, "made": made, "UnfitError": UnfitError}
        tell, read = "\n".join(self._tell()), "\n".join(self._read(outside))
        exec(compile(f"{tell}\n{read}\n", f"<{kind.__name__} on the wire>", "exec"), self._scope)  # noqa: S102
        self.tell: Callable[[Any], dict[str, Any]] = self._scope["tell"]
        self.read: Callable[..., Any] = self._scope["read"]

    def _tell(self) -> Iterator[str]:
        tests, told = ["type(value) is Kind"], []
        for index, one in enumerate(self.parts):
            item, scope = f"v{index}", self._scope
            scope[f"Kind{index}"] = one.kind
            match one.form:
                case Form.SCALAR | Form.ENUM:
                    tests.append(" or ".join(f"type({item}) is {kind}" for kind in _names(one, index)))
                    told.append(f"{one.name!r}: {item}")
                case Form.NESTED:
                    scope[f"tell{index}"] = self._known[one.kind].tell
                    told.append(f"{one.name!r}: tell{index}({item})")
                case Form.NESTEDS:
                    scope[f"tell{index}"] = self._known[one.kind].tell
                    tests.append(f"type({item}) is tuple")
                    told.append(f"{one.name!r}: [tell{index}(one) for one in {item}]")
                case Form.SCALARS:
                    scope[f"fit{index}"] = set(one.allowed).issuperset
                    tests.append(f"type({item}) is tuple and (not {item} or fit{index}(map(type, {item})))")
                    told.append(f"{one.name!r}: {item}")
                case Form.PAIRS:
                    scope["are_pairs"] = are_pairs
                    tests.append(f"type({item}) is tuple and are_pairs({item})")
                    told.append(f"{one.name!r}: dict({item})")
        yield "def tell(value):"
        yield f"    if not ({tests[0]}):"
        yield "        raise UnfitError"
        for index, one in enumerate(self.parts):
            yield f"    v{index} = value.{one.name}"
        if tests[1:]:
            yield f"    if not ({' and '.join(f'({test})' for test in tests[1:])}):"
            yield "        raise UnfitError"
        yield f"    return {{{', '.join(told)}}}"

    def _read(self, outside: bool) -> Iterator[str]:
        found = []
        for index, one in enumerate(self.parts):
            item, scope = f"message.{one.name}", self._scope
            match one.form:
                case Form.SCALAR:
                    pass
                case Form.ENUM:
                    scope[f"members{index}"] = _Members(one.kind)
                    item = f"members{index}[{item}]"
                case Form.NESTED:
                    scope[f"read{index}"] = self._known[one.kind].read
                    item = f"read{index}({item})"
                case Form.NESTEDS:
                    scope[f"read{index}"] = self._known[one.kind].read
                    item = f"tuple([read{index}(one) for one in {item}])"
                case Form.SCALARS:
                    item = f"tuple({item})"
                case Form.PAIRS:
                    item = f"tuple(sorted({item}.items()))"
            found.append(f"{one.name}={item}" if outside else item)
        yield f"def read(message{', **outside' if outside else ''}):"
        yield f"    return made({', '.join([*found, *(['**outside'] if outside else [])])})"

    def wrong(self, value: Any, path: str) -> EncodingError | None:
        """What is wrong with a value that was refused, if anything is."""
        if type(value) is not self.kind:
            return LocalOnlyError(path, value)
        found = (self._wrong(one, getattr(value, one.name), f"{path}.{one.name}") for one in self.parts)
        return next((error for error in found if error is not None), None)

    def _wrong(self, one: Part, item: Any, path: str) -> EncodingError | None:
        if one.form is Form.NESTED:
            return self._known[one.kind].wrong(item, path)
        if one.form in (Form.SCALAR, Form.ENUM):
            error: EncodingError | None = _typed(item, one.allowed, path)
        elif type(item) is not tuple:
            error = LocalOnlyError(path, item)
        else:
            error = next((wrong for wrong in self._wrong_items(one, item, path) if wrong is not None), None)
        if error is None and one.form is not Form.NESTEDS:
            try:
                self.proto(**{one.name: dict(item) if one.form is Form.PAIRS else item})
            except (ValueError, TypeError) as refusal:
                return EncodingError(path, f"is {item!r}, which its field cannot hold: {refusal}")
        return error

    def _wrong_items(self, one: Part, items: Sequence[Any], path: str) -> Iterator[EncodingError | None]:
        for index, item in enumerate(items):
            where = f"{path}[{index}]"
            match one.form:
                case Form.NESTEDS:
                    yield self._known[one.kind].wrong(item, where)
                case Form.PAIRS:
                    yield None if are_pairs((item,)) else LocalOnlyError(where, item)
                case _:
                    yield _typed(item, one.allowed, where)


def are_pairs(items: tuple[Any, ...]) -> bool:
    """Whether all are (int, float)."""
    return all(type(one) is tuple and [*map(type, one)] in ([int, float], [int, int]) for one in items)


def _names(one: Part, index: int) -> list[str]:
    return ["float", "int"] if one.kind is float else [f"Kind{index}"]


def _typed(item: Any, allowed: tuple[type, ...], path: str) -> EncodingError | None:
    return None if type(item) in allowed else LocalOnlyError(path, item)
