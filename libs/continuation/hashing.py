"""The one hash behind every id: H(domain, f1..fn).

BLAKE3-256 in derive-key mode with context `"segue v1 " + domain`, over each field as its byte length (u32
little-endian) followed by its bytes. The domain separates uses of equal fields; the lengths keep a field from
running into its neighbour ("ab","c" is not "a","bc"). Integers are u64 little-endian, strings UTF-8, hashes their
raw 32 bytes, token lists each id as u32 little-endian. Types are not tagged: within a domain the position of a
field fixes its type.

Ids are 32 bytes; their text form, used in every API, message and key, is lowercase hex.

FROZEN: the context prefix, the domains' names and the field encoding.
"""

import hashlib
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from libs.continuation.errors import IdentityError

if TYPE_CHECKING:
    from typing_extensions import Buffer

CONTEXT_PREFIX = "segue v1 "
HASH_BYTES = 32
MAX_TOKEN_ID = 2**31 - 1  # stored as int32 in objects, hashed as u32: the same four bytes for every id up to here

Domain = Literal["weights", "fingerprint", "root", "chunk", "owner"]
Field = str | int | bytes | memoryview
Tokens = Sequence[int] | npt.NDArray[np.integer]


def derive(domain: Domain, *fields: Field) -> bytes:
    """H(domain, fields): 32 raw bytes.

    Raises:
        IdentityError: an integer outside u64, a field of 2^32 bytes or more, or a type without an encoding.
    """
    hasher = blake3(derive_key_context=CONTEXT_PREFIX + domain)
    for field in fields:
        encoded = _encode(field)
        hasher.update(len(encoded).to_bytes(4, "little"))
        hasher.update(encoded)
    return hasher.digest()


def _encode(field: Field) -> bytes | memoryview:
    if isinstance(field, bytes):
        encoded: bytes | memoryview = field
    elif isinstance(field, str):
        encoded = field.encode()
    elif isinstance(field, memoryview):
        encoded = field.cast("B")
    elif isinstance(field, int) and not isinstance(field, bool):
        if not 0 <= field < 2**64:
            raise IdentityError(f"integer field {field} does not fit u64: ids take integers in [0, 2^64)")
        return field.to_bytes(8, "little")
    else:
        raise IdentityError(f"field of type {type(field).__name__} has no encoding: pass str, int or bytes")
    if len(encoded) >= 2**32:
        raise IdentityError(f"field of {len(encoded)} bytes does not fit its u32 length: hash it first")
    return encoded


def to_raw(text: str, what: str, size: int = HASH_BYTES) -> bytes:
    """The raw bytes of a lowercase hex id; `what` names it in the error.

    Raises:
        IdentityError: not exactly 2 x size lowercase hex digits. Upper case is refused: an id has one spelling.
    """
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{2 * size}}}", text):
        raise IdentityError(f"{what} is {text!r}: expected {2 * size} lowercase hex digits")
    return bytes.fromhex(text)


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids as u32 little-endian, concatenated: `4 * len(tokens)` bytes. Also the bytes of an int32 LE tensor.

    Raises:
        IdentityError: an id outside [0, 2^31), a value that is no integer, or packed bytes passed in place of ids.
    """
    if isinstance(tokens, (bytes, bytearray, memoryview, str)):
        raise IdentityError(f"tokens are {type(tokens).__name__}: pass the ids as a sequence of integers")
    if isinstance(tokens, np.ndarray):
        return _pack_array(tokens)
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise IdentityError(f"token ids must be integers in [0, 2^31): {error}") from error
    if packed.itemsize != 4:  # pragma: no cover - C's unsigned int is 4 bytes wherever torch and etcd run
        return _pack_array(np.array(packed, dtype=np.uint64))
    if sys.byteorder == "big":  # pragma: no cover - the encoding is little-endian on every host
        packed.byteswap()
    encoded = packed.tobytes()
    # Every fourth byte is an id's highest. numpy would let the interpreter lock go: beside a thread that computes, it
    # takes longer to come by again than all the rest.
    if not encoded[3::4].isascii():
        raise IdentityError(f"token id {_largest(encoded)} is above {MAX_TOKEN_ID}: objects store ids as int32")
    return encoded


def _largest(encoded: bytes) -> int:
    return int(np.frombuffer(encoded, dtype="<u4").max())


def _pack_array(tokens: npt.NDArray[np.integer]) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise IdentityError(f"tokens are {tokens.dtype}{list(tokens.shape)}: expected a one-dimensional integer array")
    if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) <= MAX_TOKEN_ID):
        raise IdentityError(f"token ids span [{tokens.min()}, {tokens.max()}]: expected [0, {MAX_TOKEN_ID}]")
    return tokens.astype("<u4").tobytes()


def tokens_sha256(tokens: Tokens) -> str:
    """SHA-256 (hex) over the u32-LE ids: the catalog's check, by an unrelated hash, that a node has one token list."""
    return hashlib.sha256(pack_tokens(tokens)).hexdigest()


def content_id(*parts: "Buffer") -> str:
    """Plain BLAKE3-256 (hex) of the parts' concatenated bytes: the content id of an object, the hash of a raw tensor.

    Each part must be C-contiguous. The interpreter lock is released while large parts are hashed.
    """
    return content_id_of(parts)


def content_id_of(parts: "Iterable[Buffer]") -> str:
    """`content_id` of parts that arrive one by one, such as the fragments of a file being read."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
