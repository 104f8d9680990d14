"""Whose bucket this is.

A collection takes every object that no fact names for an orphan. That is only true of a bucket whose facts are all in
this etcd: not of one that another cluster shares by mistake, and not after etcd has lost its data, when everything
would be an orphan. So bucket and etcd bear the same random mark, made when a catalog first meets a bucket without one.
Where they differ, objects without facts are left alone until a rebuild has published what the bucket holds and marked
it anew.

etcd is marked before the bucket: a crash in between leaves a bucket without a mark, which the next attempt gives it.
An empty mark (some stores keep the empty object of a writer that died) is nobody's, until a rebuild.
"""

from __future__ import annotations

import secrets

from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import Get, Put, Unchanged
from services.catalog.facts.keys import Keys
from services.catalog.store import ObjectStore

MARK = "segue-owner"
"""The object's key: outside those of chunks and decisions."""
OF_ANOTHER = "the bucket is another etcd's: objects without facts are left alone; `segue cache rebuild` adopts it"


class Ownership:
    """Of the catalog's bucket. Its methods raise EtcdError, StoreError."""

    def __init__(self, etcd: EtcdClient, keys: Keys, store: ObjectStore) -> None:
        self._etcd, self._store = etcd, store
        self._key = keys.bucket(store.target.bucket)

    async def owned(self, *, write: bool = True) -> bool:
        """Whether the bucket's facts are this etcd's. A bucket without a mark becomes so; without `write`, would."""
        # The bucket first: if it has been marked by this cluster, etcd was before.
        mark = await self._store.read(MARK)
        stored = await self._stored()
        if mark is None and not write:
            return True
        if mark is None:
            stored = stored or await self._choose()
            await self._store.put_if_absent(MARK, stored)
            mark = await self._store.read(MARK)
        return mark == stored

    async def proven(self) -> bool:
        """Whether the bucket bears this etcd's mark now. One without a mark proves nothing: it may be the wrong one."""
        stored = await self._stored()
        return stored is not None and stored == await self._store.read(MARK)

    async def adopt(self) -> None:
        """From now on it is this etcd's, and nobody else's."""
        made = secrets.token_hex(16).encode()
        await self._etcd.transact(success=[Put(self._key, made)])
        await self._store.remove(MARK)
        await self._store.put_if_absent(MARK, made)

    async def _stored(self) -> bytes | None:
        (found,) = (await self._etcd.read([Get(self._key)])).found
        return found[0].value if found else None

    async def _choose(self) -> bytes:
        """The same for every replica."""
        made = secrets.token_hex(16).encode()
        outcome = await self._etcd.transact(
            compare=[Unchanged(self._key, 0)], success=[Put(self._key, made)], failure=[Get(self._key)]
        )
        return made if outcome.succeeded else outcome.reads[0][0].value
