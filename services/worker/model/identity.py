"""A model's identity: weights hash, resolved variant, layer groups, fingerprint.

The weights hash covers the stored bytes of every tensor (about half a second per GB), so it is computed once and kept
beside the model in IDENTITY_FILE, keyed by each file's name, size and modification time. A folder that cannot be
written still works: it is hashed at each start.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from libs.continuation import fingerprint as identities
from libs.continuation.fingerprint import TensorIdentity, Variant
from libs.continuation.hashing import content_id
from libs.continuation.layout import Layout
from services.worker.model.descriptor import Descriptor
from services.worker.model.errors import ModelFilesError

IDENTITY_FILE = ".segue-identity.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """All that decides whether two workers may exchange attention state. `weights`, `fingerprint`: hex."""

    weights: str
    descriptor: Descriptor
    layout: Layout
    variant: Variant
    fingerprint: str


def identify(folder: Path, descriptor: Descriptor, variant: Variant) -> ModelIdentity:
    """Reads (or computes and caches) the weights hash and derives the rest.

    The attention state is kept in the variant's dtype. Raises ModelFilesError for a folder without readable
    safetensors.
    """
    layout = descriptor.layout(variant.dtype)
    weights = weights_identity(folder)
    return ModelIdentity(
        weights=weights,
        descriptor=descriptor,
        layout=layout,
        variant=variant,
        fingerprint=identities.fingerprint(weights, descriptor.arch(), layout, variant),
    )


def weights_identity(folder: Path) -> str:
    """The weights hash (hex) of a folder's safetensors files, from the cache beside them where it is current."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFilesError(
            f"{folder} has no .safetensors file", "Save the model with safetensors (other weight formats are not read)"
        )
    key = {file.name: [stat.st_size, stat.st_mtime_ns] for file in files for stat in [file.stat()]}
    cache = folder / IDENTITY_FILE
    cached = _cached(cache, key)
    if cached is not None:
        return cached
    weights = identities.weights([tensor for file in files for tensor in tensor_identities(file)])
    _store(cache, {"version": _VERSION, "files": key, "weights": weights})
    return weights


def tensor_identities(file: Path) -> list[TensorIdentity]:
    """Name, dtype, dims and BLAKE3-256 of the raw bytes of each tensor in a safetensors file, read through a map."""
    with file.open("rb") as handle:
        try:
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                size = int.from_bytes(view[:8], "little")
                header = json.loads(bytes(view[8 : 8 + size]))
                header.pop("__metadata__", None)
                tensors: list[TensorIdentity] = []
                for name, entry in header.items():
                    begin, end = entry["data_offsets"]
                    if 8 + size + end > len(view):
                        raise ValueError(f"tensor {name!r} ends past the file")
                    with view[8 + size + begin : 8 + size + end] as raw:
                        tensors.append(TensorIdentity(name, entry["dtype"], tuple(entry["shape"]), content_id(raw)))
        except (ValueError, KeyError) as error:
            raise ModelFilesError(
                f"{file} is no whole safetensors file ({error})", "Fetch or convert it again"
            ) from error
    if not tensors:
        raise ModelFilesError(f"{file} holds no tensors", "Fetch or convert it again")
    return tensors


def _cached(cache: Path, key: dict[str, list[int]]) -> str | None:
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("version") != _VERSION or content.get("files") != key:
        return None
    weights = content.get("weights")
    return weights if isinstance(weights, str) and len(weights) == 64 else None


def _store(cache: Path, content: dict[str, object]) -> None:
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(cache)
    except OSError:
        temporary.unlink(missing_ok=True)
