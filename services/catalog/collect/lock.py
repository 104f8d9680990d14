"""One collection at a time in the cluster: a key under a lease.

The holder extends the lease in the background and keeps a deadline of its own, counted from the moment a request was
sent; past it `check` fails, before etcd would give the lock away. And every write of a collection compares the lock's
key with what it was when taken, so that not even a process that slept through its lease can write. Only the deletion of
an object cannot be conditional: the store's timeout, shorter than the lease, bounds how late one may arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.errors import EtcdError, EtcdLeaseError
from services.catalog.etcd.transaction import Get, Put, Unchanged
from services.catalog.facts.errors import CollectionLostError, CollectionRunningError
from services.catalog.facts.keys import Keys

LEASE_S = 15


class Held:
    """The lock as held. `comparison` goes into every transaction."""

    def __init__(self, key: bytes, revision: int, deadline: float) -> None:
        self.comparison = Unchanged(key, revision)
        self.deadline = deadline

    def check(self) -> None:
        """Raises CollectionLostError once the lease may have expired."""
        if time.monotonic() >= self.deadline:
            raise CollectionLostError("its lock's lease could not be extended in time")


@asynccontextmanager
async def holding(etcd: EtcdClient, keys: Keys, holder: str, lease_s: int = LEASE_S) -> AsyncIterator[Held]:
    """Holds the lock within the block. Raises CollectionRunningError if another does."""
    sent = time.monotonic()
    lease, ttl_s = await etcd.grant_lease(lease_s)
    key = keys.collection_lock
    try:
        outcome = await etcd.transact(
            compare=[Unchanged(key, 0)], success=[Put(key, holder.encode(), lease)], failure=[Get(key)]
        )
        if not outcome.succeeded:
            found = outcome.reads[0]
            raise CollectionRunningError(found[0].value.decode() if found else "another replica")
        held = Held(key, outcome.revision, sent + ttl_s)
        extending = asyncio.create_task(_extend(etcd, lease, held, ttl_s))
        try:
            yield held
        finally:
            extending.cancel()
            await asyncio.wait({extending})
    finally:
        # Tidiness: it would expire by itself.
        with suppress(EtcdError):
            await etcd.revoke_lease(lease)


async def _extend(etcd: EtcdClient, lease: int, held: Held, ttl_s: int) -> None:
    while True:
        await asyncio.sleep(ttl_s / 4)
        sent = time.monotonic()
        try:
            left_s = await etcd.extend_lease(lease)
        except EtcdLeaseError:
            left_s = 0
        except EtcdError:
            continue
        if left_s <= 0:
            held.deadline = 0.0
            return
        held.deadline = sent + left_s
