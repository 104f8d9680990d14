"""Recorded traces: what arrived when, how long, and which 512-token blocks of it are whose.

A line holds `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one per block of the input. Ids
are prefix-chained: an equal id means an equal whole prefix. Timestamps are bucketed: what bears one time is spread
evenly up to the next one, three seconds at most.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512
_BUCKET_MS = 3_000.0
SHIPPED = Path(__file__).parent / "data"


class TraceError(ValueError):
    """A trace that cannot be read: says where and what is expected."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. `blocks`: ids of its input's blocks, the last one perhaps in part."""

    at_ms: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def end(self, count: int) -> int:
        """Positions that the first `count` blocks hold; the last token is pending and never among them."""
        return min(count * BLOCK_TOKENS, self.input_tokens - 1)


def read(path: Path, limit: int | None = None) -> list[Recorded]:
    """The trace, ascending in time. Raises TraceError, OSError."""
    found: list[Recorded] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(found) == limit:
                break
            if line.strip():
                found.append(_parse(line, f"{path.name}:{number}"))
    if not found:
        raise TraceError(f"{path.name} holds no request")
    found.sort(key=lambda one: one.at_ms)
    return _spread(found)


def _parse(line: str, where: str) -> Recorded:
    try:
        row = json.loads(line)
        blocks = tuple(int(name) for name in row["hash_ids"])
        found = Recorded(float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), blocks)
    except (ValueError, TypeError, KeyError) as error:
        expected = "timestamp, input_length, output_length and hash_ids"
        raise TraceError(f"{where}: {error}; a line is a JSON object with {expected}") from error
    needed = -(-found.input_tokens // BLOCK_TOKENS)
    if found.input_tokens < 1 or found.output_tokens < 0 or len(blocks) != needed:
        raise TraceError(
            f"{where}: {found.input_tokens} input tokens with {len(blocks)} block ids: expected at least one token and "
            f"an id for every {BLOCK_TOKENS} of them ({needed})"
        )
    return found


def _spread(rows: Sequence[Recorded]) -> list[Recorded]:
    found: list[Recorded] = []
    start = 0
    while start < len(rows):
        at_ms = rows[start].at_ms
        end = start
        while end < len(rows) and rows[end].at_ms == at_ms:
            end += 1
        gap = min(_BUCKET_MS, rows[end].at_ms - at_ms) if end < len(rows) else _BUCKET_MS
        for index in range(start, end):
            row = rows[index]
            spread = at_ms + gap * (index - start) / (end - start)
            found.append(Recorded(spread, row.input_tokens, row.output_tokens, row.blocks))
        start = end
    return found


def scaled(rows: Sequence[Recorded], factor: float) -> list[Recorded]:
    """The same with every time multiplied."""
    return [Recorded(row.at_ms * factor, row.input_tokens, row.output_tokens, row.blocks) for row in rows]
