"""The codec: what goes in comes out, and damage never does."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.segue.v1 import router_pb2, tunnel_pb2, worker_pb2
from libs.tunnel import CloseReason, CorruptFrameError, FrameKind, ProtocolError
from libs.tunnel.frames import (
    CONTROL,
    FRAME_OVERHEAD,
    ITEM_OVERHEAD,
    checksum,
    decode,
    decode_close,
    encode,
    encode_close,
    encode_u64,
    payload_limit,
)

MAX_BYTES = 1 << 20
MAX_ITEMS = 64
CONN_IDS = st.integers(0, 2**64 - 1)
ITEMS = st.lists(st.tuples(CONN_IDS, st.binary(max_size=64)), min_size=1, max_size=8)


def test_enums_mirror_the_contract() -> None:
    kinds = {f"FRAME_KIND_{kind.name}": kind.value for kind in FrameKind} | {"FRAME_KIND_UNSPECIFIED": 0}
    assert dict(tunnel_pb2.FrameKind.items()) == kinds
    reasons = {f"CLOSE_REASON_{reason.name}": reason.value for reason in CloseReason} | {"CLOSE_REASON_UNSPECIFIED": 0}
    assert dict(tunnel_pb2.CloseReason.items()) == reasons


def test_checksum_is_the_contracts() -> None:
    items = [(7, b"abc"), (2**64 - 1, b"")]
    plain = b"\x07" + b"\0" * 7 + b"\x03\0\0\0abc" + b"\xff" * 8 + b"\0" * 4
    assert checksum(items) == zlib.crc32(plain)


@given(items=ITEMS, seq=st.integers(1, 2**64 - 1))
def test_round_trip(items: list[tuple[int, bytes]], seq: int) -> None:
    frame = decode(encode(FrameKind.DATA, seq, items), MAX_BYTES, MAX_ITEMS)
    assert (frame.kind, frame.seq, frame.items) == (FrameKind.DATA, seq, items)


@given(items=ITEMS, data=st.data())
def test_a_damaged_byte_is_found(items: list[tuple[int, bytes]], data: st.DataObject) -> None:
    """Found by the codec, or by the sequence check that follows it. The kind alone is outside the checksum: a data
    frame can then only pass for a close whose items all are closes, which no
    payload of this system is."""
    good = encode(FrameKind.DATA, 5, items)
    position = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[position] ^= data.draw(st.integers(1, 255))
    try:
        frame = decode(bytes(bad), MAX_BYTES, MAX_ITEMS)
    except (CorruptFrameError, ProtocolError):
        return
    if frame.kind is FrameKind.CLOSE:
        assert frame.items == items
        assert all(decode_close(payload) for _, payload in items)
        return
    assert frame.seq != 5 or (frame.kind, frame.items) == (FrameKind.DATA, items)


@given(items=ITEMS, cut=st.integers(1, 10_000))
def test_a_truncated_frame_is_found(items: list[tuple[int, bytes]], cut: int) -> None:
    good = encode(FrameKind.DATA, 5, items)
    with pytest.raises(CorruptFrameError):
        decode(good[: -min(cut, len(good))], MAX_BYTES, MAX_ITEMS)


def test_a_codec_without_the_checksum_lets_damage_through() -> None:
    """The plant for the property above: it is the checksum that finds a flipped payload bit."""
    good = encode(FrameKind.DATA, 1, [(3, b"payload")])
    bad = good.replace(b"payload", b"paYload")
    with pytest.raises(CorruptFrameError, match="checksum"):
        decode(bad, MAX_BYTES, MAX_ITEMS)
    assert decode(bad, MAX_BYTES, MAX_ITEMS, lambda _items, _crc: None).items == [(3, b"paYload")]


@pytest.mark.parametrize(
    ("kind", "items"),
    [
        (FrameKind.DATA, []),
        (FrameKind.CLOSE, []),
        (FrameKind.CLOSE, [(1, b"\xff\xff")]),
        (FrameKind.CLOSE, [(1, b"")]),
        (FrameKind.ACK, []),
        (FrameKind.ACK, [(1, encode_u64(1))]),
        (FrameKind.ACK, [(CONTROL, b"short")]),
        (FrameKind.PING, [(CONTROL, encode_u64(1)), (CONTROL, encode_u64(2))]),
        (FrameKind.PONG, [(CONTROL, b"")]),
        (0, [(1, b"x")]),
        (6, [(1, b"x")]),
    ],
)
def test_a_shape_no_kind_has(kind: FrameKind, items: list[tuple[int, bytes]]) -> None:
    with pytest.raises(CorruptFrameError):
        decode(encode(kind, 1, items), MAX_BYTES, MAX_ITEMS)


def test_limits() -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        decode(encode(FrameKind.DATA, 1, [(1, b"x" * 200)]), 100, MAX_ITEMS)
    with pytest.raises(ProtocolError, match="items"):
        decode(encode(FrameKind.DATA, 1, [(1, b"x")] * 5), MAX_BYTES, 4)


@given(limit=st.integers(FRAME_OVERHEAD + ITEM_OVERHEAD, 70_000), conn_id=CONN_IDS)
def test_a_payload_of_the_limit_fits_its_frame(limit: int, conn_id: int) -> None:
    data = encode(FrameKind.DATA, 2**64 - 1, [(conn_id, b"x" * payload_limit(limit))])
    assert decode(data, limit, 1).items[0][0] == conn_id


@given(conn_id=CONN_IDS, size=st.integers(0, 70_000))
def test_the_largest_allowed_payload_fits_its_frame(conn_id: int, size: int) -> None:
    data = encode(FrameKind.DATA, 2**64 - 1, [(conn_id, b"x" * size)])
    assert len(data) <= size + FRAME_OVERHEAD + ITEM_OVERHEAD


@given(reason=st.sampled_from(CloseReason), detail=st.text(max_size=100))
def test_close_round_trip(reason: CloseReason, detail: str) -> None:
    closed = decode_close(encode_close(reason, detail))
    assert (closed.reason, closed.detail, closed.by_peer) == (reason, detail, True)


def test_a_close_may_grow_fields() -> None:
    assert decode_close(encode_close(CloseReason.DONE, "x") + b"\x1a\x01y").reason is CloseReason.DONE


def test_no_message_of_the_system_reads_as_a_close() -> None:
    """What tells a damaged kind: payloads on tunnels are oneofs of messages, so their first tag is length-delimited."""
    for descriptor in (worker_pb2.DESCRIPTOR, router_pb2.DESCRIPTOR):
        for name in ("TunnelMessage", "AttachMessage"):
            message = descriptor.message_types_by_name.get(name)
            if message is not None:
                assert message.fields, name
                assert all(field.message_type is not None for field in message.fields), name
                break
        else:
            pytest.fail(f"{descriptor.name} has no payload message")
