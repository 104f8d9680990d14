"""Real chunk objects of toy size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libs.chunks.tier import Wanted
from libs.continuation.chain import node_hash, root
from libs.continuation.layout import LayerGroup
from libs.continuation.object_format import ObjectMetadata
from libs.continuation.objects import EncodedObject, encode_object

FINGERPRINT, SALT, OWNER = "ab" * 32, "cd" * 32, "ef" * 16
GROUP = LayerGroup(None, 1, 16, "float32", (0, 2))
ROOT = root(FINGERPRINT, SALT)


def sample(
    seed: int = 0, *, group: LayerGroup = GROUP, parent: str = ROOT, start: int = 0, tokens: Sequence[int] | None = None
) -> tuple[EncodedObject, Wanted]:
    """An object of random values, and the request that fits it."""
    draw = np.random.default_rng(seed)
    ids = list(tokens) if tokens is not None else [int(token) for token in draw.integers(0, 512, 256)]
    metadata = ObjectMetadata(FINGERPRINT, parent, node_hash(parent, ids), OWNER, group.name, start, start + len(ids))
    shape = (len(ids), group.kv_heads, group.head_dim)
    keys, values = ({layer: draw.standard_normal(shape, dtype=np.float32) for layer in group.layers} for _ in range(2))
    made = encode_object(metadata, group, ids, keys, values)
    return made, Wanted(metadata, group, made.content_id, ids)
