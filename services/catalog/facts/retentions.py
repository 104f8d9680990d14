"""How long each owner's chunks are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from libs.continuation.tenancy import OWNER_BYTES
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import Delete, GetPrefix, Operation, Put
from services.catalog.facts.keys import Keys, check_hex, last_part

_LONGEST_DAYS = 36_500


@dataclass(frozen=True, slots=True)
class Keeping:
    """idle_days: without use; max_age_days: since publication, with all that follows it in its chains. 0 = for ever."""

    idle_days: int
    max_age_days: int = 0


class Retentions:
    """standard: of owners that have none of their own."""

    def __init__(self, etcd: EtcdClient, keys: Keys, standard: Keeping) -> None:
        self._etcd, self._keys, self.standard = etcd, keys, standard

    async def set(self, wanted: pb.Retention, reset: bool) -> int:
        """etcd's revision. Raises InvalidRequestError."""
        check_hex(wanted.owner, "owner", OWNER_BYTES)
        days = {
            "idle_days": min(wanted.idle_days, _LONGEST_DAYS),
            "max_age_days": min(wanted.max_age_days, _LONGEST_DAYS),
        }
        key = self._keys.retention(wanted.owner)
        write: Operation = (
            Delete(key) if reset else Put(key, json.dumps(days, sort_keys=True, separators=(",", ":")).encode())
        )
        return (await self._etcd.transact(success=[write])).revision

    async def read(self) -> tuple[Mapping[str, Keeping], int]:
        """By owner, and etcd's revision."""
        outcome = await self._etcd.transact(success=[GetPrefix(self._keys.retentions)])
        return {last_part(kv.key): Keeping(**json.loads(kv.value)) for kv in outcome.reads[0]}, outcome.revision
