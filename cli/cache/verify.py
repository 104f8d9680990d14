"""Verification: every chain walked, every object read and hashed, every fault named.

A fact is checked against the other facts (its parent is there, ends where it starts, is no tail) and against its
objects: they exist, have the receipt's size, hash to the content id in their key, are canonical, say of themselves
what the fact says, and hold token ids that hash to the chunk's name and to the fact's SHA-256. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from libs.continuation.errors import IdentityError, ObjectError
from libs.continuation.hashing import tokens_sha256
from libs.continuation.keys import parse_key
from libs.continuation.objects import open_by_key
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.parallel import gather


@dataclass(frozen=True)
class Fault:
    """reason: a stable label: parent_missing, parent_misplaced, missing, size, key, fact_mismatch, or an object's own:
    truncated, malformed, content_mismatch, swapped, token_mismatch."""

    fingerprint: str
    hash: str
    reason: str
    detail: str
    group: str = ""
    key: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Reader(Protocol):
    """The bucket: the whole object, or None if there is none."""

    async def read(self, key: str) -> bytes | None: ...


@dataclass(frozen=True)
class Progress:
    """After each chunk."""

    objects: int
    bytes: int
    faults: tuple[Fault, ...]


def walk(listed: Iterable[pb.ListedChunk]) -> list[Fault]:
    """Faults between facts."""
    items = list(listed)
    known = {(item.fingerprint, item.chunk.hash): item.chunk for item in items}
    faults: list[Fault] = []
    for item in items:
        chunk = item.chunk
        if chunk.start == 0:
            continue
        parent = known.get((item.fingerprint, chunk.parent))
        if parent is None:
            detail = f"starts at {chunk.start}, but its parent {chunk.parent} is no fact"
            faults.append(Fault(item.fingerprint, chunk.hash, "parent_missing", detail))
        elif parent.tail or parent.end != chunk.start or parent.owner != chunk.owner:
            detail = f"starts at {chunk.start}, its parent {chunk.parent} ends at {parent.end}, tail: {parent.tail}"
            faults.append(Fault(item.fingerprint, chunk.hash, "parent_misplaced", detail))
    return faults


async def verify_objects(reader: Reader, listed: Sequence[pb.ListedChunk], at_once: int = 4) -> AsyncIterator[Progress]:
    """Reads every object, `at_once` chunks at a time."""
    for i in range(0, len(listed), at_once):
        for progress in await gather(_chunk(reader, item) for item in listed[i : i + at_once]):
            yield progress


async def _chunk(reader: Reader, item: pb.ListedChunk) -> Progress:
    faults: list[Fault] = []
    read = 0
    for receipt in item.chunk.receipts:

        def fault(reason: str, detail: str, receipt: pb.Receipt = receipt) -> None:
            faults.append(Fault(item.fingerprint, item.chunk.hash, reason, detail, receipt.group, receipt.key))

        body = await reader.read(receipt.key)
        if body is None:
            fault("missing", "the fact names an object that is not in the bucket")
            continue
        read += len(body)
        if len(body) != receipt.size:
            fault("size", f"has {len(body)} bytes, the receipt says {receipt.size}")
        _object(body, item, receipt, fault)
    return Progress(len(item.chunk.receipts), read, tuple(faults))


def _object(body: bytes, item: pb.ListedChunk, receipt: pb.Receipt, fault: Callable[[str, str], None]) -> None:
    chunk = item.chunk
    try:
        key = parse_key(receipt.key)
    except IdentityError as error:
        fault("key", str(error))
        return
    named = (key.fingerprint, key.owner, key.hash, key.group, key.content_id)
    if named != (item.fingerprint, chunk.owner, chunk.hash, receipt.group, receipt.content_id):
        fault("key", "names another object than the fact")
    try:
        with open_by_key(body, key) as view:
            says = (view.metadata.parent, view.metadata.start, view.metadata.end)
            digest = tokens_sha256(view.token_ids())
    except ObjectError as error:
        fault(error.reason, str(error))
        return
    if says != (chunk.parent, chunk.start, chunk.end):
        fault("fact_mismatch", f"the object lies at [{says[1]}, {says[2]}) after {says[0]}, the fact says otherwise")
    if digest != chunk.tokens_sha256:
        fault("fact_mismatch", f"the object's tokens have SHA-256 {digest}, the fact says {chunk.tokens_sha256}")
