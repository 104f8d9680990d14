"""Garbage records: objects that no fact names, until their bytes are gone.

A record belongs to a chunk's key, whether or not the chunk is a fact now, and lists object keys, each in one of three
states: waiting (unnamed since a time), deleting, deleted. Collection writes it in the transaction that deletes the fact
and deletes the bytes a grace period later, after the record says `deleting`. Publication takes an object that it names
out of the record, in the transaction that names it, but is refused from `deleting` until `HORIZON_MS` after the
deletion. That is longer than any publication takes, so that one which saw the object before it was condemned finds the
record when it writes; and longer than a request to the store can be under way that a collection sent before it lost
its lock. So no fact names bytes that go.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

HORIZON_MS = 600_000


@dataclass(frozen=True, slots=True)
class Condemned:
    """since_ms: unix ms from which on no fact named it, 0 = it may go at once; deleted_ms: when it went."""

    since_ms: int
    size: int
    deleting: bool = False
    deleted_ms: int = 0

    def forbids(self, now_ms: int) -> bool:
        """Whether nothing may name the object now."""
        return self.deleting and (not self.deleted_ms or now_ms < self.deleted_ms + HORIZON_MS)

    def is_over(self, now_ms: int) -> bool:
        """Whether the record has served its purpose."""
        return self.deleted_ms > 0 and now_ms >= self.deleted_ms + HORIZON_MS


Garbage = Mapping[str, Condemned]
"""By object key."""


def pack_garbage(garbage: Garbage) -> bytes:
    value = {
        key: {
            "since_ms": of.since_ms,
            "size": of.size,
            **({"deleting": True} if of.deleting else {}),
            **({"deleted_ms": of.deleted_ms} if of.deleted_ms else {}),
        }
        for key, of in garbage.items()
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def unpack_garbage(value: bytes) -> dict[str, Condemned]:
    return {key: Condemned(**of) for key, of in json.loads(value).items()}


def without(garbage: Garbage, keys: Collection[str]) -> dict[str, Condemned]:
    """What is left of it."""
    return {key: of for key, of in garbage.items() if key not in keys}
