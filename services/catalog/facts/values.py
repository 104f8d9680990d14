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


def pack_list(items: list[str]) -> bytes:
    return json.dumps(items, separators=(",", ":")).encode()


def unpack_list(value: bytes) -> list[str]:
    items = json.loads(value)
    return [str(item) for item in items]


def pack_number(number: int) -> bytes:
    return b"%d" % number


def unpack_number(value: bytes) -> int:
    return int(value)
