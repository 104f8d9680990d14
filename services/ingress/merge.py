"""Two waiting deliveries of one route become one: what a slow reader's route does under pressure, instead of
growing."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from libs.contracts.segue.v1.router_pb2 import AttachMessage


def merge_deliveries(first: bytes, second: bytes) -> bytes | None:
    """Concatenates consecutive TokensDelivery payloads of one request; None for anything else, which stays as it is."""
    try:
        left, right = AttachMessage.FromString(first), AttachMessage.FromString(second)
    except DecodeError:
        return None
    if not (_has_tokens(left) and _has_tokens(right)) or left.delivery.request_id != right.delivery.request_id:
        return None
    into, tail = left.delivery.tokens, right.delivery.tokens
    # Log probabilities come one per token or not at all; a mixture would lose its alignment.
    if into.index + len(into.tokens) != tail.index or bool(into.logprobs) != bool(tail.logprobs):
        return None
    into.tokens.extend(tail.tokens)
    into.logprobs.extend(tail.logprobs)
    if tail.HasField("usage"):
        into.usage.CopyFrom(tail.usage)
    return left.SerializeToString()


def _has_tokens(message: AttachMessage) -> bool:
    return bool(message.WhichOneof("message") == "delivery" and message.delivery.WhichOneof("event") == "tokens")
