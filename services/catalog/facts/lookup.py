"""The longest exact durable prefix of a token sequence.

Chains are prefix-closed (a chunk is published after its parent, collected before it), so the nodes of a sequence that
exist are the first so many; the rest are missing. Two steps, their transactions in parallel:

1. The full chunks, in blocks of 100: first two blocks at once (51,200 tokens), then four, eight … until one is missing;
   one round trip each time.
2. Under the last one found, the at most 15 possible tails by their hashes (never a range over everybody's children),
   and with them the replicas of every node found and of every possible tail: one round trip.

Nothing found is taken on trust: parent, positions and the SHA-256 over the caller's own tokens must agree, else the
chain ends before that node and the disagreement is reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from libs.continuation.chain import CHUNK_TOKENS, Node, chunks_after, root, tails_after
from libs.continuation.errors import IdentityError
from libs.continuation.hashing import pack_tokens
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import MAX_OPERATIONS, Get, GetPrefix, KeyValue, Read
from services.catalog.facts.errors import InvalidRequestError
from services.catalog.facts.keys import Keys, check_hex
from services.catalog.facts.replicas import ready
from services.catalog.facts.values import unpack

FIRST_BLOCKS = 2
MAX_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class Prefix:
    """nodes: full chunks in order, then perhaps one tail. revision: the oldest etcd revision any of it was read at."""

    nodes: list[pb.Node]
    tail: pb.Node | None
    revision: int


class Lookups:
    """claimed: the chunk directories whose replicas count. disagreed: told the hash of a fact that does not fit."""

    def __init__(
        self,
        etcd: EtcdClient,
        keys: Keys,
        *,
        claimed: Callable[[], frozenset[str]],
        disagreed: Callable[[str, str], None],
    ) -> None:
        self._etcd, self._keys = etcd, keys
        self._claimed, self._disagreed = claimed, disagreed

    async def longest(self, fingerprint: str, salt: str, after: str, tokens: Sequence[int], start: int) -> Prefix:
        """Raises InvalidRequestError."""
        known = _known_node(fingerprint, salt, after, tokens, start)
        try:
            # Once, from a list: reading ids one by one out of a protobuf field costs more than all the hashing.
            packed = pack_tokens(list(tokens))
            ids = np.frombuffer(packed, dtype="<u4")
            chain = chunks_after(known, ids, start)
        except IdentityError as error:
            raise InvalidRequestError("tokens", f"{len(tokens)} ids", str(error)) from None

        chunks: list[pb.Chunk] = []
        revision: int | None = None
        blocks = FIRST_BLOCKS
        while wanted := list(islice(chain, blocks * MAX_OPERATIONS)):
            reads = await self._etcd.read([Get(self._keys.chunk(fingerprint, node.hash)) for node in wanted])
            revision = reads.revision if revision is None else min(revision, reads.revision)
            fitting = self._fitting(wanted, reads.found, packed, start)
            chunks += fitting
            if len(fitting) < len(wanted):
                break
            blocks *= 2

        last, covered = (chunks[-1].hash, len(chunks) * CHUNK_TOKENS) if chunks else (known, 0)
        tails = tails_after(last, ids[covered : covered + CHUNK_TOKENS], start + covered)
        hashes = [chunk.hash for chunk in chunks] + [tail.hash for tail in tails]
        second: list[Read] = [Get(self._keys.chunk(fingerprint, tail.hash)) for tail in tails]
        second += [GetPrefix(self._keys.replicas(fingerprint, hash)) for hash in hashes]
        reads = await self._etcd.read(second)
        revision = reads.revision if revision is None else min(revision, reads.revision)
        replicas = dict(zip(hashes, reads.found[len(tails) :], strict=True))
        nodes = [self._node(chunk, replicas) for chunk in chunks]
        for tail, kvs in zip(reversed(tails), reversed(reads.found[: len(tails)]), strict=True):
            if found := self._fitting([tail], [kvs], packed, start):
                return Prefix(nodes, self._node(found[0], replicas), revision)
        return Prefix(nodes, None, revision)

    def _fitting(
        self, wanted: Sequence[Node], found: Sequence[tuple[KeyValue, ...]], packed: bytes, start: int
    ) -> list[pb.Chunk]:
        """The chunks up to the first that is missing or does not fit."""
        fitting: list[pb.Chunk] = []
        for node, kvs in zip(wanted, found, strict=True):
            if not kvs:
                break
            chunk = unpack(pb.Chunk, kvs[0].value)
            digest = hashlib.sha256(memoryview(packed)[4 * (node.start - start) : 4 * (node.end - start)]).hexdigest()
            stands = (chunk.parent, chunk.start, chunk.end, chunk.tail, chunk.tokens_sha256)
            if stands != (node.parent, node.start, node.end, node.is_tail, digest):
                self._disagreed(node.hash, "lookup")
                break
            fitting.append(chunk)
        return fitting

    def _node(self, chunk: pb.Chunk, replicas: dict[str, tuple[KeyValue, ...]]) -> pb.Node:
        return pb.Node(chunk=chunk, replicas=ready(replicas[chunk.hash], self._claimed()))


def _known_node(fingerprint: str, salt: str, after: str, tokens: Sequence[int], start: int) -> str:
    """The node the tokens hang under. What `after` names is taken on trust: under a wrong one nothing is found."""
    check_hex(fingerprint, "fingerprint")
    if len(tokens) > MAX_TOKENS:
        raise InvalidRequestError("tokens", f"{len(tokens)} ids", f"expected at most {MAX_TOKENS}")
    if start % CHUNK_TOKENS:
        raise InvalidRequestError("start", start, f"expected a multiple of {CHUNK_TOKENS}")
    if start and not after:
        raise InvalidRequestError("after", after, "expected the last known full chunk, which ends at `start`")
    top = root(fingerprint, check_hex(salt, "tenant_salt")) if salt or not after else ""
    if top and after and (start == 0) != (after == top):
        raise InvalidRequestError(
            "after", after, "expected the last known full chunk with its end as `start`, or with 0 the salt's root"
        )
    return check_hex(after, "after") if after else top
