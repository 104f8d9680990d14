"""Chunk facts whose objects are not in the bucket any more.

The catalog never runs ahead of the bytes, but bytes may run away from under it: objects deleted by hand, or an etcd
restored from a backup older than a collection. Every object that a fact names is asked for by HEAD. Only "there is no
such object" counts as a loss; a store that is away, slow or denies access ends the search.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.run import Run
from services.catalog.facts.values import unpack
from services.catalog.parallel import gather

_AT_ONCE = 256
"""Objects asked for at a time; the store's threads bound those on the wire."""


@dataclass(frozen=True, slots=True)
class _Named:
    """An object that a fact names."""

    chunk: bytes  # raw hash
    revision: int  # of the fact
    receipt: pb.Receipt


@dataclass(slots=True)
class Search:
    """One model's, of one owner where given. `fresh`: found missing and not yet reported."""

    run_of: Run
    fingerprint: str
    owner: str
    fresh: list[pb.MissingObject] = field(default_factory=list)
    _missing: list[_Named] = field(default_factory=list)

    async def run(self) -> AsyncIterator[None]:
        """Asks for every object; yields after each page of facts. Raises StoreError."""
        run = self.run_of
        async for page in run.etcd.scan(run.keys.of_model("chunks", self.fingerprint)):
            named: list[_Named] = []
            for kv in page:
                chunk = unpack(pb.Chunk, kv.value)
                if not self.owner or chunk.owner == self.owner:
                    raw = bytes.fromhex(chunk.hash)
                    named += [_Named(raw, kv.mod_revision, receipt) for receipt in chunk.receipts]
            for i in range(0, len(named), _AT_ONCE):
                run.check()
                await self._look(named[i : i + _AT_ONCE])
            yield

    async def _look(self, named: Sequence[_Named]) -> None:
        self.run_of.totals.objects_examined += len(named)
        for one in await self._absent(named):
            self._missing.append(one)
            self.fresh.append(
                pb.MissingObject(
                    fingerprint=self.fingerprint, hash=one.chunk.hex(), group=one.receipt.group, key=one.receipt.key
                )
            )

    async def confirmed(self) -> dict[bytes, int]:
        """Chunks with an object that is still missing: raw hash → the fact's revision. Raises StoreError."""
        lost: dict[bytes, int] = {}
        for i in range(0, len(self._missing), _AT_ONCE):
            for one in await self._absent(self._missing[i : i + _AT_ONCE]):
                lost[one.chunk] = one.revision
        return lost

    async def _absent(self, named: Sequence[_Named]) -> list[_Named]:
        found = await gather(self.run_of.store.stat(one.receipt.key) for one in named)
        return [one for one, stat in zip(named, found, strict=True) if stat is None]
