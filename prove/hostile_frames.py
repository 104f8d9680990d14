"""Streams of frames whose last one nobody may take: what each looks like on the wire, and what it must be counted as.

All but the last frame are sound, so that a wrong number is wrong only as a number. A refused frame ends its tunnel, so
each kind is a tunnel of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.contracts.segue.v1 import tunnel_pb2
from libs.tunnel import FrameKind, TunnelConfig
from libs.tunnel.errors import CloseReason
from libs.tunnel.frames import Item, checksum, encode, encode_close, encode_u64

LIMITS = TunnelConfig()
_BODY = 64
"""Bytes of an item's payload."""


@dataclass(frozen=True)
class FrameKindOf:
    """`counted`: the ledger's entries that a tunnel which ends so must raise by one each. `share`: of the others'."""

    name: str
    make: Callable[[random.Random], Sequence[bytes]]
    counted: tuple[str, ...]
    share: float = 1.0


def _ping(seq: int) -> bytes:
    return encode(FrameKind.PING, seq, [(0, encode_u64(seq))])


def _data(seq: int, draw: random.Random) -> bytes:
    return encode(FrameKind.DATA, seq, [(0, draw.randbytes(_BODY))])


def _raw(kind: int, seq: int, items: Sequence[Item], crc32: int | None = None) -> bytes:
    return tunnel_pb2.Frame(
        kind=kind,  # type: ignore[arg-type]
        seq=seq,
        crc32=checksum(items) if crc32 is None else crc32,
        items=[tunnel_pb2.Item(conn_id=conn_id, payload=payload) for conn_id, payload in items],
    ).SerializeToString()


def _led(draw: random.Random, frame: bytes, seq: int = 2) -> Sequence[bytes]:
    """The frame, numbered `seq`, after `seq - 1` sound ones."""
    del draw
    return [*(_ping(number) for number in range(1, seq)), frame]


def _flipped(draw: random.Random) -> Sequence[bytes]:
    frame = bytearray(_data(2, draw))
    frame[-1 - draw.randrange(_BODY // 2)] ^= 1 << draw.randrange(8)
    return _led(draw, bytes(frame))


def _items(count: int, draw: random.Random) -> list[Item]:
    return [(0, draw.randbytes(1))] * count


_CORRUPT = ("undecodable", "checksum", "kind", "shape", "gap", "replay")


def _corrupt(name: str, reason: str, make: Callable[[random.Random], Sequence[bytes]]) -> FrameKindOf:
    assert reason in _CORRUPT
    return FrameKindOf(name, make, (f"corrupt/{reason}", "tunnel/corrupt"))


def _protocol(name: str, make: Callable[[random.Random], Sequence[bytes]], share: float = 1.0) -> FrameKindOf:
    return FrameKindOf(name, make, ("tunnel/protocol",), share)


def _nonce(draw: random.Random) -> bytes:
    return draw.randbytes(8)


FRAMES: tuple[FrameKindOf, ...] = (
    # malformed
    _corrupt("no frame at all", "undecodable", lambda d: [b"\xff" * 12 + d.randbytes(d.randrange(200))]),
    _corrupt("cut off", "undecodable", lambda d: _led(d, _data(2, d)[: -d.randrange(1, _BODY - 8)])),
    _corrupt("a flipped bit", "checksum", _flipped),
    _corrupt("a wrong checksum", "checksum", lambda d: _led(d, _raw(1, 2, [(0, b"x")], d.randrange(1, 1 << 31)))),
    _corrupt("data without items", "shape", lambda d: _led(d, _raw(FrameKind.DATA, 2, []))),
    _corrupt("a ping of another length", "shape", lambda d: _led(d, _raw(FrameKind.PING, 2, [(0, d.randbytes(7))]))),
    _corrupt("a ping for a route", "shape", lambda d: _led(d, _raw(FrameKind.PING, 2, [(5, _nonce(d))]))),
    _corrupt("two acknowledgements", "shape", lambda d: _led(d, _raw(FrameKind.ACK, 2, [(0, bytes(8))] * 2))),
    _corrupt("a pong without a nonce", "shape", lambda d: _led(d, _raw(FrameKind.PONG, 2, []))),
    _corrupt("a close of nothing", "shape", lambda d: _led(d, _raw(FrameKind.CLOSE, 2, []))),
    _corrupt("a close without a reason", "shape", lambda d: _led(d, _raw(FrameKind.CLOSE, 2, [(7, b"")]))),
    _corrupt("data said to be a close", "shape", lambda d: _led(d, _raw(FrameKind.CLOSE, 2, [(7, b"\x0a\x01x")]))),
    # of a future version
    _corrupt("an unknown kind", "kind", lambda d: _led(d, _raw(d.randrange(6, 1 << 20), 2, [(0, b"x")]))),
    _corrupt("no kind", "kind", lambda d: _led(d, _raw(0, 2, [(0, b"x")]))),
    _corrupt("an unknown close reason", "shape", lambda d: _led(d, _raw(FrameKind.CLOSE, 2, [(7, b"\x08\x63")]))),
    # out of order, replayed
    _corrupt("begins with the second", "gap", lambda d: [_data(2, d)]),
    _corrupt("one left out", "gap", lambda d: [_ping(1), _ping(2), _ping(4 + d.randrange(1 << 30))]),
    _corrupt("the same again", "replay", lambda d: [_ping(1), _ping(1)]),
    _corrupt("an old one again", "replay", lambda d: [*(_ping(n) for n in range(1, 6)), _ping(d.randrange(1, 5))]),
    _corrupt("a replayed close", "replay", lambda d: [_ping(1), encode(FrameKind.CLOSE, 1, [(0, _shutdown())])]),
    _corrupt("number nought", "replay", lambda d: [_data(0, d)]),
    # oversized, and other breaches
    _protocol("too many items", lambda d: _led(d, _raw(FrameKind.DATA, 2, _items(LIMITS.max_items + 1, d))), 0.3),
    _protocol("too large", lambda d: _led(d, _raw(FrameKind.DATA, 2, [(0, bytes(LIMITS.max_frame_bytes))])), 0.03),
    _protocol("acknowledges what was never sent", lambda d: _led(d, _raw(FrameKind.ACK, 2, [(0, b"\xff" * 8)]))),
)


def _shutdown() -> bytes:
    return encode_close(CloseReason.SHUTDOWN, "")
