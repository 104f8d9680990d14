"""Values in etcd, to and from bytes. Deterministic: equal facts have equal bytes."""

from __future__ import annotations

import json
from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def pack(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def unpack(kind: type[M], value: bytes) -> M:
    return kind.FromString(value)


def field(number: int, content: bytes) -> bytes:
    """Text, bytes or a serialized message as field `number` (below 16) of a message: tag, length, content."""
    size = len(content)
    if size < 0x80:
        return b"%c%c%b" % (number << 3 | 2, size, content)
    if size < 0x4000:
        return b"%c%c%c%b" % (number << 3 | 2, size & 0x7F | 0x80, size >> 7, content)
    length = b""
    while size > 0x7F:
        length += b"%c" % (size & 0x7F | 0x80)
        size >>= 7
    return b"%c%b%c%b" % (number << 3 | 2, length, size, content)


def pack_list(items: list[str]) -> bytes:
    return json.dumps(items, separators=(",", ":")).encode()


def unpack_list(value: bytes) -> list[str]:
    items = json.loads(value)
    return [str(item) for item in items]


def pack_number(number: int) -> bytes:
    return b"%d" % number


def unpack_number(value: bytes) -> int:
    return int(value)
