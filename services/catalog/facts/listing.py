"""Listing chunks with everything known of them, for people and tools; never on a request's path."""

from __future__ import annotations

import re

from libs.continuation.tenancy import OWNER_BYTES
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import Get, GetPrefix, Read
from services.catalog.facts.errors import InvalidRequestError
from services.catalog.facts.keys import Keys, check_hex, last_part
from services.catalog.facts.paging import page_size, read_page
from services.catalog.facts.pins import unpack_pin
from services.catalog.facts.replicas import unpack_replicas
from services.catalog.facts.uses import Use, day_of, unpack_use
from services.catalog.facts.values import unpack

MAX_CHUNKS = 500
_HASH_PREFIX = re.compile(r"[0-9a-f]{0,64}")


class Listing:
    """Pages of chunks."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys

    async def page(
        self, fingerprint: str, owner: str, hash_prefix: str, asked: int, token: str
    ) -> tuple[list[pb.ListedChunk], str, int]:
        """(chunks, next token, revision). Raises InvalidRequestError."""
        if fingerprint:
            check_hex(fingerprint, "fingerprint")
        if owner:
            check_hex(owner, "owner", OWNER_BYTES)
        if not _HASH_PREFIX.fullmatch(hash_prefix):
            raise InvalidRequestError("hash_prefix", hash_prefix, "expected at most 64 lowercase hex digits")
        prefix = self._keys.of_model("chunks", fingerprint)
        if fingerprint:
            prefix += hash_prefix.encode()
        root = self._keys.of_model("chunks")
        page = await read_page(self._etcd, prefix, root, token, page_size(asked, MAX_CHUNKS))
        wanted: list[tuple[str, pb.Chunk]] = []
        for kv in page.found:
            _, of, hash = self._keys.relative(kv.key)
            if hash.startswith(hash_prefix):
                chunk = unpack(pb.Chunk, kv.value)
                if not owner or chunk.owner == owner:
                    wanted.append((of, chunk))
        return await self._listed(wanted), page.token, page.revision

    async def _listed(self, wanted: list[tuple[str, pb.Chunk]]) -> list[pb.ListedChunk]:
        keys = self._keys
        reads: list[Read] = []
        for of, chunk in wanted:
            reads += [Get(keys.pin(of, chunk.hash)), Get(keys.use(of, chunk.hash))]
            reads.append(GetPrefix(keys.replicas(of, chunk.hash)))
        found = iter((await self._etcd.read(reads)).found if reads else ())
        listed: list[pb.ListedChunk] = []
        for of, chunk in wanted:
            pin, use, replicas = next(found), next(found), next(found)
            last = unpack_use(use[0].value) if use else Use(0, 0)
            one = pb.ListedChunk(
                fingerprint=of,
                chunk=chunk,
                last_use_day=max(last.day, day_of(chunk.created_ms)),
                use_days=last.days,
            )
            for kv in replicas:
                one.replicas.extend(unpack_replicas(last_part(kv.key), kv.value))
            if pin:
                one.pin.CopyFrom(unpack_pin(of, chunk.hash, pin[0].value))
            listed.append(one)
        return listed
