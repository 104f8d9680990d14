"""Field-by-field translation between frozen dataclasses and protobuf messages of the same shape.

The dataclasses mirror the protos: equal field names, nested values as nested messages, tuples as repeated fields,
enums with equal numbers. So one translation, compiled once per class from its type hints, serves all of them, and a
field that exists on one side only fails at import.

Encoding is strict: each value must have exactly the type its field declares. Anything else (a timer, a handle, a
tensor, a subclass that smuggles one in) is `LocalOnlyError` with the field's path; a number out of the proto's range
is `EncodingError`. Decoding is lenient where versions may differ: an enum number this version does not know becomes
member 0.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any, TypeVar

from google.protobuf.message import Message

from libs.contracts.segue.v1 import catalog_pb2, common_pb2, router_pb2, worker_pb2
from libs.controller import catalog_facts, protocol
from libs.controller.errors import EncodingError, LocalOnlyError

T = TypeVar("T")

_Encode = Callable[[Any, str, Any, str], None]  # (message, field, value, path)
_Decode = Callable[[Any], Any]

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


def to_proto(value: object) -> Message:
    """The message that mirrors `value`.

    Raises:
        LocalOnlyError: something in it is not a protocol value.
        EncodingError: a number is out of its field's range.
    """
    kind = type(value)
    plan = _PLANS.get(kind)
    if plan is None:
        raise LocalOnlyError(kind.__name__, value)
    message = PROTOS[kind]()
    _fill(message, value, plan, kind.__name__)
    return message


def from_proto(kind: type[T], message: Message, **outside: Any) -> T:
    """The value of class `kind` that mirrors `message`; `outside`: fields the message does not hold itself."""
    values = {name: decode(getattr(message, name)) for name, _, decode in _PLANS[kind]}
    return kind(**values, **outside)


def _fill(message: Any, value: Any, plan: list[tuple[str, _Encode, _Decode]], path: str) -> None:
    for name, encode, _ in plan:
        encode(message, name, getattr(value, name), path)


def _scalar(kind: type) -> tuple[_Encode, _Decode]:
    allowed = (int, float) if kind is float else (kind,)

    def encode(message: Any, name: str, value: Any, path: str) -> None:
        if type(value) not in allowed:
            raise LocalOnlyError(f"{path}.{name}", value)
        try:
            setattr(message, name, value)
        except (ValueError, TypeError) as error:
            raise EncodingError(f"{path}.{name}", f"is {value!r}, which its field cannot hold: {error}") from error

    return encode, kind


def _enum(kind: type[IntEnum]) -> tuple[_Encode, _Decode]:
    members = {member.value: member for member in kind}
    unknown = members.get(0, kind["INTERNAL"] if "INTERNAL" in kind.__members__ else next(iter(kind)))

    def encode(message: Any, name: str, value: Any, path: str) -> None:
        if type(value) is not kind:
            raise LocalOnlyError(f"{path}.{name}", value)
        setattr(message, name, value.value)

    def decode(number: Any) -> IntEnum:
        return members.get(number, unknown)

    return encode, decode


def _nested(kind: type) -> tuple[_Encode, _Decode]:
    plan = _plan(kind)

    def encode(message: Any, name: str, value: Any, path: str) -> None:
        if type(value) is not kind:
            raise LocalOnlyError(f"{path}.{name}", value)
        target = getattr(message, name)
        target.SetInParent()
        _fill(target, value, plan, f"{path}.{name}")

    def decode(message: Any) -> Any:
        return kind(**{name: decode_field(getattr(message, name)) for name, _, decode_field in plan})

    return encode, decode


def _repeated(kind: type) -> tuple[_Encode, _Decode]:
    if not is_dataclass(kind):

        def encode_scalars(message: Any, name: str, value: Any, path: str) -> None:
            if type(value) is not tuple:
                raise LocalOnlyError(f"{path}.{name}", value)
            allowed = {int, float} if kind is float else {kind}
            if not set(map(type, value)) <= allowed:
                index = next(i for i, item in enumerate(value) if type(item) not in allowed)
                raise LocalOnlyError(f"{path}.{name}[{index}]", value[index])
            try:
                getattr(message, name).extend(value)
            except (ValueError, TypeError) as error:
                raise EncodingError(f"{path}.{name}", f"holds what its field cannot: {error}") from error

        return encode_scalars, tuple
    plan = _plan(kind)

    def encode(message: Any, name: str, value: Any, path: str) -> None:
        if type(value) is not tuple:
            raise LocalOnlyError(f"{path}.{name}", value)
        target = getattr(message, name)
        for index, item in enumerate(value):
            if type(item) is not kind:
                raise LocalOnlyError(f"{path}.{name}[{index}]", item)
            _fill(target.add(), item, plan, f"{path}.{name}[{index}]")

    def decode(messages: Any) -> Any:
        return tuple(
            kind(**{name: decode_field(getattr(message, name)) for name, _, decode_field in plan})
            for message in messages
        )

    return encode, decode


def _bias() -> tuple[_Encode, _Decode]:
    """`Sampling.logit_bias`: pairs ascending by token here, a map there."""

    def encode(message: Any, name: str, value: Any, path: str) -> None:
        if type(value) is not tuple:
            raise LocalOnlyError(f"{path}.{name}", value)
        target = getattr(message, name)
        for index, pair in enumerate(value):
            if type(pair) is not tuple or [type(item) for item in pair] not in ([int, float], [int, int]):
                raise LocalOnlyError(f"{path}.{name}[{index}]", pair)
            try:
                target[pair[0]] = pair[1]
            except (ValueError, TypeError) as error:
                raise EncodingError(f"{path}.{name}[{index}]", f"is {pair!r}: {error}") from error

    return encode, lambda pairs: tuple(sorted(pairs.items()))


def _field(kind: type, name: str, hint: Any) -> tuple[_Encode, _Decode]:
    if (kind, name) == (protocol.Sampling, "logit_bias"):
        return _bias()
    if typing.get_origin(hint) is tuple:
        item, _ = typing.get_args(hint)
        return _repeated(item)
    if isinstance(hint, types.UnionType):
        raise TypeError(f"{kind.__name__}.{name}: unions have no field to go to")
    if is_dataclass(hint):
        return _nested(typing.cast(type, hint))
    if issubclass(hint, IntEnum):
        return _enum(hint)
    return _scalar(hint)


def _plan(kind: type) -> list[tuple[str, _Encode, _Decode]]:
    plan = _PLANS.get(kind)
    if plan is not None:
        return plan
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind) if (kind, field.name) not in _OUTSIDE]
    there = {field.name for field in PROTOS[kind].DESCRIPTOR.fields}
    if set(names) != there:
        raise TypeError(f"{kind.__name__} and its proto differ in {sorted(set(names) ^ there)}")
    plan = [(name, *_field(kind, name, hints[name])) for name in names]
    _PLANS[kind] = plan
    return plan


_PLANS: dict[type, list[tuple[str, _Encode, _Decode]]] = {}
for _kind in PROTOS:
    _plan(_kind)
