"""Superseded tails: those whose tokens are the first of a full chunk that exists under the same parent.

Two chunks under one parent may be two continuations, and facts alone do not tell them apart: the tail's hash must be
that of the full chunk's first tokens. The token ids stand in the chunk's object, at a place its metadata determines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from libs.continuation.chain import node_hash, tails_after
from libs.continuation.errors import IdentityError
from libs.continuation.layout import parse_group_name
from libs.continuation.object_format import TOKENS_TENSOR, ObjectMetadata, object_format
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.collect.marking import Fact, tails_in_question
from services.catalog.collect.run import Run
from services.catalog.etcd.transaction import Get
from services.catalog.facts.values import unpack
from services.catalog.parallel import gather

_AT_ONCE = 50


async def superseded(run: Run, fingerprint: str, facts: Sequence[Fact]) -> frozenset[bytes]:
    """Raw hashes of the tails whose full chunk exists. What cannot be read supersedes nothing."""
    # On a thread where it takes long: look-ups are answered meanwhile.
    many = len(facts) >= 10_000
    in_question = await asyncio.to_thread(tails_in_question, facts) if many else tails_in_question(facts)
    full = [fact for children in in_question.values() for fact in children]
    if not full:
        return frozenset()
    (model,) = (await run.etcd.read([Get(run.keys.model(fingerprint))])).found
    layers = {g.name: tuple(g.layers) for g in unpack(pb.Model, model[0].value).groups} if model else {}
    tails = {fact.hash for fact in facts if fact.tail}
    found: set[bytes] = set()
    for i in range(0, len(full), _AT_ONCE):
        run.check()
        block = full[i : i + _AT_ONCE]
        reads = await run.etcd.read([Get(run.keys.chunk(fingerprint, fact.hash.hex())) for fact in block])
        chunks = [unpack(pb.Chunk, kvs[0].value) for kvs in reads.found if kvs]
        for names in await gather(_names(run, fingerprint, chunk, layers) for chunk in chunks):
            found |= names & tails
    return frozenset(found)


async def _names(run: Run, fingerprint: str, chunk: pb.Chunk, layers: dict[str, tuple[int, ...]]) -> set[bytes]:
    """Raw hashes of the tails that the chunk's first tokens make."""
    receipt = min(chunk.receipts, key=lambda receipt: (receipt.size, receipt.group))
    metadata = ObjectMetadata(fingerprint, chunk.parent, chunk.hash, chunk.owner, receipt.group, chunk.start, chunk.end)
    try:
        form = object_format(metadata, parse_group_name(receipt.group, layers.get(receipt.group, ())))
        slot = next(slot for slot in form.slots if slot.name == TOKENS_TENSOR)
        body = await run.store.read(receipt.key, slot.offset, slot.nbytes)
        if body is None or len(body) != slot.nbytes:
            return set()
        tokens = np.frombuffer(body, dtype="<u4")
        if node_hash(chunk.parent, tokens) != chunk.hash:
            return set()
        return {bytes.fromhex(tail.hash) for tail in tails_after(chunk.parent, tokens, chunk.start)}
    except IdentityError:
        return set()
