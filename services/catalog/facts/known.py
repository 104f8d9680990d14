"""Facts about chunks that hang on the chunk's own: written only where it stands, in one transaction with that check.

So nothing is ever recorded about a chunk that is being collected at the same moment: whichever of the two transactions
comes second sees the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import (
    Comparison,
    Delete,
    Exists,
    Get,
    KeyValue,
    Operation,
    Put,
    Unchanged,
)
from services.catalog.facts.errors import InvalidRequestError
from services.catalog.facts.keys import Keys, check_hex
from services.catalog.facts.races import attempts
from services.catalog.parallel import gather

# Each target costs two comparisons: the chunk exists, the key is unchanged.
_PER_TRANSACTION = 50


@dataclass(frozen=True, slots=True)
class Target:
    """`key` says something about the chunk."""

    fingerprint: str
    hash: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """unknown: hashes of chunks that are no facts, once each, in order; count: keys written; revision: etcd's."""

    unknown: list[str]
    count: int
    revision: int


Value = Callable[[Target, KeyValue | None], bytes | None]
"""What a key shall hold, from what it holds; None: leave it."""


def check_ids(fingerprint: str, hash: str) -> None:
    check_hex(fingerprint, "fingerprint")
    check_hex(hash, "hash")


def check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(field, count, f"expected at most {limit}")


def check_text(field: str, value: str, limit: int) -> str:
    if len(value.encode()) > limit:
        raise InvalidRequestError(field, value, f"expected at most {limit} bytes")
    return value


async def put_where_known(
    etcd: EtcdClient, keys: Keys, targets: Sequence[Target], value: Value, what: str, lease: int = 0
) -> Written:
    """Writes each target's key where its chunk is a fact. Raises ContendedError.

    Transactions run in parallel; each is decided again if it loses a race.
    """
    unique = list({target.key: target for target in targets}.values())
    runs = [unique[i : i + _PER_TRANSACTION] for i in range(0, len(unique), _PER_TRANSACTION)]
    if not runs:
        return Written([], 0, (await etcd.read([])).revision)
    done = await gather(_put(etcd, keys, run, value, what, lease) for run in runs)
    unknown = list(dict.fromkeys(hash for part in done for hash in part.unknown))
    return Written(unknown, sum(part.count for part in done), max(part.revision for part in done))


async def _put(etcd: EtcdClient, keys: Keys, targets: Sequence[Target], value: Value, what: str, lease: int) -> Written:
    reads = [read for t in targets for read in (Get(keys.chunk(t.fingerprint, t.hash)), Get(t.key))]
    async for _ in attempts(f"{len(targets)} {what}"):
        compare: list[Comparison] = []
        writes: list[Operation] = []
        unknown: list[str] = []
        current = await etcd.read(reads)
        found = iter(current.found)
        for target in targets:
            chunk, stored = next(found), next(found)
            if not chunk:
                unknown.append(target.hash)
                continue
            before = stored[0] if stored else None
            after = value(target, before)
            if after is None:
                continue
            compare.append(Exists(keys.chunk(target.fingerprint, target.hash)))
            compare.append(Unchanged(target.key, before.mod_revision if before else 0))
            writes.append(Put(target.key, after, lease))
        if not writes:
            return Written(unknown, 0, current.revision)
        outcome = await etcd.transact(compare=compare, success=writes)
        if outcome.succeeded:
            return Written(unknown, len(writes), outcome.revision)
    raise AssertionError("attempts() raises when it ends")


async def delete_all(etcd: EtcdClient, keys: Sequence[bytes]) -> tuple[int, int]:
    """Deletes keys, whether they exist or not: (how many did, etcd's revision)."""
    unique = list(dict.fromkeys(keys))
    runs = [unique[i : i + _PER_TRANSACTION] for i in range(0, len(unique), _PER_TRANSACTION)]
    if not runs:
        return 0, (await etcd.read([])).revision
    outcomes = await gather(
        etcd.transact(success=[operation for key in run for operation in (Get(key), Delete(key))]) for run in runs
    )
    removed = sum(bool(read) for outcome in outcomes for read in outcome.reads)
    return removed, max(outcome.revision for outcome in outcomes)
