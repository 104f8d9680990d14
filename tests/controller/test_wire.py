"""The codec: every message there and back, nothing local across, nothing from outside that breaks it."""

from __future__ import annotations

import struct
import threading
import typing
from dataclasses import fields, is_dataclass, replace
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.contracts.segue.v1 import common_pb2, router_pb2, worker_pb2
from libs.controller import protocol
from libs.controller.catalog_facts import Chunk, Node
from libs.controller.errors import EncodingError, LocalOnlyError, WireError
from libs.controller.protocol import AssignmentId, Delta, Heartbeat, Offer, Tier, TierCost, UnknownMessage
from libs.controller.router_effects import TimerId, TimerKind
from libs.controller.wire import AttachCodec, TunnelCodec
from libs.controller.wire_fields import PROTOS, from_proto, to_proto
from tests.controller.test_worker import an_offer

TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
FLOAT = st.floats(width=32, allow_nan=False)


def values(kind: type) -> st.SearchStrategy[Any]:
    """Any value of a protocol class whose numbers its proto's fields can hold."""
    hints = typing.get_type_hints(kind)
    numbers = {field.name: field for field in PROTOS[kind].DESCRIPTOR.fields}
    parts = {}
    for field in fields(kind):
        if field.name not in numbers:  # a delivery's request id
            parts[field.name] = TEXT
        elif (kind, field.name) == (protocol.Sampling, "logit_bias"):
            pairs = st.dictionaries(st.integers(0, 2**32 - 1), FLOAT, max_size=3)
            parts[field.name] = pairs.map(lambda found: tuple(sorted(found.items())))
        else:
            parts[field.name] = _value(hints[field.name], numbers[field.name])
    return st.builds(kind, **parts)


def _value(hint: Any, field: Any) -> st.SearchStrategy[Any]:
    if typing.get_origin(hint) is tuple:
        return st.lists(_value(typing.get_args(hint)[0], field), max_size=3).map(tuple)
    if is_dataclass(hint):
        return values(typing.cast(type, hint))
    if issubclass(hint, IntEnum):
        return st.sampled_from(list(hint))
    if hint is int:
        bits, signed = {
            field.TYPE_UINT32: (32, False),
            field.TYPE_UINT64: (64, False),
            field.TYPE_INT32: (32, True),
            field.TYPE_INT64: (64, True),
        }[field.type]
        return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else st.integers(0, 2**bits - 1)
    return {str: TEXT, float: FLOAT, bool: st.booleans()}[hint]


def valid(value: Any) -> bool:
    match value:
        case Offer():
            request = value.request
            return (
                bool(request.tokens)
                and 1 <= request.output_start <= len(request.tokens)
                and request.request_id == value.assignment.request_id != ""
                and value.assignment.attempt > 0
            )
        case Heartbeat():
            return bool(value.worker)
    assignment = getattr(value, "assignment", None)
    return assignment is None or (assignment.request_id != "" and assignment.attempt > 0)


TUNNEL = [kind for kind in typing.get_args(protocol.TunnelValue) if kind is not UnknownMessage]
ATTACH = [kind for kind in typing.get_args(protocol.AttachValue) if kind is not UnknownMessage]
RELAXED = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("kind", sorted(PROTOS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
@RELAXED
@given(data=st.data())
def test_every_value_goes_there_and_back(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    message = to_proto(value)
    parsed = type(message).FromString(message.SerializeToString())
    outside = (
        {} if "request_id" in message.DESCRIPTOR.fields_by_name else {"request_id": getattr(value, "request_id", None)}
    )
    if not any(field.name == "request_id" for field in fields(kind)):
        outside = {}
    assert from_proto(kind, parsed, **outside) == value


@pytest.mark.parametrize("kind", TUNNEL, ids=lambda kind: kind.__name__)
@RELAXED
@given(data=st.data())
def test_every_tunnel_message(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    if kind is Offer:  # the checks of an offer hold together
        request = replace(value.request, request_id="r", tokens=(1, *value.request.tokens), output_start=1)
        value = replace(value, assignment=AssignmentId("r", 1), request=request)
    elif hasattr(value, "assignment"):
        value = replace(value, assignment=AssignmentId("r", 1))
    codec = TunnelCodec()
    if valid(value):
        assert codec.decode(codec.encode(value)) == value
    else:
        with pytest.raises(WireError):
            codec.decode(codec.encode(value))


@pytest.mark.parametrize("kind", ATTACH, ids=lambda kind: kind.__name__)
@RELAXED
@given(data=st.data())
def test_every_attach_message(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    codec = AttachCodec()
    if kind is protocol.Submission and not value.request.request_id:
        with pytest.raises(WireError):
            codec.decode(codec.encode(value))
    else:
        assert codec.decode(codec.encode(value)) == value


def a_node(start: Any) -> Node:
    return Node(Chunk("ab" * 32, "cd" * 32, start, 256))


def biased(*pairs: Any) -> protocol.GenerationRequest:
    return replace(an_offer().request, sampling=protocol.Sampling(logit_bias=pairs))


class Handle(int):
    """A device handle that looks like a number."""


@pytest.mark.parametrize(
    ("spoilt", "field"),
    [
        (replace(an_offer(), epoch=threading.Lock()), "Offer.epoch"),
        (replace(an_offer(), epoch=Handle(7)), "Offer.epoch"),
        (replace(an_offer(), epoch=True), "Offer.epoch"),
        (replace(an_offer(), request=TimerId(TimerKind.OFFER, "r", 1)), "Offer.request"),
        (replace(an_offer(), request=replace(an_offer().request, tokens=[1, 2])), "Offer.request.tokens"),
        (replace(an_offer(), request=replace(an_offer().request, tokens=(1, b"KV"))), "Offer.request.tokens[1]"),
        (replace(an_offer(), request=replace(an_offer().request, model=b"m")), "Offer.request.model"),
        (replace(an_offer(), candidate=replace(an_offer().candidate, tier=3)), "Offer.candidate.tier"),
        (replace(an_offer(), chain=(memoryview(b"x"),)), "Offer.chain[0]"),
        (replace(an_offer(), chain=(a_node(start="0"),)), "Offer.chain[0].chunk.start"),
        (replace(an_offer(), request=biased((1, 2.0), (3, "x"))), "Offer.request.sampling.logit_bias[1]"),
        (TimerId(TimerKind.OFFER, "r", 1), "TunnelMessage.TimerId"),
        (protocol.CancelRequest("r"), "TunnelMessage.CancelRequest"),
        (bytearray(b"tensor"), "TunnelMessage.bytearray"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_local_is_refused_by_name(spoilt: Any, field: str) -> None:
    with pytest.raises(LocalOnlyError) as caught:
        TunnelCodec().encode(spoilt)
    assert caught.value.field == field and field in str(caught.value)


@pytest.mark.parametrize("value", [1.5, object(), memoryview(b"t")])
def test_the_attach_side_refuses_too(value: Any) -> None:
    with pytest.raises(LocalOnlyError):
        AttachCodec().encode(value)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (replace(an_offer(), epoch=-1), "Offer.epoch"),
        (replace(an_offer(), epoch=2**64), "Offer.epoch"),
        (Delta(AssignmentId("r", 1), 1, 2**32, (1,)), "Delta.index"),
        (Delta(AssignmentId("r", 1), 1, 0, (-1,)), "Delta.tokens"),
        (Delta(AssignmentId("r\ud800", 1), 1, 0, (1,)), "Delta.assignment.request_id"),
        (replace(an_offer(), chain=(a_node(start=0), a_node(start=-1))), "Offer.chain[1].chunk.start"),
        (replace(an_offer(), request=biased((-1, 2.0))), "Offer.request.sampling.logit_bias"),
        (Heartbeat("w", 1, 1, tiers=(TierCost(Tier.RAM, 1.0, 1.0, 2**32),)), "Heartbeat.tiers[0].break_even_tokens"),
    ],
)
def test_what_a_field_cannot_hold_is_named(value: Any, field: str) -> None:
    with pytest.raises(EncodingError) as caught:
        TunnelCodec().encode(value)
    assert caught.value.field == field


def test_whole_numbers_stand_in_fields_of_fractions() -> None:
    codec = TunnelCodec()
    beat = Heartbeat("w", 1, 1, tiers=(TierCost(Tier.RAM, 1, 2),))
    heard = codec.decode(codec.encode(beat))
    assert isinstance(heard, Heartbeat) and type(heard.tiers[0].latency_ms) is float and heard == beat


def test_unknown_messages_pass_through_unharmed_and_counted() -> None:
    future = b"\xfa\x07\x05hello"  # field 127, bytes
    for codec in (TunnelCodec(), AttachCodec()):
        passed = codec.decode(future)
        assert passed == UnknownMessage(future)
        assert codec.encode(passed) == future
        assert codec.counts["unknown-type"] == 1


def test_unknown_fields_and_enum_numbers_of_a_later_version_do_no_harm() -> None:
    codec = TunnelCodec()
    message = worker_pb2.TunnelMessage()
    message.offer_reply.assignment.request_id = "r"
    message.offer_reply.assignment.attempt = 1
    message.offer_reply.reason = 99  # type: ignore[assignment]
    reply = codec.decode(message.SerializeToString() + b"\xfa\x07\x01x")
    assert isinstance(reply, protocol.OfferReply) and reply.reason is protocol.DeclineReason.UNSPECIFIED
    error = router_pb2.AttachMessage()
    error.delivery.request_id = "r"
    error.delivery.error.code = 77
    delivery = AttachCodec().decode(error.SerializeToString())
    assert isinstance(delivery, protocol.ErrorDelivery) and delivery.code is protocol.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda m: m.delta.tokens.append(1), "no-assignment"),
        (lambda m: m.cancel.SetInParent(), "no-assignment"),
        (lambda m: m.heartbeat.SetInParent(), "no-worker"),
        (lambda m: m.offer.assignment.CopyFrom(common_pb2.AssignmentId(request_id="r", attempt=1)), "no-tokens"),
    ],
)
def test_messages_without_what_they_are_about_are_refused(build: Any, reason: str) -> None:
    message = worker_pb2.TunnelMessage()
    build(message)
    codec = TunnelCodec()
    with pytest.raises(WireError) as caught:
        codec.decode(message.SerializeToString())
    assert caught.value.reason == reason and codec.counts[reason] == 1


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 2000), st.integers(0, 255))
def test_no_bytes_break_the_decoder(noise: bytes, position: int, byte: int) -> None:
    whole = bytearray(TunnelCodec().encode(an_offer()))
    whole[position % len(whole)] = byte
    for codec in (TunnelCodec(), AttachCodec()):
        for data in (noise, bytes(whole), bytes(whole[: position % len(whole)])):
            try:
                codec.decode(data)
            except WireError as error:
                assert codec.counts[error.reason] > 0


def test_encoding_is_one_sequence_of_bytes() -> None:
    bias = tuple((token, 0.5) for token in range(40))
    request = replace(an_offer().request, sampling=protocol.Sampling(logit_bias=bias))
    offer = replace(an_offer(), request=request)
    assert len({TunnelCodec().encode(offer) for _ in range(5)}) == 1
    assert struct.unpack("<f", struct.pack("<f", 0.5)) == (0.5,)
    assert TunnelCodec().decode(TunnelCodec().encode(offer)) == offer
    assert offer.candidate.tier is Tier.NONE
