"""The prefix-hash chain: a chunk's hash names its tokens and everything before them.

root = H("root", fingerprint, chunk size, salt); h_i = H("chunk", h_{i-1}, tokens of chunk i). Equal text under another
prefix, model or tenant has another hash, so a look-up needs no comparison of prompts. Two token lists share exactly the
nodes of their common full chunks.

A tail is a node over the first 16, 32, ... 240 tokens after a full chunk, hashed in the same way; it serves a
history that does not end on a chunk boundary. Under one parent at most 15 tails are possible for a given
continuation, so finding the longest published one takes 15 point reads, and at most 15 tokens are computed again.

Hashing can go on from any known node: what lies before it is in its hash. Hence the router and the catalog, which
hold the hash of the last node they know and the token ids after it, derive the same names as the worker that holds
the prompt.

FROZEN: CHUNK_TOKENS, TAIL_TOKENS (independent of any page size) and the two hashes above. The chunk size is part of the
root, so a cluster with another one would share nothing with this one, rather than something false.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from libs.continuation.errors import IdentityError
from libs.continuation.hashing import Tokens, derive, pack_tokens, to_raw

CHUNK_TOKENS = 256
TAIL_TOKENS = 16
_TOKEN_BYTES = 4
_CHUNK_BYTES = CHUNK_TOKENS * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Node:
    """One link: `hash` covers positions [start, end) and, through `parent`, all before them. Hashes are hex."""

    hash: str
    parent: str
    start: int
    end: int

    @property
    def is_tail(self) -> bool:
        """Shorter than a chunk; nothing follows it in a chain."""
        return self.end - self.start < CHUNK_TOKENS


def root(fingerprint: str, salt: str) -> str:
    """The parent (hex) of the first chunk of every chain of one model and one tenant."""
    return derive("root", to_raw(fingerprint, "fingerprint"), CHUNK_TOKENS, to_raw(salt, "salt")).hex()


def node_hash(parent: str, tokens: Tokens) -> str:
    """The hash (hex) of the chunk or tail that holds `tokens` after `parent`.

    Raises:
        IdentityError: a length that is neither a chunk's (256) nor a tail's (a multiple of 16 below it).
    """
    check_length(len(tokens))
    return derive("chunk", to_raw(parent, "parent"), pack_tokens(tokens)).hex()


def check_length(count: int) -> None:
    """Raises IdentityError unless a node may hold `count` tokens."""
    if not 0 < count <= CHUNK_TOKENS or count % TAIL_TOKENS:
        raise IdentityError(
            f"a node of {count} tokens cannot exist: a chunk has {CHUNK_TOKENS}, "
            f"a tail a multiple of {TAIL_TOKENS} below that"
        )


def check_start(start: int) -> None:
    """Raises IdentityError unless a node may begin at token `start`."""
    if start < 0 or start % CHUNK_TOKENS:
        raise IdentityError(f"a node cannot begin at token {start}: only at multiples of {CHUNK_TOKENS}")


def chunks_after(known: str, tokens: Tokens, start: int = 0) -> Iterator[Node]:
    """The full chunks over `tokens`, hashed one by one as they are asked for.

    Args:
        known: hash of the last node known (a root or a full chunk), which ends at position `start`.
        tokens: the ids from position `start` on; those after the last full chunk are left out (see `tails_after`).

    Raises:
        IdentityError: at the call, before the first node.
    """
    check_start(start)
    to_raw(known, "known node")
    return _chunks(known, memoryview(pack_tokens(tokens)), start)


def tails_after(known: str, tokens: Tokens, start: int = 0) -> tuple[Node, ...]:
    """The possible tails (at most 15) directly under `known`, shortest first; arguments as in `chunks_after`.

    More than a chunk of tokens may follow: where a chain breaks off in the catalog, a tail of the next chunk's first
    tokens may still exist under the last node there is.
    """
    check_start(start)
    to_raw(known, "known node")
    return _tails(known, memoryview(pack_tokens(tokens[:CHUNK_TOKENS])), start)


def _chunks(known: str, packed: memoryview, start: int) -> Iterator[Node]:
    for offset in range(0, len(packed) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        node = _node(known, packed[offset : offset + _CHUNK_BYTES], start)
        yield node
        known, start = node.hash, node.end


def _tails(known: str, packed: memoryview, start: int) -> tuple[Node, ...]:
    longest = min(len(packed) // _TOKEN_BYTES, CHUNK_TOKENS - 1)
    counts = range(TAIL_TOKENS, longest + 1, TAIL_TOKENS)
    return tuple(_node(known, packed[: count * _TOKEN_BYTES], start) for count in counts)


def _node(parent: str, packed: memoryview, start: int) -> Node:
    digest = derive("chunk", bytes.fromhex(parent), packed)
    return Node(digest.hex(), parent, start, start + len(packed) // _TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Chain:
    """The nodes over a growing token list, from `base` (a root or a known full chunk that ends at `start`) on.

    Immutable: `extend` returns a new chain that shares the nodes. `remainder` holds the packed ids after the last full
    chunk, fewer than 256 of them, so extending by one token costs a copy of at most 1 KiB and hashes only what is new.
    """

    base: str
    start: int = 0
    chunks: tuple[Node, ...] = ()
    remainder: bytes = b""

    def __post_init__(self) -> None:
        check_start(self.start)
        to_raw(self.base, "chain base")

    def extend(self, tokens: Tokens) -> "Chain":
        """The chain over this one's tokens followed by `tokens`."""
        packed = self.remainder + pack_tokens(tokens)
        fresh = tuple(_chunks(self.head, memoryview(packed), self.full_end))
        chunks = self.chunks + fresh if fresh else self.chunks
        return Chain(self.base, self.start, chunks, packed[len(fresh) * _CHUNK_BYTES :])

    @property
    def head(self) -> str:
        """Hash of the last full chunk, or the base."""
        return self.chunks[-1].hash if self.chunks else self.base

    @property
    def full_end(self) -> int:
        """Position after the last full chunk."""
        return self.chunks[-1].end if self.chunks else self.start

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.full_end + len(self.remainder) // _TOKEN_BYTES

    def tails(self) -> tuple[Node, ...]:
        """Every possible tail after the last full chunk, shortest first."""
        return _tails(self.head, memoryview(self.remainder), self.full_end)

    @property
    def tail(self) -> Node | None:
        """The longest possible tail, the one to publish; None with fewer than 16 tokens left over."""
        length = len(self.remainder) // _TOKEN_BYTES // TAIL_TOKENS * TAIL_TOKENS
        return _node(self.head, memoryview(self.remainder)[: length * _TOKEN_BYTES], self.full_end) if length else None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The full chunks, then the longest tail where there is one: all but the last 15 tokens at most."""
        tail = self.tail
        return self.chunks if tail is None else (*self.chunks, tail)


def plan(root_hash: str, tokens: Tokens) -> Chain:
    """The chain of a whole token list under a root."""
    return Chain(root_hash).extend(tokens)
