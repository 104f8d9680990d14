"""The wire seam: the one codec between protocol values and what a tunnel, a direct call or a simulated link carries.

Only `TunnelValue`s cross between router and worker and only `AttachValue`s between ingress and router. The encoder
refuses all else by name of the field (`wire_fields`). The decoder raises `WireError` for bytes that are no valid
message (the caller ends that route) and hands a message of a type this version does not know out as `UnknownMessage`,
with its bytes, so that it can be passed on unharmed and two versions can share a tunnel during a rollout. Both are
counted by reason.
"""

from __future__ import annotations

from collections import Counter

from google.protobuf.message import DecodeError, Message

from libs.contracts.segue.v1 import router_pb2, worker_pb2
from libs.controller import protocol
from libs.controller.errors import EncodingError, LocalOnlyError, WireError
from libs.controller.protocol import AttachValue, Delivery, TunnelValue
from libs.controller.wire_fields import PROTOS, enclosed, from_proto

_TUNNEL: dict[type, str] = {
    protocol.Offer: "offer",
    protocol.Cancel: "cancel",
    protocol.OfferReply: "offer_reply",
    protocol.Delta: "delta",
    protocol.Result: "result",
    protocol.Heartbeat: "heartbeat",
    protocol.SnapshotRequest: "snapshot_request",
    protocol.ElectTunnel: "elect",
}
_ASSIGNED = {name for kind, name in _TUNNEL.items() if "assignment" in PROTOS[kind].DESCRIPTOR.fields_by_name}
_TUNNEL_KINDS = {name: kind for kind, name in _TUNNEL.items()}
_DELIVERY: dict[type, str] = {
    protocol.TokensDelivery: "tokens",
    protocol.CompletedDelivery: "completed",
    protocol.ErrorDelivery: "error",
    protocol.CancelledDelivery: "cancelled",
}
_DELIVERY_KINDS = {name: kind for kind, name in _DELIVERY.items()}


def delivery_to_proto(delivery: Delivery) -> router_pb2.Delivery:
    """As `Router.Generate` streams it. Raises like `wire_fields.to_proto`."""
    name = _DELIVERY.get(type(delivery))
    if name is None:
        raise LocalOnlyError("Delivery", delivery)
    if type(delivery.request_id) is not str:
        raise LocalOnlyError(f"{type(delivery).__name__}.request_id", delivery.request_id)
    message = enclosed(router_pb2.Delivery, name, delivery)
    message.request_id = delivery.request_id
    return message


def delivery_from_proto(message: router_pb2.Delivery) -> Delivery:
    """Raises WireError for an event this version does not know."""
    name = message.WhichOneof("event")
    if name is None:
        raise WireError("unknown-delivery", f"request {message.request_id}")
    delivery: Delivery = from_proto(_DELIVERY_KINDS[name], getattr(message, name), request_id=message.request_id)
    return delivery


class TunnelCodec:
    """Router ⇄ worker. `counts`: what was refused or passed over, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def encode(self, value: TunnelValue) -> bytes:
        """The bytes of a `TunnelMessage`. Raises LocalOnlyError or EncodingError with the field's path."""
        if type(value) is protocol.UnknownMessage:
            return value.data
        name = _TUNNEL.get(type(value))
        if name is None:
            raise LocalOnlyError(f"TunnelMessage.{type(value).__name__}", value)
        return enclosed(worker_pb2.TunnelMessage, name, value).SerializeToString(deterministic=True)

    def decode(self, data: bytes) -> TunnelValue:
        """The value the bytes hold. Raises WireError, counted."""
        try:
            return self._decode(data)
        except WireError as error:
            self.counts[error.reason] += 1
            raise

    def _decode(self, data: bytes) -> TunnelValue:
        message = worker_pb2.TunnelMessage()
        _parse(message, data)
        name = message.WhichOneof("message")
        if name is None:
            self.counts["unknown-type"] += 1
            return protocol.UnknownMessage(bytes(data))
        part = getattr(message, name)
        if name in _ASSIGNED and not (part.assignment.request_id and part.assignment.attempt):
            raise WireError("no-assignment", name)
        if name == "offer":
            if not part.request.tokens:
                raise WireError("no-tokens", part.assignment.request_id)
            if part.request.request_id != part.assignment.request_id:
                raise WireError("other-request", part.assignment.request_id)
            if not 1 <= part.request.output_start <= len(part.request.tokens):
                raise WireError("output-start", str(part.request.output_start))
        if name == "heartbeat" and not part.worker:
            raise WireError("no-worker", name)
        value: TunnelValue = from_proto(_TUNNEL_KINDS[name], part)
        return value


class AttachCodec:
    """Ingress ⇄ router. `counts`: what was refused or passed over, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def encode(self, value: AttachValue) -> bytes:
        """The bytes of an `AttachMessage`. Raises LocalOnlyError or EncodingError with the field's path."""
        match value:
            case protocol.UnknownMessage():
                return value.data
            case protocol.Submission():
                message = enclosed(router_pb2.AttachMessage, "submit", value)
            case protocol.CancelRequest():
                message = enclosed(router_pb2.AttachMessage, "cancel", value)
            case _:
                message = router_pb2.AttachMessage(delivery=delivery_to_proto(value))
        return message.SerializeToString(deterministic=True)

    def decode(self, data: bytes) -> AttachValue:
        """The value the bytes hold. Raises WireError, counted."""
        try:
            return self._decode(data)
        except WireError as error:
            self.counts[error.reason] += 1
            raise

    def _decode(self, data: bytes) -> AttachValue:
        message = router_pb2.AttachMessage()
        _parse(message, data)
        match message.WhichOneof("message"):
            case "submit":
                if not message.submit.request.request_id:
                    raise WireError("no-request-id")
                return from_proto(protocol.Submission, message.submit)
            case "cancel":
                return from_proto(protocol.CancelRequest, message.cancel)
            case "delivery":
                return delivery_from_proto(message.delivery)
            case _:
                self.counts["unknown-type"] += 1
                return protocol.UnknownMessage(bytes(data))


def _parse(message: Message, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireError("malformed", f"{len(data)} bytes") from error


__all__ = ["AttachCodec", "EncodingError", "TunnelCodec", "WireError", "delivery_from_proto", "delivery_to_proto"]
