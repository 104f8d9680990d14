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
from itertools import islice

import numpy as np

from libs.continuation.chain import CHUNK_TOKENS, Node, chunks_after, root, tails_after
from libs.continuation.errors import IdentityError
from libs.continuation.hashing import pack_tokens
from libs.contracts.segue.v1 import catalog_pb2 as pb
from services.catalog.etcd.client import EtcdClient
from services.catalog.etcd.transaction import MAX_OPERATIONS
from services.catalog.facts.errors import InvalidRequestError
from services.catalog.facts.keys import Keys, check_hex
from services.catalog.facts.replicas import ready
from services.catalog.facts.values import field, unpack

FIRST_BLOCKS = 2
MAX_TOKENS = 1 << 21


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

    async def longest(
        self, fingerprint: str, salt: str, after: str, tokens: Sequence[int], start: int
    ) -> pb.LookupResponse:
        """Its revision is the oldest that any of it was read at. Raises InvalidRequestError."""
        known = _known_node(fingerprint, salt, after, tokens, start)
        try:
            # A protobuf field is taken as one buffer here: reading it id by id costs more than all the hashing.
            packed = pack_tokens(np.array(tokens, dtype=np.uint32))
            ids = np.frombuffer(packed, dtype="<u4")
            chain = chunks_after(known, ids, start)
        except IdentityError as error:
            raise InvalidRequestError("tokens", f"{len(tokens)} ids", str(error)) from None

        chunks_under = self._keys.of_model("chunks", fingerprint)
        replicas_under = self._keys.of_model("replicas", fingerprint)
        chunks: list[bytes] = []
        hashes: list[bytes] = []
        revisions: list[int] = []
        blocks = FIRST_BLOCKS
        while wanted := list(islice(chain, blocks * MAX_OPERATIONS)):
            names = [node.hash.encode() for node in wanted]
            found = await self._etcd.fetch([chunks_under + name for name in names])
            revisions.append(found.revision)
            fitting = self._fitting(wanted, found.values, packed, start)
            chunks += fitting
            hashes += names[: len(fitting)]
            if len(fitting) < len(wanted):
                break
            blocks *= 2

        last, covered = (hashes[-1].decode(), len(chunks) * CHUNK_TOKENS) if chunks else (known, 0)
        tails = tails_after(last, ids[covered : covered + CHUNK_TOKENS], start + covered)
        of_tails = [tail.hash.encode() for tail in tails]
        found = await self._etcd.fetch(
            [chunks_under + name for name in of_tails],
            [b"%b%b/" % (replicas_under, name) for name in (*hashes, *of_tails)],
        )
        revisions.append(found.revision)
        claimed = frozenset(node.encode() for node in self._claimed())
        # chunk = 1 of Node; nodes = 1, tail = 2 of LookupResponse. What etcd holds is a serialized Chunk already.
        parts = [
            field(1, field(1, chunk) + ready(pairs, claimed))
            for chunk, pairs in zip(chunks, found.pairs[: len(chunks)], strict=True)
        ]
        of_tail = list(zip(tails, found.values, found.pairs[len(chunks) :], strict=True))
        for tail, value, pairs in reversed(of_tail):
            if fitting := self._fitting([tail], [value], packed, start):
                parts.append(field(2, field(1, fitting[0]) + ready(pairs, claimed)))
                break
        answer = pb.LookupResponse.FromString(b"".join(parts))
        answer.revision = min(revisions)
        return answer

    def _fitting(self, wanted: Sequence[Node], found: Sequence[bytes | None], packed: bytes, start: int) -> list[bytes]:
        """The chunks, serialized, up to the first that is missing or does not fit."""
        fitting: list[bytes] = []
        for node, value in zip(wanted, found, strict=True):
            if value is None:
                break
            chunk = unpack(pb.Chunk, value)
            digest = hashlib.sha256(memoryview(packed)[4 * (node.start - start) : 4 * (node.end - start)]).hexdigest()
            stands = (chunk.parent, chunk.start, chunk.end, chunk.tail, chunk.tokens_sha256)
            if stands != (node.parent, node.start, node.end, node.is_tail, digest):
                self._disagreed(node.hash, "lookup")
                break
            fitting.append(value)
        return fitting


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
