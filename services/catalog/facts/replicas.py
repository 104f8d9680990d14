"""Replicas on the SSD tier: which groups of which chunk lie in which chunk directory.

One key per (chunk, directory), its value a JSON object: group → {"state", "content_id"}. One directory has one writer
at a time, its worker, but Publish and SetReplica of that worker may overlap, so every write compares what it read. A
replica of a chunk that is not known is not recorded: no look-up would ever reach it, nor collection find it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import Delete, Exists, Get, Operation, Put, Unchanged
from services.catalog.facts.errors import InvalidRequestError
from services.catalog.facts.keys import Keys, check_hex, check_node
from services.catalog.facts.races import attempts
from services.catalog.facts.values import field
from services.catalog.parallel import gather

MAX_UPDATES = 1_000
# Each key costs two comparisons: the chunk exists, the replica is unchanged.
_KEYS_PER_TRANSACTION = 50

_STATES: dict[str, pb.ReplicaState] = {
    "copying": pb.REPLICA_STATE_COPYING,
    "ready": pb.REPLICA_STATE_READY,
    "failed": pb.REPLICA_STATE_FAILED,
}
_STATE_NAMES: dict[pb.ReplicaState, str] = {state: name for name, state in _STATES.items()}


def unpack_replicas(node: str, value: bytes) -> list[pb.Replica]:
    """By group, ascending."""
    return [
        pb.Replica(node=node, group=group, state=_STATES[of["state"]], content_id=of["content_id"])
        for group, of in json.loads(value).items()
    ]


def merged(value: bytes | None, updates: Iterable[pb.Replica]) -> bytes | None:
    """The value after the updates; None if no group is left."""
    groups = json.loads(value) if value is not None else {}
    for update in updates:
        if update.state == pb.REPLICA_STATE_REMOVED:
            groups.pop(update.group, None)
        else:
            groups[update.group] = {"content_id": update.content_id, "state": _STATE_NAMES[update.state]}
    return json.dumps(groups, sort_keys=True, separators=(",", ":")).encode() if groups else None


def ready(pairs: Sequence[tuple[bytes, bytes]], nodes: Collection[bytes]) -> bytes:
    """The ready replicas in the given directories, of one chunk's replica keys and values: pb.Node.replicas,
    serialized.

    A look-up has hundreds of them, so they are written as bytes rather than built one by one.
    """
    found = b""
    for key, value in pairs:
        node = key.rpartition(b"/")[2]
        if node not in nodes:
            continue
        for group, of in json.loads(value).items():
            if of["state"] == "ready":
                # Replica: node = 1, group = 2, state = 3 (ready: 2), content_id = 4.
                named = field(1, node) + field(2, group.encode())
                found += field(2, b"%b\x18\x02%b" % (named, field(4, of["content_id"].encode())))
    return found


@dataclass(frozen=True, slots=True)
class _Target:
    fingerprint: str
    hash: str
    node: str


class Replicas:
    """Records replica states."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys

    async def set(self, updates: Sequence[pb.ReplicaUpdate]) -> tuple[int, list[str]]:
        """(revision, the unknown chunks, whose updates were left out). Raises InvalidRequestError, ContendedError."""
        if len(updates) > MAX_UPDATES:
            raise InvalidRequestError("updates", len(updates), f"expected at most {MAX_UPDATES}")
        by_target: dict[_Target, list[pb.Replica]] = {}
        for update in updates:
            by_target.setdefault(_checked(update), []).append(update.replica)
        if not by_target:
            return (await self._etcd.read([])).revision, []
        targets = list(by_target)
        blocks = [targets[i : i + _KEYS_PER_TRANSACTION] for i in range(0, len(targets), _KEYS_PER_TRANSACTION)]
        results = await gather(self._set_block({t: by_target[t] for t in block}) for block in blocks)
        unknown = dict.fromkeys(hash for _, skipped in results for hash in skipped)
        return max(revision for revision, _ in results), list(unknown)

    async def _set_block(self, block: Mapping[_Target, list[pb.Replica]]) -> tuple[int, list[str]]:
        keys = self._keys
        reads = [
            read
            for t in block
            for read in (Get(keys.chunk(t.fingerprint, t.hash)), Get(keys.replica(t.fingerprint, t.hash, t.node)))
        ]
        async for _ in attempts(f"{len(block)} replica updates"):
            compare: list[Exists | Unchanged] = []
            writes: list[Operation] = []
            skipped: list[str] = []
            found = iter((current := await self._etcd.read(reads)).found)
            for target, updates in block.items():
                chunk, replica = next(found), next(found)
                removes = all(update.state == pb.REPLICA_STATE_REMOVED for update in updates)
                if not chunk and not removes:
                    skipped.append(target.hash)
                    continue
                key = keys.replica(target.fingerprint, target.hash, target.node)
                before = replica[0].value if replica else None
                after = merged(before, updates)
                if after == before:
                    continue
                if not removes:
                    compare.append(Exists(keys.chunk(target.fingerprint, target.hash)))
                compare.append(Unchanged(key, replica[0].mod_revision if replica else 0))
                writes.append(Delete(key) if after is None else Put(key, after))
            if not writes:
                return current.revision, skipped
            outcome = await self._etcd.transact(compare=compare, success=writes)
            if outcome.succeeded:
                return outcome.revision, skipped
        raise AssertionError("attempts() raises when it ends")


def _checked(update: pb.ReplicaUpdate) -> _Target:
    check_hex(update.fingerprint, "fingerprint")
    check_hex(update.hash, "hash")
    check_node(update.replica.node)
    if not update.replica.group:
        raise InvalidRequestError("group", "", "expected a layer group")
    if update.replica.state == pb.REPLICA_STATE_REMOVED:
        pass
    elif update.replica.state in _STATE_NAMES:
        check_hex(update.replica.content_id, "content_id")
    else:
        raise InvalidRequestError("state", update.replica.state, "expected copying, ready, failed or removed")
    return _Target(update.fingerprint, update.hash, update.replica.node)
