"""Chunks whose objects are real: what verification, rebuilding and the search for superseded tails read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from libs.continuation.chain import Node
from libs.continuation.layout import LayerGroup
from libs.continuation.object_format import ObjectMetadata
from libs.continuation.objects import encode_object
from libs.continuation.tenancy import owner
from libs.contracts.segue.v1 import catalog_pb2 as pb
from tests.catalog.rig import FULL, WINDOWED, Tenant

GROUPS = {
    FULL: LayerGroup(window=None, kv_heads=1, head_dim=4, dtype="float32", layers=(1,)),
    WINDOWED: LayerGroup(window=512, kv_heads=1, head_dim=4, dtype="float32", layers=(0,)),
}


@dataclass
class RealTenant(Tenant):
    """As Tenant; `bodies` holds every object it ever described, by key."""

    bodies: dict[str, bytes] = field(default_factory=dict)

    def chunk(
        self,
        node: Node,
        tokens: Sequence[int],
        groups: Sequence[str] = (FULL, WINDOWED),
        body: bytes = b"kv",
        bucket: str = "segue",
    ) -> pb.Chunk:
        """`body` seeds the tensors: other seeds are other contents of the same prefix."""
        chunk = super().chunk(node, tokens, groups=(), body=body, bucket=bucket)
        for name in groups:
            group = GROUPS[name]
            assert group.name == name
            metadata = ObjectMetadata(
                self.fingerprint, node.parent, node.hash, owner(self.salt), name, node.start, node.end
            )
            noise = np.random.default_rng(list(body)).random((2, metadata.tokens, 1, 4), dtype=np.float32)
            (layer,) = group.layers
            encoded = encode_object(
                metadata, group, tokens[node.start : node.end], {layer: noise[0]}, {layer: noise[1]}
            )
            key = encoded.key.text
            self.bodies[key] = encoded.to_bytes()
            chunk.receipts.add(group=name, bucket=bucket, key=key, size=encoded.size, content_id=encoded.content_id)
        return chunk
