"""Immutable values of the catalog, as the controller sees them (mirrors `protos/segue/v1/catalog.proto`).

A `Chunk` never changes once it is known but for layer groups that are added; replicas come and go and are therefore
beside it, in `Node`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ReplicaState(IntEnum):
    """State of one group of one chunk in one chunk directory; values are the proto's."""

    UNSPECIFIED = 0
    COPYING = 1
    READY = 2
    FAILED = 3
    REMOVED = 4


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Attention layers with equal window, KV heads, head dimension and dtype. `window` 0 = full attention."""

    name: str
    layers: tuple[int, ...]
    window: int
    kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Model:
    """A model variant: everything that must be equal for attention state to be exchangeable."""

    fingerprint: str
    groups: tuple[LayerGroup, ...]
    chunk_tokens: int
    weights: str = ""
    variant: str = ""
    max_context: int = 0
    chat_template_hash: str = ""
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker's tunnel address and what is behind it."""

    worker: str
    epoch: int
    address: str
    zone: str = ""
    family: str = ""
    models: tuple[str, ...] = ()
    capacity_pages: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where one group of one chunk lies in the object store; `size` in bytes."""

    group: str
    bucket: str
    key: str
    etag: str
    size: int
    content_id: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One group of one chunk in the chunk directory with UUID `node`."""

    node: str
    group: str
    state: ReplicaState
    content_id: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attention state of tokens `[start, end)` behind the prefix named `parent`."""

    hash: str
    parent: str
    start: int
    end: int
    tokens_sha256: str = ""
    owner: str = ""
    receipts: tuple[Receipt, ...] = ()
    created_ms: int = 0
    tail: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A chunk with its ready replicas."""

    chunk: Chunk
    replicas: tuple[Replica, ...] = ()
