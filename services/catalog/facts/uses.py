"""When chunks were last used, by UTC day: at most one write per chunk and day.

A publication is a use of the chunk before it (publish.py writes that one always: the changed key is also what tells
collection that its leaf has become a parent).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import KeyValue
from services.catalog.facts.keys import Keys
from services.catalog.facts.known import Target, Written, check_count, check_ids, put_where_known

MAX_USES = 10_000
_MS_PER_DAY = 86_400_000
_REMEMBERED = 200_000


@dataclass(frozen=True, slots=True)
class Use:
    """day: of the last use, since 1970-01-01; days: on how many it was used."""

    day: int
    days: int


def day_of(unix_ms: int) -> int:
    """Days since 1970-01-01 UTC."""
    return unix_ms // _MS_PER_DAY


def unpack_use(value: bytes) -> Use:
    stored = json.loads(value)
    return Use(int(stored["day"]), int(stored["days"]))


def pack_use(use: Use) -> bytes:
    return json.dumps({"day": use.day, "days": use.days}, sort_keys=True, separators=(",", ":")).encode()


def used(stored: bytes | None, today: int) -> Use:
    """What stands after a use today. A clock that went back takes nothing back."""
    before = unpack_use(stored) if stored is not None else Use(-1, 0)
    return Use(today, before.days + 1) if today > before.day else before


class Uses:
    """Remembers what it has written today, so that repeating costs no trip. now_ms: unix milliseconds."""

    def __init__(self, etcd: EtcdClient, keys: Keys, *, now_ms: Callable[[], int]) -> None:
        self._etcd, self._keys, self._now_ms = etcd, keys, now_ms
        self._noted: OrderedDict[bytes, int] = OrderedDict()

    async def record(self, chunks: Sequence[pb.ChunkId]) -> Written:
        """Raises InvalidRequestError, ContendedError."""
        check_count("chunks", len(chunks), MAX_USES)
        today = day_of(self._now_ms())
        targets: list[Target] = []
        for chunk in chunks:
            check_ids(chunk.fingerprint, chunk.hash)
            key = self._keys.use(chunk.fingerprint, chunk.hash)
            if self._noted.get(key) != today:
                targets.append(Target(chunk.fingerprint, chunk.hash, key))

        def value(target: Target, stored: KeyValue | None) -> bytes | None:
            now = used(stored.value if stored else None, today)
            return None if stored and unpack_use(stored.value) == now else pack_use(now)

        written = await put_where_known(self._etcd, self._keys, targets, value, "uses")
        unknown = frozenset(written.unknown)
        for target in targets:
            if target.hash not in unknown:
                self._noted[target.key] = today
                self._noted.move_to_end(target.key)
        while len(self._noted) > _REMEMBERED:
            self._noted.popitem(last=False)
        return written
