"""Typed operations of an etcd transaction, and their translation to and from the generated messages.

A transaction is a list of comparisons and two lists of operations. etcd takes at most 128 of each; the catalog keeps to
`MAX_OPERATIONS`, which leaves room for an operator's lower `--max-txn-ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aetcd import rpc

MAX_OPERATIONS = 100


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as read. Revisions count etcd's transactions."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Get:
    key: bytes


@dataclass(frozen=True, slots=True)
class GetPrefix:
    """Every key that starts with `prefix`, ascending."""

    prefix: bytes


@dataclass(frozen=True, slots=True)
class GetRange:
    """At most `limit` keys k with `start` <= k < `end`, ascending unless told otherwise.

    at_revision: as they were then (an error once etcd has compacted it); 0 = now.
    """

    start: bytes
    end: bytes
    limit: int
    descending: bool = False
    at_revision: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    value: bytes
    lease: int = 0
    """0 = kept for ever."""


@dataclass(frozen=True, slots=True)
class Delete:
    key: bytes


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    """Every key that starts with `prefix`."""

    prefix: bytes


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The key's last write was at `mod_revision`; 0 = the key does not exist."""

    key: bytes
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Exists:
    key: bytes


@dataclass(frozen=True, slots=True)
class UnchangedSince:
    """No key that starts with `prefix` was written after `revision`. (Deletions do not show.)"""

    prefix: bytes
    revision: int


Read = Get | GetPrefix | GetRange
Operation = Read | Put | Delete | DeletePrefix
Comparison = Unchanged | Exists | UnchangedSince


@dataclass(frozen=True, slots=True)
class Outcome:
    """A committed transaction: which branch ran, and what each of its operations read (writes read nothing)."""

    succeeded: bool
    revision: int
    reads: tuple[tuple[KeyValue, ...], ...]


def prefix_end(prefix: bytes) -> bytes:
    """The first key after every key with that prefix. Raises ValueError for a prefix that has none."""
    for i in range(len(prefix) - 1, -1, -1):
        if prefix[i] < 0xFF:
            return prefix[:i] + bytes([prefix[i] + 1])
    raise ValueError(f"prefix {prefix!r} has no end")


def key_value(kv: Any) -> KeyValue:
    return KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def request(compare: tuple[Comparison, ...], success: tuple[Operation, ...], failure: tuple[Operation, ...]) -> Any:
    """An etcdserverpb.TxnRequest. Raises ValueError over MAX_OPERATIONS in any of the three lists."""
    longest = max(len(compare), len(success), len(failure))
    if longest > MAX_OPERATIONS:
        raise ValueError(f"{longest} operations in one transaction; at most {MAX_OPERATIONS}: split it")
    return rpc.TxnRequest(
        compare=[_comparison(c) for c in compare],
        success=[_operation(o) for o in success],
        failure=[_operation(o) for o in failure],
    )


def outcome(reply: Any) -> Outcome:
    reads = tuple(
        tuple(key_value(kv) for kv in response.response_range.kvs) if response.HasField("response_range") else ()
        for response in reply.responses
    )
    return Outcome(reply.succeeded, reply.header.revision, reads)


def _comparison(comparison: Comparison) -> Any:
    if isinstance(comparison, Unchanged):
        return rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=comparison.key, mod_revision=comparison.mod_revision
        )
    if isinstance(comparison, UnchangedSince):
        return rpc.Compare(
            result=rpc.Compare.LESS,
            target=rpc.Compare.MOD,
            key=comparison.prefix,
            range_end=prefix_end(comparison.prefix),
            mod_revision=comparison.revision + 1,
        )
    return rpc.Compare(result=rpc.Compare.GREATER, target=rpc.Compare.CREATE, key=comparison.key, create_revision=0)


def _operation(operation: Operation) -> Any:
    match operation:
        case Get(key):
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))
        case GetPrefix(prefix):
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=prefix, range_end=prefix_end(prefix)))
        case GetRange(start, end, limit, descending, at_revision):
            order = rpc.RangeRequest.DESCEND if descending else rpc.RangeRequest.NONE
            return rpc.RequestOp(
                request_range=rpc.RangeRequest(
                    key=start,
                    range_end=end,
                    limit=limit,
                    revision=at_revision,
                    sort_order=order,
                    sort_target=rpc.RangeRequest.KEY,
                )
            )
        case Put(key, value, lease):
            return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))
        case Delete(key):
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
        case DeletePrefix(prefix):
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=prefix, range_end=prefix_end(prefix)))
