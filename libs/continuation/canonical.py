"""Canonical JSON: one text per value, so that a hash over it identifies the value.

FROZEN: object keys sorted by code point, separators "," and ":" without spaces, non-ASCII escaped as \\uXXXX,
integers in decimal, floats in the shortest form that round-trips (Python's repr), no NaN or infinity. 1 and 1.0 are
different values: a descriptor gives each field one type.
"""

import json
import math
from collections.abc import Mapping, Sequence

from libs.continuation.errors import IdentityError

JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]


def canonical_json(value: JsonValue) -> str:
    """The one JSON text of a value by the module's frozen rules.

    Raises:
        IdentityError: NaN or infinity, a key that is not a string (JSON would turn 1 and "1" into one key), or a value
            JSON does not have.
    """
    _check_json(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _check_json(value: object, path: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise IdentityError(f"{path} has the key {key!r}: JSON keys must be strings")
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise IdentityError(f"{path} is {value}: JSON has no such number")
    elif value is not None and not isinstance(value, (str, int)):
        raise IdentityError(f"{path} is a {type(value).__name__}: pass null, bool, numbers, strings, lists and objects")
