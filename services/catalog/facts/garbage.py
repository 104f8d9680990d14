"""Garbage records: objects that no fact names, until their bytes are gone.

A record belongs to a chunk's key, whether or not the chunk is a fact now, and lists object keys, each in one of three
states: waiting (unnamed since a time), deleting, deleted. Collection writes it in the transaction that deletes the fact
and deletes the bytes a grace period later, after the record says `deleting`. Publication takes an object that it names
out of the record, in the transaction that names it; it is refused while the object is `deleting`, and asks the store
again where it is `deleted`. The record outlives the deletion by `HORIZON_MS`, longer than any publication takes: one
that saw the object before it was condemned finds the record when it writes. So no fact names bytes that go.
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
