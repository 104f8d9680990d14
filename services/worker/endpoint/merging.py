"""Waiting deltas become one: what the tunnel asks when a route is behind. Everything else stays apart and in order."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from libs.contracts.segue.v1 import worker_pb2


def merge(first: bytes, second: bytes) -> bytes | None:
    """One `TunnelMessage` for two neighbouring deltas of one assignment, the second going on where the first ends."""
    one, two = worker_pb2.TunnelMessage(), worker_pb2.TunnelMessage()
    try:
        one.ParseFromString(first)
        two.ParseFromString(second)
    except DecodeError:
        return None
    if one.WhichOneof("message") != "delta" or two.WhichOneof("message") != "delta":
        return None
    if not extend(one.delta, two.delta):
        return None
    return one.SerializeToString(deterministic=True)


def extend(delta: worker_pb2.Delta, later: worker_pb2.Delta) -> bool:
    """Appends `later`'s tokens where it follows directly; whether it did. Usage is cumulative: the later one holds."""
    follows = (
        delta.assignment == later.assignment
        and delta.epoch == later.epoch
        and delta.index + len(delta.tokens) == later.index
        and bool(delta.logprobs) == bool(later.logprobs)
    )
    if follows:
        delta.tokens.extend(later.tokens)
        delta.logprobs.extend(later.logprobs)
        delta.usage.CopyFrom(later.usage)
    return follows
