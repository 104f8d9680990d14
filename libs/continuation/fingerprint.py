"""Compatibility: two workers may exchange attention state exactly when their fingerprints are equal.

fingerprint = H("fingerprint", "weights", w, "arch", a, "layout", l, "variant", v). None of the four parts holds a
revision, a file name, a sharding or a library's version, so that moving, re-sharding or re-downloading a model
keeps its caches.

FROZEN, where the design leaves the encoding open:
- weights = H("weights", ...) over the tensors sorted by the code points of their names; each contributes, in
  sequence and flat, the fields name (string), dtype (string, safetensors' spelling as stored: "F32", "BF16", ...),
  number of dims (integer), each dim (integer), raw 32-byte BLAKE3-256 of the tensor's little-endian bytes. The
  number of dims precedes the dims, so the sequence of fields parses in one way only and no list of tensors can pass
  for another.
- w enters as raw bytes; a, l and v as UTF-8 text (a and l canonical JSON, see `canonical`); "weights", "arch",
  "layout", "variant" as strings.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from libs.continuation.canonical import JsonValue, canonical_json
from libs.continuation.errors import IdentityError
from libs.continuation.hashing import Field, derive, to_raw
from libs.continuation.layout import Layout

_VARIANT_PART = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class TensorIdentity:
    """A stored weight tensor: name, safetensors dtype ("F32"), dims, and the BLAKE3-256 (hex) of its raw LE bytes."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    blake3: str


@dataclass(frozen=True, slots=True)
class Variant:
    """The numeric recipe, fixed per variant and never chosen per start: `cpu.float32.none.paged.fp32.1`.

    `revision` grows whenever a change of kernels alters results beyond a float tie. No part may be "auto": a choice
    resolved differently on two workers would give one fingerprint to two numeric recipes.
    """

    device: str
    dtype: str
    quant: str
    attention: str
    head_product: str
    revision: int

    def __post_init__(self) -> None:
        for name in ("device", "dtype", "quant", "attention", "head_product"):
            value = getattr(self, name)
            if value == "auto" or not _VARIANT_PART.fullmatch(value):
                raise IdentityError(
                    f"variant {name} is {value!r}: resolve it to lowercase letters, digits, '_' or '-' (never 'auto')"
                )
        if self.revision < 0:
            raise IdentityError(f"variant revision is {self.revision}: expected an integer from 0")

    @property
    def text(self) -> str:
        """`<device>.<dtype>.<quant>.<attention>.<head product>.<n>`."""
        return ".".join((self.device, self.dtype, self.quant, self.attention, self.head_product, str(self.revision)))


def weights(tensors: Iterable[TensorIdentity]) -> str:
    """Identity (hex) of a set of stored tensors, in whatever order and however sharded they arrive.

    Raises:
        IdentityError: no tensors, two of one name, or a malformed hash or dim.
    """
    fields: list[Field] = []
    previous: str | None = None
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        if tensor.name == previous:
            raise IdentityError(f"weights hold two tensors named {tensor.name!r}: pass each stored tensor once")
        previous = tensor.name
        fields += (tensor.name, tensor.dtype, len(tensor.dims), *tensor.dims)
        fields.append(to_raw(tensor.blake3, f"blake3 of {tensor.name!r}"))
    if not fields:
        raise IdentityError("weights hold no tensors: check that the model folder has safetensors files")
    return derive("weights", *fields).hex()


def fingerprint(weights_id: str, arch: Mapping[str, JsonValue], layout: Layout, variant: Variant) -> str:
    """The fingerprint, 64 hex digits.

    Args:
        weights_id: from `weights`.
        arch: the listed fields of our own model descriptor, never a library's whole configuration.
        layout: the model's layer groups.
        variant: the resolved numeric recipe.
    """
    return derive(
        "fingerprint",
        "weights", to_raw(weights_id, "weights"),
        "arch", canonical_json(arch),
        "layout", layout.json,
        "variant", variant.text,
    ).hex()  # fmt: skip
