"""Chunk objects: writing one without copying its tensors, and opening one without trusting it.

Writing yields the parts of the file (header, then the tensors as they lie in the caller's staging memory) and the
content id over them: the same arguments give the same bytes everywhere. Opening checks, in order of cost: the
header is canonical and nothing is missing, the object is the one asked for, the bytes are those of the content id,
the token ids are those of the prompt. The last is a free exactness check: it does not rest on any hash. A failed
check raises an `ObjectError`; the bytes must not be used, and the range is recomputed.

An `ObjectView` aliases the buffer (bytes, shared memory, an mmap), so a worker uploads straight from the page
cache. The buffer must stay unchanged and open as long as the view is used; `release` ends the view so that an mmap
can be closed.

bfloat16 has no numpy dtype: its arrays are uint16, the raw bits, here and in what `encode_object` takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from libs.continuation.chain import node_hash
from libs.continuation.errors import (
    ContentMismatchError,
    IdentityError,
    MalformedObjectError,
    SwappedObjectError,
    TokenMismatchError,
)
from libs.continuation.hashing import Tokens, content_id, pack_tokens
from libs.continuation.keys import ObjectKey
from libs.continuation.layout import LayerGroup
from libs.continuation.object_format import (
    TOKENS_TENSOR,
    ObjectFormat,
    ObjectMetadata,
    TensorSlot,
    object_format,
    read_format,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NUMPY_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4"}
# Buffer formats a tensor may be passed in: its own, or raw bits where the holder's array library lacks the dtype.
_ACCEPTED_FORMATS = {"float32": "fBb", "float16": "eBbHh", "bfloat16": "BbHh"}


@dataclass(frozen=True, slots=True)
class EncodedObject:
    """An object ready to be written: its parts in order, which alias the caller's tensors, and what it is filed under.

    The tensors must not change until the parts are written, or the bytes no longer have this content id.
    """

    metadata: ObjectMetadata
    parts: tuple[memoryview, ...]
    size: int
    content_id: str

    @property
    def key(self) -> ObjectKey:
        """Where the object belongs, in the bucket and in a chunk directory."""
        return object_key(self.metadata, self.content_id)

    def to_bytes(self) -> bytes:
        """The whole file, copied."""
        return b"".join(self.parts)


def object_key(metadata: ObjectMetadata, content: str) -> ObjectKey:
    """The key of the object with this metadata and content id."""
    return ObjectKey(metadata.fingerprint, metadata.owner, metadata.hash, metadata.group, content)


def encode_object(
    metadata: ObjectMetadata,
    group: LayerGroup,
    tokens: Tokens,
    keys: "Mapping[int, Buffer]",
    values: "Mapping[int, Buffer]",
) -> EncodedObject:
    """Encodes one chunk or tail of one layer group.

    Args:
        tokens: the ids of positions [metadata.start, metadata.end).
        keys, values: layer index -> C-contiguous little-endian buffer of [tokens, kv_heads, head_dim] in the group's
            dtype; raw bytes and same-width integers are accepted (bfloat16 as uint16), other shapes of equal size too.

    Raises:
        IdentityError: layers, sizes or dtypes that do not fit the group, or tokens whose hash is not `metadata.hash`.
    """
    form = object_format(metadata, group)
    named = node_hash(metadata.parent, tokens)
    if len(tokens) != metadata.tokens or named != metadata.hash:
        raise IdentityError(
            f"{len(tokens)} tokens hash to {named}, metadata names {metadata.hash}: pass the node's tokens"
        )
    if set(keys) != set(group.layers) or set(values) != set(group.layers):
        raise IdentityError(f"tensors for layers {sorted(keys)} and {sorted(values)}: {group.name} has {group.layers}")
    parts = [memoryview(form.header)]
    for slot in form.slots:
        if slot.name == TOKENS_TENSOR:
            parts.append(memoryview(pack_tokens(tokens)))
        else:
            source = keys if slot.name[0] == "k" else values
            parts.append(_raw_bytes(source[int(slot.name[2:])], slot))
    return EncodedObject(metadata, tuple(parts), form.size, content_id(*parts))


def _raw_bytes(tensor: "Buffer", slot: TensorSlot) -> memoryview:
    view = memoryview(tensor)
    if (
        not view.c_contiguous
        or view.nbytes != slot.nbytes
        or view.format.lstrip("@<") not in _ACCEPTED_FORMATS[slot.dtype]
    ):
        raise IdentityError(
            f"{slot.name} is {view.nbytes} bytes of format {view.format!r}, C-contiguous: {view.c_contiguous}; "
            f"expected {slot.nbytes} contiguous bytes of {slot.dtype} {list(slot.shape)}"
        )
    # By numpy and not memoryview.cast, which knows native formats only.
    return np.frombuffer(view, np.uint8).data


@dataclass(frozen=True, slots=True)
class ObjectView:
    """An object in place. `group` holds the layers found; `offset`s in the format are from the start of the buffer."""

    metadata: ObjectMetadata
    group: LayerGroup
    format: ObjectFormat
    data: memoryview
    _slots: Mapping[str, TensorSlot] = field(repr=False)

    def slot(self, name: str) -> TensorSlot:
        """Place, dtype and shape of `k.<layer>`, `v.<layer>` or `tokens`; KeyError for another name."""
        return self._slots[name]

    def raw(self, name: str) -> memoryview:
        """The tensor's bytes, not copied."""
        slot = self._slots[name]
        return self.data[slot.offset : slot.offset + slot.nbytes]

    def array(self, name: str) -> npt.NDArray[np.generic]:
        """The tensor as an array over the buffer, not copied: float32, float16, int32, or uint16 for bfloat16."""
        slot = self._slots[name]
        count = int(np.prod(slot.shape))
        return np.frombuffer(self.data, _NUMPY_DTYPES[slot.dtype], count, slot.offset).reshape(slot.shape)

    def token_ids(self) -> npt.NDArray[np.int32]:
        """The token ids, int32 [tokens], copied."""
        return self.array(TOKENS_TENSOR).astype(np.int32)

    def content_id(self) -> str:
        """BLAKE3 over the whole buffer; reads every byte."""
        return content_id(self.data)

    def release(self) -> None:
        """Ends the view. Arrays and slices taken from it stay valid; an mmap refuses to close while any is held."""
        self.data.release()

    def __enter__(self) -> "ObjectView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def view_object(data: "Buffer") -> ObjectView:
    """A view whose header is canonical and whose values are unchecked: for bytes verified before, or for looking only.

    Raises:
        TruncatedObjectError, MalformedObjectError: as in `read_format`.
    """
    metadata, group, form = read_format(data)
    slots = {slot.name: slot for slot in form.slots}
    return ObjectView(metadata, group, form, memoryview(data).cast("B"), slots)


def open_object(
    data: "Buffer", *, metadata: ObjectMetadata, group: LayerGroup, content: str, tokens: Tokens
) -> ObjectView:
    """A fully verified view of the object asked for, as a restore needs it. Once per localized file is enough.

    Args:
        data: the whole file.
        metadata, group: what the restore asked for.
        content: the content id of the receipt.
        tokens: the prompt's ids of positions [metadata.start, metadata.end).

    Raises:
        TruncatedObjectError: bytes are missing at the end.
        SwappedObjectError: a well-formed object of something else.
        ContentMismatchError: any other change of any byte.
        TokenMismatchError: the receipt's very bytes, but another prompt's.
        MalformedObjectError: the receipt's very bytes, but its writer did not write a canonical object.
    """
    view = _view_or_mismatch(data, content)
    try:
        _check_same(view.metadata, metadata)
        if view.group != group:
            raise SwappedObjectError(
                f"object {metadata.hash} holds layers {view.group.layers}, the model has {group.layers}: "
                "quarantine it and recompute"
            )
        _check_content(view, content)
        if view.raw(TOKENS_TENSOR) != pack_tokens(tokens):
            raise TokenMismatchError(
                f"object {metadata.hash} holds other token ids than the prompt's [{metadata.start}, {metadata.end}): "
                "quarantine it and recompute"
            )
    except BaseException:
        view.release()
        raise
    return view


def open_by_key(data: "Buffer", key: ObjectKey) -> ObjectView:
    """A view verified against nothing but its key, as indexing a directory or rebuilding the catalog needs it.

    The tokens cannot be compared with a prompt; they must hash to the object's own name instead.

    Raises:
        ObjectError: as `open_object`.
    """
    view = _view_or_mismatch(data, key.content_id)
    try:
        found = view.metadata
        for name in ("fingerprint", "owner", "hash", "group"):
            _check_equal(name, getattr(found, name), getattr(key, name))
        _check_content(view, key.content_id)
        _check_named(view)
    except BaseException:
        view.release()
        raise
    return view


def _check_named(view: ObjectView) -> None:
    try:
        named = node_hash(view.metadata.parent, view.token_ids())
    except IdentityError as error:
        raise TokenMismatchError(f"object {view.metadata.hash}: {error}; quarantine it and recompute") from error
    if named != view.metadata.hash:
        raise TokenMismatchError(
            f"object {view.metadata.hash} holds tokens that hash to {named}: quarantine it and recompute"
        )


def _view_or_mismatch(data: "Buffer", content: str) -> ObjectView:
    try:
        return view_object(data)
    except MalformedObjectError as error:
        found = content_id(data)
        if found != content:
            raise _mismatch(found, content) from error
        raise


def _check_content(view: ObjectView, content: str) -> None:
    found = view.content_id()
    if found != content:
        raise _mismatch(found, content)


def _mismatch(found: str, expected: str) -> ContentMismatchError:
    return ContentMismatchError(f"object's content id is {found}, expected {expected}: quarantine it and recompute")


def _check_same(found: ObjectMetadata, expected: ObjectMetadata) -> None:
    for name in ("fingerprint", "owner", "parent", "hash", "group", "start", "end"):
        _check_equal(name, getattr(found, name), getattr(expected, name))


def _check_equal(name: str, found: object, expected: object) -> None:
    if found != expected:
        raise SwappedObjectError(f"object's {name} is {found}, expected {expected}: quarantine it and recompute")
