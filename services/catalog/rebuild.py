"""Chunk facts from the bucket: what restores the catalog when etcd's data is lost.

Object keys say model, owner, chunk, group and content; headers say parent and positions; and the token ids inside hash,
under that parent, to the chunk's very name, which no swapped or invented object can match. So two small ranged reads an
object suffice. What is found is published by the same code as any other publication, parents first: repeating it
changes nothing, and it may run beside live workers. Of several contents for one group the first by name is taken.

A rebuild of the whole bucket also makes it this etcd's own (`collect.ownership`): its orphans may be collected again.

An object that collection has condemned stays condemned: its fact was removed on purpose.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import numpy as np

from libs.continuation.chain import node_hash
from libs.continuation.errors import IdentityError, ObjectError, SwappedObjectError, TokenMismatchError
from libs.continuation.hashing import tokens_sha256
from libs.continuation.keys import KEY_VERSION, ObjectKey, key_prefix, parse_key
from libs.continuation.object_format import TOKENS_TENSOR, ObjectMetadata, header_size, read_header
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.service.errors import ServiceError
from services.catalog.collect.ownership import Ownership
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import Get
from services.catalog.facts.errors import (
    BeingCollectedError,
    ChunkConflictError,
    MissingGroupError,
    MissingParentError,
    NotDurableError,
    UnknownModelError,
)
from services.catalog.facts.garbage import unpack_garbage
from services.catalog.facts.keys import Keys, check_hex
from services.catalog.facts.publish import Publisher
from services.catalog.parallel import gather
from services.catalog.store import Listed, ObjectStore

# Headers of models with few layers fit in; longer ones cost one more read.
_FIRST_READ = 16 << 10
_AT_ONCE = 64
_PUBLISHED_AT_ONCE = 200
# Refusals of single chunks, by the label they are reported under.
_REASONS: dict[type[ServiceError], str] = {
    UnknownModelError: "unknown_model",
    MissingGroupError: "incomplete",
    MissingParentError: "missing_parent",
    ChunkConflictError: "conflict",
    NotDurableError: "missing",
    BeingCollectedError: "condemned",
}


@dataclass(slots=True)
class _Found:
    """One chunk as its objects describe it."""

    fingerprint: str
    chunk: pb.Chunk


@dataclass(slots=True)
class _Progress:
    phase: str = "listing"
    sums: pb.RebuildResponse = field(default_factory=pb.RebuildResponse)

    def unusable(self, key: str, reason: str, detail: str) -> None:
        self.sums.unusable.add(key=key, reason=reason, detail=detail[:300])

    def report(self) -> pb.RebuildResponse:
        answer = pb.RebuildResponse()
        answer.CopyFrom(self.sums)
        answer.phase = self.phase
        del self.sums.unusable[:]
        return answer


class Rebuilder:
    """Reads the bucket, publishes through `publisher`."""

    def __init__(self, etcd: EtcdClient, keys: Keys, store: ObjectStore, publisher: Publisher) -> None:
        self._etcd, self._keys, self._store, self._publisher = etcd, keys, store, publisher
        self._ownership = Ownership(etcd, keys, store)

    async def run(self, fingerprint: str, dry: bool) -> AsyncGenerator[pb.RebuildResponse]:
        """Progress, the last message `done`. Raises InvalidRequestError."""
        prefix = key_prefix(check_hex(fingerprint, "fingerprint")) if fingerprint else f"{KEY_VERSION}/"
        progress = _Progress()
        found: dict[tuple[str, str], _Found] = {}
        async for page in self._store.list(prefix):
            progress.phase = "reading"
            progress.sums.objects += len(page)
            keys = [(parsed, item) for item in page if (parsed := _parsed(item, progress)) is not None]
            usable = await self._not_condemned(keys, progress)
            for i in range(0, len(usable), _AT_ONCE):
                block = usable[i : i + _AT_ONCE]
                described = await gather(self._describe(key, item, progress) for key, item in block)
                for (key, item), metadata in zip(block, described, strict=True):
                    if metadata is not None:
                        _add(found, key, item, *metadata, self._store.target.bucket, progress)
                yield progress.report()
        progress.phase = "publishing"
        for of in sorted({of for of, _ in found}):
            chunks = sorted((f.chunk for f in found.values() if f.fingerprint == of), key=lambda c: (c.start, c.hash))
            for i in range(0, len(chunks), _PUBLISHED_AT_ONCE):
                await self._publish(of, chunks[i : i + _PUBLISHED_AT_ONCE], dry, progress)
                yield progress.report()
        if not dry and not fingerprint and not await self._ownership.owned():
            # What the bucket holds has its facts here now; what could not be used is an orphan.
            await self._ownership.adopt()
        last = progress.report()
        last.done, last.revision = True, (await self._etcd.read([])).revision
        yield last

    async def _not_condemned(
        self, keys: Sequence[tuple[ObjectKey, Listed]], progress: _Progress
    ) -> list[tuple[ObjectKey, Listed]]:
        reads = await self._etcd.read([Get(self._keys.garbage(key.fingerprint, key.hash)) for key, _ in keys])
        usable: list[tuple[ObjectKey, Listed]] = []
        for (key, item), kvs in zip(keys, reads.found, strict=True):
            condemned = unpack_garbage(kvs[0].value).get(item.key) if kvs else None
            if condemned is not None and not condemned.deleted_ms:
                progress.unusable(item.key, "condemned", "its fact was removed by collection")
            else:
                usable.append((key, item))
        return usable

    async def _describe(self, key: ObjectKey, item: Listed, progress: _Progress) -> tuple[ObjectMetadata, str] | None:
        """The object's metadata and the SHA-256 of its tokens; None if it must not be used, which is reported."""
        try:
            start = await self._store.read(item.key, 0, _FIRST_READ)
            if start is None:
                progress.unusable(item.key, "missing", "it went while it was read")
                return None
            size = header_size(start)
            if size > len(start):
                start = await self._store.read(item.key, 0, size) or b""
            metadata, _, form = read_header(start[:size], item.size)
            for name in ("fingerprint", "owner", "hash", "group"):
                if getattr(metadata, name) != getattr(key, name):
                    raise SwappedObjectError(f"its {name} is {getattr(metadata, name)}")
            slot = next(slot for slot in form.slots if slot.name == TOKENS_TENSOR)
            body: bytes | None = start[slot.offset : slot.offset + slot.nbytes]
            if body is None or len(body) < slot.nbytes:
                body = await self._store.read(item.key, slot.offset, slot.nbytes)
            tokens = np.frombuffer(body or b"", dtype="<u4")
            if len(tokens) != metadata.tokens or node_hash(metadata.parent, tokens) != metadata.hash:
                raise TokenMismatchError("its tokens do not hash to its name")
        except ObjectError as error:
            progress.unusable(item.key, error.reason, str(error))
            return None
        except IdentityError as error:
            progress.unusable(item.key, "token_mismatch", str(error))
            return None
        progress.sums.read += 1
        return metadata, tokens_sha256(tokens)

    async def _publish(self, of: str, chunks: Sequence[pb.Chunk], dry: bool, progress: _Progress) -> None:
        """All at once; where one is refused, one by one."""
        if dry:
            reads = await self._etcd.read([Get(self._keys.chunk(of, chunk.hash)) for chunk in chunks])
            standing = sum(bool(kvs) for kvs in reads.found)
            progress.sums.standing += standing
            progress.sums.published += len(chunks) - standing
            return
        try:
            published, _ = await self._publisher.publish(of, chunks, "")
        except tuple(_REASONS) as error:
            if len(chunks) > 1:
                for chunk in chunks:
                    await self._publish(of, [chunk], dry, progress)
                return
            progress.unusable(chunks[0].receipts[0].key, _REASONS[type(error)], str(error))
            return
        created = sum(one.created for one in published)
        progress.sums.published += created
        progress.sums.standing += len(published) - created


def _parsed(item: Listed, progress: _Progress) -> ObjectKey | None:
    try:
        return parse_key(item.key)
    except IdentityError as error:
        progress.unusable(item.key, "unnamed", str(error))
        return None


def _add(
    found: dict[tuple[str, str], _Found],
    key: ObjectKey,
    item: Listed,
    metadata: ObjectMetadata,
    sha256: str,
    bucket: str,
    progress: _Progress,
) -> None:
    stands = found.get((key.fingerprint, key.hash))
    if stands is None:
        chunk = pb.Chunk(
            hash=metadata.hash,
            parent=metadata.parent,
            start=metadata.start,
            end=metadata.end,
            tokens_sha256=sha256,
            owner=metadata.owner,
            tail=metadata.is_tail,
        )
        stands = found[key.fingerprint, key.hash] = _Found(key.fingerprint, chunk)
    elif (stands.chunk.parent, stands.chunk.start, stands.chunk.owner) != (
        metadata.parent,
        metadata.start,
        metadata.owner,
    ):
        progress.unusable(item.key, "conflict", "its place in the chain is not that of another group's object")
        return
    if all(receipt.group != key.group for receipt in stands.chunk.receipts):
        stands.chunk.receipts.add(
            group=key.group, bucket=bucket, key=item.key, size=item.size, content_id=key.content_id
        )
