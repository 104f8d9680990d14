"""The canonical header of a chunk object: what it says of itself, and where each tensor lies.

An object is a safetensors file: u64-LE header length, JSON header padded with spaces to a multiple of 8, then the
tensors without gaps (https://github.com/huggingface/safetensors, "Format"). Its tensors are `k.<layer>` and
`v.<layer>` for the layers of one group (the model's layer indices), C order [tokens, kv_heads, head_dim], keys
after the rotary embedding; and `tokens`, int32 [tokens]. The header's `__metadata__` has exactly one key, `segue`:
the safetensors writer keeps metadata in a hash map, so that with several keys the same chunk would have other
bytes, and another content id, in every process.

The header is a function of (metadata, layers) alone. So a reader needs no tolerance: it rebuilds the header and
compares bytes, which settles names, dtypes, shapes, offsets, order, padding and duplicate keys at once.

FROZEN: metadata is canonical JSON {end, fingerprint, group, hash, owner, parent, start, v: 1}; tensors stand in the
order the safetensors writer gives them: float32 before int32 before the 16-bit types, then by name as text ("k.10"
before "k.2"). The writer here is our own, because it must not copy the tensors; a test holds it to the library's
bytes.
"""

import json
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from libs.continuation.canonical import canonical_json
from libs.continuation.chain import CHUNK_TOKENS, check_length, check_start
from libs.continuation.errors import IdentityError, MalformedObjectError, TruncatedObjectError
from libs.continuation.hashing import to_raw
from libs.continuation.layout import DTYPES, LayerGroup, parse_group_name
from libs.continuation.tenancy import OWNER_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

OBJECT_VERSION = 1
METADATA_KEY = "segue"
TOKENS_TENSOR = "tokens"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 20  # 4,000 layers; refuses a corrupt length before anything is read by it
_STORED_ORDER = ("F32", "I32", "F16", "BF16")
_LAYER_TENSOR = re.compile(r"[kv]\.(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class ObjectMetadata:
    """What an object says of itself: hex ids, group name, positions [start, end). The same for every worker and time.

    Raises:
        IdentityError: malformed ids, or positions that no chunk or tail has.
    """

    fingerprint: str
    parent: str
    hash: str
    owner: str
    group: str
    start: int
    end: int

    def __post_init__(self) -> None:
        to_raw(self.fingerprint, "fingerprint")
        to_raw(self.parent, "parent")
        to_raw(self.hash, "hash")
        to_raw(self.owner, "owner", OWNER_BYTES)
        check_start(self.start)
        check_length(self.end - self.start)

    @property
    def tokens(self) -> int:
        """Tokens held: 256, or fewer in a tail."""
        return self.end - self.start

    @property
    def is_tail(self) -> bool:
        """Held by a tail node, hence superseded once the full chunk exists."""
        return self.tokens < CHUNK_TOKENS

    @property
    def json(self) -> str:
        """Canonical JSON as stored under the metadata key `segue`."""
        return canonical_json(
            {"v": OBJECT_VERSION, **{field.name: getattr(self, field.name) for field in fields(self)}}
        )


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor lies: `offset` in bytes from the start of the file, `nbytes`; dtype as in torch ("bfloat16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """An object without its values: the header's bytes (length prefix included), each tensor's place, total size."""

    header: bytes
    slots: tuple[TensorSlot, ...]
    size: int


def object_format(metadata: ObjectMetadata, group: LayerGroup) -> ObjectFormat:
    """The one format of the object with this metadata and these layers.

    Raises:
        IdentityError: metadata of another group.
    """
    if metadata.group != group.name:
        raise IdentityError(f"metadata names group {metadata.group!r}, the layers are of {group.name!r}: pass the same")
    shape = (metadata.tokens, group.kv_heads, group.head_dim)
    tensors: list[tuple[str, str, tuple[int, ...], int]] = [
        (TOKENS_TENSOR, "int32", (metadata.tokens,), 4 * metadata.tokens)
    ]
    for kind in "kv":
        tensors += (
            (f"{kind}.{layer}", group.dtype, shape, metadata.tokens * group.tensor_bytes_per_token)
            for layer in group.layers
        )
    tensors.sort(key=lambda tensor: (_STORED_ORDER.index(_stored_dtype(tensor[1])), tensor[0]))

    entries: dict[str, object] = {"__metadata__": {METADATA_KEY: metadata.json}}
    position = 0
    for name, dtype, dims, nbytes in tensors:
        offsets = [position, position + nbytes]
        entries[name] = {"dtype": _stored_dtype(dtype), "shape": list(dims), "data_offsets": offsets}
        position += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text

    slots: list[TensorSlot] = []
    offset = len(header)
    for name, dtype, dims, nbytes in tensors:
        slots.append(TensorSlot(name, dtype, dims, offset, nbytes))
        offset += nbytes
    return ObjectFormat(header, tuple(slots), offset)


def _stored_dtype(dtype: str) -> str:
    return "I32" if dtype == "int32" else DTYPES[dtype][0]


def read_format(data: "Buffer") -> tuple[ObjectMetadata, LayerGroup, ObjectFormat]:
    """Metadata, group and format of a whole object, from its header alone (the values are not looked at).

    Raises:
        TruncatedObjectError: fewer bytes than the header declares.
        MalformedObjectError: more bytes, or anything but the canonical header.
    """
    view = memoryview(data).cast("B")
    try:
        return _read_format(view)
    finally:
        view.release()


def _read_format(view: memoryview) -> tuple[ObjectMetadata, LayerGroup, ObjectFormat]:
    if len(view) < _LENGTH_BYTES:
        raise TruncatedObjectError(f"object has {len(view)} bytes, too few for a header length: fetch it again")
    header_end = header_size(view)
    if len(view) < header_end:
        raise TruncatedObjectError(f"object has {len(view)} of at least {header_end} bytes: fetch it again")
    return read_header(bytes(view[:header_end]), len(view))


def header_size(start: "Buffer") -> int:
    """Bytes of an object's header, its length prefix included, from the object's first 8 bytes or more.

    Raises:
        MalformedObjectError: no chunk object is that long.
    """
    header_end = _LENGTH_BYTES + int.from_bytes(memoryview(start)[:_LENGTH_BYTES], "little")
    if header_end > _LENGTH_BYTES + _MAX_HEADER_BYTES:
        raise MalformedObjectError(f"object declares a header of {header_end} bytes: not a chunk object, quarantine it")
    return header_end


def read_header(header: bytes, size: int) -> tuple[ObjectMetadata, LayerGroup, ObjectFormat]:
    """`read_format` of an object of `size` bytes of which only the header (`header_size` bytes) is at hand.

    Raises:
        TruncatedObjectError, MalformedObjectError: as `read_format`.
    """
    try:
        entries = json.loads(header[_LENGTH_BYTES:].decode("ascii"))
        metadata = _metadata(json.loads(entries["__metadata__"][METADATA_KEY]))
        layers = sorted({int(match[1]) for match in map(_LAYER_TENSOR.fullmatch, entries) if match})
        group = parse_group_name(metadata.group, tuple(layers))
        expected = object_format(metadata, group)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedObjectError(f"object's header cannot be read ({error}): quarantine it and recompute") from error
    if header != expected.header:
        raise MalformedObjectError(
            "object's header is not the canonical one for its metadata: quarantine it and recompute"
        )
    if size < expected.size:
        raise TruncatedObjectError(f"object has {size} of {expected.size} bytes: fetch it again")
    if size > expected.size:
        raise MalformedObjectError(f"object has {size} bytes where {expected.size} are declared: quarantine it")
    return metadata, group, expected


def _metadata(values: dict[str, object]) -> ObjectMetadata:
    """Checks types only; that nothing is missing or left over is settled by comparing with the canonical header."""
    if values["v"] != OBJECT_VERSION:
        raise IdentityError(f"version {values['v']!r} where this release reads {OBJECT_VERSION}")
    text = {name: values[name] for name in ("fingerprint", "parent", "hash", "owner", "group")}
    start, end = values["start"], values["end"]
    if not all(isinstance(value, str) for value in text.values()) or type(start) is not int or type(end) is not int:
        raise IdentityError(f"metadata has a value of another type: {values!r}")
    return ObjectMetadata(**{name: str(value) for name, value in text.items()}, start=start, end=end)
