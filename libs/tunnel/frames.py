"""Frame codec: bytes of ``segue.v1.Frame`` to and from checked values.

The checksum is zlib's CRC-32 over each item's u64-LE conn_id ‖ u32-LE payload length ‖ payload. It covers the items;
the sequence number is covered by the demand for the next one exactly, and the kind by the shape each kind must have.
Decoding checks everything before it returns anything, so a caller that delivers only what ``decode`` returned
delivers nothing of a corrupt frame.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from libs.contracts.segue.v1 import tunnel_pb2

from .errors import Closed, CloseReason, CorruptFrameError, FrameKind, ProtocolError

# (conn_id, payload)
Item = tuple[int, bytes]

CONTROL = 0
# Upper bounds of what protobuf adds: tags and varints of one item; kind, seq and crc32 of the frame.
ITEM_OVERHEAD = 32
FRAME_OVERHEAD = 32
NONCE_BYTES = 8
MAX_DETAIL = 1024

_HEAD = struct.Struct("<QI")
_U64 = struct.Struct("<Q")
_KINDS: dict[int, FrameKind] = {int(kind): kind for kind in FrameKind}
# A member looked up by name costs as much as an item.
_DATA = FrameKind.DATA
_REASONS: frozenset[int] = frozenset(CloseReason)


class Frame(NamedTuple):
    """A decoded frame: its shape and checksum hold. ``items`` in the order sent."""

    kind: FrameKind
    seq: int
    items: list[Item]


def checksum(items: Sequence[Item]) -> int:
    """CRC-32 of the items as the wire contract defines it."""
    pieces: list[bytes] = []
    for conn_id, payload in items:
        pieces.append(_HEAD.pack(conn_id, len(payload)))
        pieces.append(payload)
    # One pass over a copy beats two calls per item: items are mostly small.
    return zlib.crc32(b"".join(pieces))


Verify = Callable[[Sequence[Item], int], None]


def verify_checksum(items: Sequence[Item], crc32: int) -> None:
    """Raises CorruptFrameError unless ``crc32`` is the checksum of ``items``."""
    found = checksum(items)
    if found != crc32:
        raise CorruptFrameError("checksum", f"frame says {crc32:08x}, items hash to {found:08x}")


def encode(kind: FrameKind, seq: int, items: Sequence[Item]) -> bytes:
    """Serialize one frame; the caller keeps it within the limits."""
    frame = tunnel_pb2.Frame(kind=kind, seq=seq, crc32=checksum(items))  # type: ignore[arg-type]
    # Made in place: items handed to the constructor are built twice, which costs more than all the rest.
    add = frame.items.add
    for conn_id, payload in items:
        item = add()
        item.conn_id = conn_id
        item.payload = payload
    return frame.SerializeToString()


def decode(data: bytes, max_frame_bytes: int, max_items: int, verify: Verify = verify_checksum) -> Frame:
    """Parse and check one frame.

    Raises:
        CorruptFrameError: undecodable, of no known kind, wrong checksum, or of a shape its kind cannot have.
        ProtocolError: larger or with more items than the limits allow.
    """
    if len(data) > max_frame_bytes:
        raise ProtocolError(f"frame of {len(data)} bytes exceeds the limit of {max_frame_bytes}")
    try:
        message = tunnel_pb2.Frame.FromString(data)
    except DecodeError as error:
        raise CorruptFrameError("undecodable", f"{len(data)} bytes are no frame: {error}") from None
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise CorruptFrameError("kind", f"unknown frame kind {message.kind}")
    items = [(item.conn_id, item.payload) for item in message.items]
    if len(items) > max_items:
        raise ProtocolError(f"frame of {len(items)} items exceeds the limit of {max_items}")
    verify(items, message.crc32)
    if kind is not _DATA:
        _check_shape(kind, items)
    elif not items:
        raise CorruptFrameError("shape", "data frame without items")
    return Frame(kind, message.seq, items)


def _check_shape(kind: FrameKind, items: list[Item]) -> None:
    if kind is FrameKind.CLOSE:
        if not items:
            raise CorruptFrameError("shape", "close frame without items")
        for _, payload in items:
            decode_close(payload)
    elif len(items) != 1 or items[0][0] != CONTROL or len(items[0][1]) != NONCE_BYTES:
        raise CorruptFrameError("shape", f"{kind.name.lower()} frame needs one control item of {NONCE_BYTES} bytes")


def encode_close(reason: CloseReason, detail: str = "") -> bytes:
    """The payload of a close item; ``detail`` is cut to MAX_DETAIL characters."""
    return tunnel_pb2.Close(reason=int(reason), detail=detail[:MAX_DETAIL]).SerializeToString()  # type: ignore[arg-type]


def decode_close(payload: bytes) -> Closed:
    """Parse a close item. Raises CorruptFrameError without a known reason.

    Fields added later are ignored. A payload whose first field is a message (every payload of this system is a oneof of
    messages) has no reason when read as a close, so data cannot pass for one if the kind of its frame was damaged.
    """
    try:
        message = tunnel_pb2.Close.FromString(payload)
    except DecodeError as error:
        raise CorruptFrameError("shape", f"undecodable close: {error}") from None
    if message.reason not in _REASONS:
        raise CorruptFrameError("shape", f"close with unknown reason {message.reason}")
    return Closed(CloseReason(message.reason), message.detail, by_peer=True)


def encode_u64(value: int) -> bytes:
    """An acknowledgement's or a ping's payload: u64-LE."""
    return _U64.pack(value)


def decode_u64(payload: bytes) -> int:
    """Inverse of ``encode_u64``; the shape check has fixed the length."""
    (value,) = _U64.unpack(payload)
    return int(value)


def payload_limit(max_frame_bytes: int) -> int:
    """Bytes of the largest payload that one frame can hold."""
    return max_frame_bytes - FRAME_OVERHEAD - ITEM_OVERHEAD
