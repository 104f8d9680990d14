"""Which objects a plan needs, under which names, and where they may lie."""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.chunks.tier import Wanted
from libs.continuation.layout import LayerGroup, Layout
from libs.continuation.object_format import ObjectMetadata
from libs.controller.catalog_facts import ReplicaState
from services.worker.handlers import GroupPages, NodeFill, RestorePlan

Identity = tuple[str, str, str, str]
"""(fingerprint, owner, hash, group): what is shared by every content id of one object."""


@dataclass(frozen=True, slots=True)
class Place:
    """A computation of an object in another chunk directory: the directory's UUID and the content id there, empty where
    only the router knows that the worker behind it has the object in memory.
    """

    node: str
    content: str


@dataclass(frozen=True, slots=True)
class ObjectNeed:
    """One object to bring, and the pages it fills.

    `durable`: content id of the receipt, empty if there is none. `replicas`: content ids known in this worker's
    directory; `elsewhere`: in those of others.
    """

    metadata: ObjectMetadata
    group: LayerGroup
    tokens: tuple[int, ...] = field(repr=False)
    fill: GroupPages
    durable: str
    replicas: tuple[str, ...]
    elsewhere: tuple[Place, ...] = ()

    @property
    def identity(self) -> Identity:
        return self.metadata.fingerprint, self.metadata.owner, self.metadata.hash, self.metadata.group

    @property
    def bytes(self) -> int:
        """Of its tensors: what the byte budget counts (the header is below a thousandth)."""
        return self.metadata.tokens * (self.group.bytes_per_token + 4)

    def wanted(self, content: str) -> Wanted:
        return Wanted(self.metadata, self.group, content, self.tokens)


def needs_of(plan: RestorePlan, node: NodeFill, layout: Layout, directory: str) -> tuple[ObjectNeed, ...]:
    """The objects of one node, by fill; `directory` = UUID of this worker's chunk directory.

    Raises IdentityError for a fact that names nothing.
    """
    chunk = node.node.chunk
    receipts = {receipt.group: receipt.content_id for receipt in chunk.receipts}

    def need(fill: GroupPages) -> ObjectNeed:
        ready = [
            replica
            for replica in node.node.replicas
            if replica.group == fill.group and replica.state is ReplicaState.READY
        ]
        return ObjectNeed(
            ObjectMetadata(plan.fingerprint, chunk.parent, chunk.hash, plan.owner, fill.group, chunk.start, chunk.end),
            layout.group(fill.group),
            node.tokens,
            fill,
            receipts.get(fill.group, ""),
            tuple(replica.content_id for replica in ready if replica.node == directory),
            tuple(Place(replica.node, replica.content_id) for replica in ready if replica.node != directory),
        )

    return tuple(need(fill) for fill in node.fills)
