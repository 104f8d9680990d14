"""A trace as text: one line per event, then one per effect. Defaults are left out, long lists shortened.

Made of values alone, in the order things happened: the same schedule gives the same bytes in any process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum

Entry = tuple[float, str, object, Sequence[object]]  # time, who, event, effects

_MANY = 6


def lines(entries: Iterable[Entry]) -> Iterator[str]:
    """Rendered."""
    for now, who, event, effects in entries:
        yield f"{now:11.3f} {who:<5} {value(event)}"
        for effect in effects:
            yield f"{'':11} {who:<5}   → {value(effect)}"


def value(one: object) -> str:
    """One value, compactly."""
    if isinstance(one, Enum):
        return one.name if isinstance(one, int) else str(one.value)
    if is_dataclass(one) and not isinstance(one, type):
        parts = []
        for field in fields(one):
            part = getattr(one, field.name)
            if field.default is MISSING or part != field.default:
                parts.append(f"{field.name}={value(part)}")
        return f"{type(one).__name__}({', '.join(parts)})"
    if isinstance(one, tuple):
        if len(one) > _MANY and all(isinstance(part, int) for part in one):
            return f"[{len(one)}: {one[0]}, {one[1]}, … {one[-1]}]"
        return f"[{', '.join(map(value, one))}]"
    if isinstance(one, str):
        return one if len(one) <= 16 else f"{one[:12]}…"
    return f"{one:.3f}".rstrip("0").rstrip(".") if isinstance(one, float) else str(one)
