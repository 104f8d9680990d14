"""Demands: where a replica should be. They live under leases, one per call, so what nobody renews goes by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.errors import EtcdError
from services.catalog.etcd.transaction import KeyValue
from services.catalog.facts.errors import InvalidRequestError
from services.catalog.facts.keys import Keys, check_node
from services.catalog.facts.known import (
    Target,
    Written,
    check_count,
    check_ids,
    check_text,
    delete_all,
    put_where_known,
)
from services.catalog.facts.paging import page_size, read_page

MAX_DEMANDS = 1_000
DEFAULT_TTL_S = 60
LONGEST_TTL_S = 3_600
_REQUESTER_BYTES = 256


def pack_demand(demand: pb.Demand) -> bytes:
    return json.dumps(
        {"priority": demand.priority, "requester": demand.requester}, sort_keys=True, separators=(",", ":")
    ).encode()


def unpack_demand(parts: Sequence[str], value: bytes) -> pb.Demand:
    """parts: the key's below the prefix: demands, fingerprint, hash, node."""
    stored = json.loads(value)
    _, fingerprint, hash, node = parts
    return pb.Demand(
        fingerprint=fingerprint, hash=hash, node=node, priority=stored["priority"], requester=stored["requester"]
    )


class Demands:
    """Sets, withdraws and lists demands, and takes the confirmations of removals."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys

    async def set(self, demands: Sequence[pb.Demand], ttl_ms: int) -> tuple[Written, int]:
        """(what was written, granted time to live in s). Raises InvalidRequestError, ContendedError."""
        check_count("demands", len(demands), MAX_DEMANDS)
        ttl_s = -(-ttl_ms // 1_000) or DEFAULT_TTL_S
        if ttl_s > LONGEST_TTL_S:
            raise InvalidRequestError("ttl_ms", ttl_ms, f"expected at most {LONGEST_TTL_S * 1_000}")
        values: dict[bytes, bytes] = {}
        targets: list[Target] = []
        for demand in demands:
            check_ids(demand.fingerprint, demand.hash)
            check_text("requester", demand.requester, _REQUESTER_BYTES)
            key = self._keys.demand(demand.fingerprint, demand.hash, check_node(demand.node))
            targets.append(Target(demand.fingerprint, demand.hash, key))
            values[key] = pack_demand(demand)
        lease, granted_s = await self._etcd.grant_lease(ttl_s)
        written: Written | None = None
        try:
            # Written even where the value stands already: it shall stand under the new lease.
            written = await put_where_known(
                self._etcd, self._keys, targets, lambda target, _: values[target.key], "demands", lease
            )
        finally:
            if written is None or not written.count:
                with suppress(EtcdError):
                    await self._etcd.revoke_lease(lease)
        return written, granted_s

    async def remove(self, demands: Sequence[pb.DemandId]) -> tuple[int, int]:
        """(demands removed, etcd's revision). Raises InvalidRequestError."""
        check_count("demands", len(demands), MAX_DEMANDS)
        keys = []
        for demand in demands:
            check_ids(demand.fingerprint, demand.hash)
            keys.append(self._keys.demand(demand.fingerprint, demand.hash, check_node(demand.node)))
        return await delete_all(self._etcd, keys)

    async def list(self, node: str, asked: int, token: str) -> tuple[list[pb.Demand], str, int]:
        """(demands, next token, revision). Raises InvalidRequestError."""
        if node:
            check_node(node)
        size = page_size(asked, MAX_DEMANDS)
        root = self._keys.demands
        page = await read_page(self._etcd, root, root, token, size)
        found = [self._demand(kv) for kv in page.found]
        return [demand for demand in found if not node or demand.node == node], page.token, page.revision

    async def confirm(self, node: str, chunks: Sequence[pb.ChunkId]) -> int:
        """Forgets removals that a directory has carried out; etcd's revision. Raises InvalidRequestError."""
        check_node(node)
        check_count("chunks", len(chunks), MAX_DEMANDS)
        for chunk in chunks:
            check_ids(chunk.fingerprint, chunk.hash)
        _, revision = await delete_all(
            self._etcd, [self._keys.removal(node, chunk.fingerprint, chunk.hash) for chunk in chunks]
        )
        return revision

    def _demand(self, kv: KeyValue) -> pb.Demand:
        return unpack_demand(self._keys.relative(kv.key), kv.value)
