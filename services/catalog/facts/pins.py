"""Pins: chunks that collection leaves alone, and with them all before them, because it takes leaves only."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.facts.keys import Keys, check_hex
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

MAX_PINS = 1_000
_WHO_BYTES, _WHY_BYTES = 256, 1_024


def unpack_pin(fingerprint: str, hash: str, value: bytes) -> pb.PinFact:
    stored = json.loads(value)
    return pb.PinFact(
        fingerprint=fingerprint, hash=hash, who=stored["who"], why=stored["why"], pinned_ms=stored["pinned_ms"]
    )


class Pins:
    """now_ms: unix milliseconds."""

    def __init__(self, etcd: EtcdClient, keys: Keys, *, now_ms: Callable[[], int]) -> None:
        self._etcd, self._keys, self._now_ms = etcd, keys, now_ms

    async def pin(self, chunks: Sequence[pb.ChunkId], who: str, why: str) -> Written:
        """Raises InvalidRequestError, ContendedError."""
        stands = {
            "who": check_text("who", who, _WHO_BYTES),
            "why": check_text("why", why, _WHY_BYTES),
            "pinned_ms": self._now_ms(),
        }
        value = json.dumps(stands, sort_keys=True, separators=(",", ":")).encode()
        return await put_where_known(
            self._etcd, self._keys, self._targets(chunks), lambda target, stored: value, "pins"
        )

    async def unpin(self, chunks: Sequence[pb.ChunkId]) -> tuple[int, int]:
        """(pins removed, revision). Raises InvalidRequestError."""
        return await delete_all(self._etcd, [target.key for target in self._targets(chunks)])

    def _targets(self, chunks: Sequence[pb.ChunkId]) -> list[Target]:
        check_count("chunks", len(chunks), MAX_PINS)
        for chunk in chunks:
            check_ids(chunk.fingerprint, chunk.hash)
        found = {self._keys.pin(c.fingerprint, c.hash): c for c in chunks}
        return [Target(c.fingerprint, c.hash, key) for key, c in found.items()]

    async def list(self, fingerprint: str, asked: int, token: str) -> tuple[list[pb.PinFact], str, int]:
        """(pins, next token, revision). Raises InvalidRequestError."""
        if fingerprint:
            check_hex(fingerprint, "fingerprint")
        prefix = self._keys.of_model("pins", fingerprint)
        page = await read_page(self._etcd, prefix, self._keys.of_model("pins"), token, page_size(asked, MAX_PINS))
        pins = []
        for kv in page.found:
            _, of, hash = self._keys.relative(kv.key)
            pins.append(unpack_pin(of, hash, kv.value))
        return pins, page.token, page.revision
