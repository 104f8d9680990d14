"""Field-by-field translation between frozen dataclasses and protobuf messages of the same shape.

The dataclasses mirror the protos: equal field names, nested values as nested messages, tuples as repeated fields,
enums with equal numbers. So one translation, compiled once per class from its type hints (`wire_shapes`), serves all of
them, and a field that exists on one side only fails at import.

Encoding is strict: each value must have exactly the type its field declares. Anything else (a timer, a handle, a
tensor, a subclass that smuggles one in) is `LocalOnlyError` with the field's path; a number out of the proto's range
is `EncodingError`. Decoding is lenient where versions may differ: an enum number this version does not know becomes
member 0.
"""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from libs.contracts.segue.v1 import catalog_pb2, common_pb2, router_pb2, worker_pb2
from libs.controller import catalog_facts, protocol
from libs.controller.errors import LocalOnlyError
from libs.controller.wire_shapes import Form, Shape, UnfitError, part

T = TypeVar("T")
M = TypeVar("M", bound=Message)

PROTOS: dict[type, type[Message]] = {
    protocol.Sampling: common_pb2.Sampling,
    protocol.TraceContext: common_pb2.TraceContext,
    protocol.GenerationRequest: common_pb2.GenerationRequest,
    protocol.AssignmentId: common_pb2.AssignmentId,
    protocol.TierTokens: common_pb2.TierTokens,
    protocol.Usage: common_pb2.Usage,
    protocol.Timings: common_pb2.Timings,
    protocol.TokenLogprobs: common_pb2.TokenLogprobs,
    protocol.Candidate: common_pb2.Candidate,
    protocol.Offer: worker_pb2.Offer,
    protocol.Cancel: worker_pb2.Cancel,
    protocol.Pages: worker_pb2.Pages,
    protocol.Load: worker_pb2.Load,
    protocol.OfferReply: worker_pb2.OfferReply,
    protocol.Delta: worker_pb2.Delta,
    protocol.Result: worker_pb2.Result,
    protocol.Resident: worker_pb2.Resident,
    protocol.Gone: worker_pb2.Gone,
    protocol.PrefillCost: worker_pb2.PrefillCost,
    protocol.DecodeCost: worker_pb2.DecodeCost,
    protocol.TierCost: worker_pb2.TierCost,
    protocol.Heartbeat: worker_pb2.Heartbeat,
    protocol.SnapshotRequest: worker_pb2.SnapshotRequest,
    protocol.ElectTunnel: worker_pb2.ElectTunnel,
    protocol.Pruned: router_pb2.Pruned,
    protocol.Submission: router_pb2.GenerateRequest,
    protocol.CancelRequest: router_pb2.CancelRequest,
    protocol.TokensDelivery: router_pb2.TokensDelivery,
    protocol.Served: router_pb2.Served,
    protocol.CompletedDelivery: router_pb2.CompletedDelivery,
    protocol.ErrorDelivery: router_pb2.ErrorDelivery,
    protocol.CancelledDelivery: router_pb2.CancelledDelivery,
    catalog_facts.LayerGroup: catalog_pb2.LayerGroup,
    catalog_facts.Model: catalog_pb2.Model,
    catalog_facts.Endpoint: catalog_pb2.Endpoint,
    catalog_facts.Receipt: catalog_pb2.Receipt,
    catalog_facts.Replica: catalog_pb2.Replica,
    catalog_facts.Chunk: catalog_pb2.Chunk,
    catalog_facts.Node: catalog_pb2.Node,
}
# Of a delivery the request's id stands beside the event, in the enclosing Delivery: see `wire`.
_OUTSIDE = {
    (kind, "request_id")
    for kind in (
        protocol.TokensDelivery,
        protocol.CompletedDelivery,
        protocol.ErrorDelivery,
        protocol.CancelledDelivery,
    )
}

# In every heartbeat, and seldom other than in the last one.
_SHARED = {protocol.PrefillCost, protocol.DecodeCost, protocol.TierCost}

# What protobuf raises for a number out of range or a text that is none, and our own.
_REFUSALS = (UnfitError, ValueError, TypeError)


def to_proto(value: object) -> Message:
    """The message that mirrors `value`.

    Raises:
        LocalOnlyError: something in it is not a protocol value.
        EncodingError: a number is out of its field's range.
    """
    shape = _of(value)
    try:
        return shape.proto(**shape.tell(value))
    except _REFUSALS as refusal:
        raise shape.wrong(value, shape.kind.__name__) or refusal from refusal


def enclosed(outer: type[M], field: str, value: object) -> M:
    """The message of type `outer` whose `field` mirrors `value`. Raises like `to_proto`."""
    shape = _of(value)
    try:
        message = outer(**{field: shape.tell(value)})
    except _REFUSALS as refusal:
        raise shape.wrong(value, shape.kind.__name__) or refusal from refusal
    if not shape.parts:
        getattr(message, field).SetInParent()  # a message without fields is one all the same
    return message


def from_proto(kind: type[T], message: Message, **outside: Any) -> T:
    """The value of class `kind` that mirrors `message`; `outside`: fields the message does not hold itself."""
    value: T = _SHAPES[kind].read(message, **outside)
    return value


def _of(value: object) -> Shape:
    shape = _SHAPES.get(type(value))
    if shape is None:
        raise LocalOnlyError(type(value).__name__, value)
    return shape


def _shape(kind: type) -> Shape:
    shape = _SHAPES.get(kind)
    if shape is not None:
        return shape
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind) if (kind, field.name) not in _OUTSIDE]
    there = {field.name for field in PROTOS[kind].DESCRIPTOR.fields}
    if set(names) != there:
        raise TypeError(f"{kind.__name__} and its proto differ in {sorted(set(names) ^ there)}")
    parts = [part(name, hints[name]) for name in names]
    for one in parts:
        if one.form in (Form.NESTED, Form.NESTEDS):
            _shape(one.kind)
    outside = len(names) < len(fields(kind))
    shape = _SHAPES[kind] = Shape(kind, PROTOS[kind], parts, _SHAPES, outside, kind in _SHARED)
    return shape


_SHAPES: dict[type, Shape] = {}
for _kind in PROTOS:
    _shape(_kind)
