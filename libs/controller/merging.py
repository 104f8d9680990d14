"""Waiting messages of one route become one, instead of growing: deltas on their way in, deliveries on their way out.

Only neighbours are merged, and only where the second goes on exactly where the first ends; usage is cumulative, so the
later one holds. Log probabilities come one per token or not at all: a mixture would lose its alignment.
"""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.message import DecodeError

from libs.contracts.segue.v1 import router_pb2, worker_pb2
from libs.controller.protocol import Delivery, TokensDelivery


def merge_deltas(first: bytes, second: bytes) -> bytes | None:
    """Two `TunnelMessage`s with neighbouring deltas of one assignment; None for anything else."""
    try:
        one, two = worker_pb2.TunnelMessage.FromString(first), worker_pb2.TunnelMessage.FromString(second)
    except DecodeError:
        return None
    if one.WhichOneof("message") != "delta" or two.WhichOneof("message") != "delta":
        return None
    return one.SerializeToString() if extend_delta(one.delta, two.delta) else None


def extend_delta(into: worker_pb2.Delta, later: worker_pb2.Delta) -> bool:
    """Appends the tokens of a later delta of the same assignment where it follows directly; whether it did."""
    return (into.assignment, into.epoch) == (later.assignment, later.epoch) and _extend(into, later)


def merge_deliveries(first: bytes, second: bytes) -> bytes | None:
    """Two `AttachMessage`s with neighbouring tokens of one request; None for anything else."""
    try:
        one, two = router_pb2.AttachMessage.FromString(first), router_pb2.AttachMessage.FromString(second)
    except DecodeError:
        return None
    if one.WhichOneof("message") != "delivery" or two.WhichOneof("message") != "delivery":
        return None
    left, right = one.delivery, two.delivery
    if left.WhichOneof("event") != "tokens" or right.WhichOneof("event") != "tokens":
        return None
    if left.request_id != right.request_id:
        return None
    return one.SerializeToString() if _extend(left.tokens, right.tokens) else None


def joined(first: Delivery, second: Delivery) -> TokensDelivery | None:
    """As `merge_deliveries`, for values."""
    if not (isinstance(first, TokensDelivery) and isinstance(second, TokensDelivery)):
        return None
    follows = first.index + len(first.tokens) == second.index and bool(first.logprobs) == bool(second.logprobs)
    if not follows:
        return None
    tokens, logprobs = first.tokens + second.tokens, first.logprobs + second.logprobs
    return replace(second, index=first.index, tokens=tokens, logprobs=logprobs)


def _extend(
    into: worker_pb2.Delta | router_pb2.TokensDelivery, later: worker_pb2.Delta | router_pb2.TokensDelivery
) -> bool:
    if into.index + len(into.tokens) != later.index or bool(into.logprobs) != bool(later.logprobs):
        return False
    into.tokens.extend(later.tokens)
    into.logprobs.extend(later.logprobs)
    if later.HasField("usage"):
        into.usage.CopyFrom(later.usage)
    return True
