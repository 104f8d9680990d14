"""Hundreds of point and prefix reads at the least cost in Python: what a look-up's time consists of.

A read-only TxnRequest is a repetition of one shape, so it is written byte by byte instead of through two message
objects a read; of the reply only what a caller asks for is taken out of the parsed message. Field numbers: etcd's
rpc.proto (TxnRequest.success = 2, RequestOp.request_range = 1, RangeRequest.key = 1, .range_end = 2); a test holds the
bytes to the generated messages'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.catalog.etcd.transaction import prefix_end


def request(keys: Sequence[bytes], prefixes: Sequence[bytes] = ()) -> bytes:
    """A serialized TxnRequest that reads the keys, then everything under each of the prefixes."""
    heads: dict[int, bytes] = {}
    parts: list[bytes] = []
    for key in keys:
        head = heads.get(len(key))
        if head is None:
            head = heads[len(key)] = _head(b"\x0a" + _varint(len(key)), len(key))
        parts += (head, key)
    around: dict[int, tuple[bytes, bytes]] = {}
    for prefix in prefixes:
        end = prefix_end(prefix)
        shape = len(prefix) << 16 | len(end)
        if shape not in around:
            between = b"\x12" + _varint(len(end))
            rest = len(prefix) + len(between) + len(end)
            around[shape] = (_head(b"\x0a" + _varint(len(prefix)), rest), between)
        head, between = around[shape]
        parts += (head, prefix, between, end)
    return b"".join(parts)


def values(reply: Any, count: int) -> list[bytes | None]:
    """What each of the first `count` reads found, all of single keys: the value, or None."""
    responses = reply.responses if count == len(reply.responses) else reply.responses[:count]
    return [kvs[0].value if (kvs := response.response_range.kvs) else None for response in responses]


def pairs(reply: Any, skip: int) -> list[list[tuple[bytes, bytes]]]:
    """(key, value) of everything each read after the first `skip` found."""
    responses = reply.responses[skip:] if skip else reply.responses
    return [[(kv.key, kv.value) for kv in response.response_range.kvs] for response in responses]


def _head(field: bytes, rest: int) -> bytes:
    """What stands before a key in its TxnRequest. field: the key's tag and length; rest: bytes after that."""
    ranged = len(field) + rest
    operation = 1 + len(_varint(ranged)) + ranged
    return b"\x12" + _varint(operation) + b"\x0a" + _varint(ranged) + field


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
