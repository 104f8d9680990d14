"""Which boundaries of one chain some set of sources can restore, and what it costs. Pure arithmetic for `candidates`.

A chain is its full chunks and at most one tail, contiguous from position 0. Each object (one layer group of one node)
is read from the cheapest tier that has it. A boundary P is restorable onto a resident prefix R (0 = none) when every
group has its objects over [max(R, first needed by the group for P), P) (libs/continuation/layout). A tail is restored
whole: its end is a boundary, nothing inside it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.controller.catalog_facts import LayerGroup, Node
from libs.controller.protocol import Tier

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# For each node of a chain, by group: the tiers that hold its object.
Holdings = Sequence[Mapping[str, frozenset[Tier]]]


def group_bytes(group: LayerGroup) -> int:
    """Bytes of a group's keys and values for one token."""
    return 2 * len(group.layers) * group.kv_heads * group.head_dim * _DTYPE_BYTES.get(group.dtype, 4)


def first_needed(group: LayerGroup, boundary: int) -> int:
    """The first position the group must hold for `boundary`."""
    return max(0, boundary - group.window) if group.window else 0


@dataclass(frozen=True, slots=True)
class Restore:
    """How one boundary is restored: bytes and latency count by tier; `tokens` = boundary - resident."""

    boundary: int
    resident: int
    bytes_by_tier: tuple[tuple[Tier, int], ...]  # ascending by tier
    nodes: tuple[Node, ...]

    @property
    def tokens(self) -> int:
        """Positions that come from a lower tier."""
        return self.boundary - self.resident

    @property
    def tier(self) -> Tier:
        """The farthest tier read."""
        return self.bytes_by_tier[-1][0]

    @property
    def bytes(self) -> int:
        """All bytes read."""
        return sum(size for _, size in self.bytes_by_tier)


def restorable(
    groups: Sequence[LayerGroup],
    nodes: Sequence[Node],
    holdings: Holdings,
    allowed: Sequence[Tier],
    resident: int,
    limit: int,
) -> list[Restore]:
    """Every boundary in (resident, limit] that can be restored from the allowed tiers (cheapest first), ascending."""
    # For each group the cheapest allowed tier per node, and where the unbroken run of held nodes that ends there
    # begins.
    tiers: dict[str, list[Tier | None]] = {}
    runs: dict[str, list[int]] = {}
    for group in groups:
        chosen: list[Tier | None] = []
        starts: list[int] = []
        start = 0
        for node, held in zip(nodes, holdings, strict=True):
            here = held.get(group.name, frozenset())
            tier = next((tier for tier in allowed if tier in here), None)
            # Below the resident prefix nothing need be held.
            if tier is None and node.chunk.end > resident:
                start = node.chunk.end
            chosen.append(tier)
            starts.append(start)
        tiers[group.name], runs[group.name] = chosen, starts
    found: list[Restore] = []
    # Full attention reads everything behind the resident prefix: its sums only grow. Windows are short and read back.
    full: dict[Tier, int] = {}
    first = len(nodes)
    for index, node in enumerate(nodes):
        boundary = node.chunk.end
        if boundary <= resident:
            continue
        first = min(first, index)
        for group in groups:
            tier = tiers[group.name][index]
            if not group.window and tier is not None:
                full[tier] = full.get(tier, 0) + _object_bytes(group, node)
        if boundary > limit:
            break
        if any(runs[group.name][index] > max(resident, first_needed(group, boundary)) for group in groups):
            continue
        sizes = dict(full)
        begin = first if any(not group.window for group in groups) else index
        for group in groups:
            at = index
            needed = max(resident, first_needed(group, boundary))
            while group.window and at >= 0 and nodes[at].chunk.end > needed:
                tier = tiers[group.name][at]
                if tier is not None:
                    sizes[tier] = sizes.get(tier, 0) + _object_bytes(group, nodes[at])
                begin = min(begin, at)
                at -= 1
        found.append(Restore(boundary, resident, tuple(sorted(sizes.items())), tuple(nodes[begin : index + 1])))
    return found


def _object_bytes(group: LayerGroup, node: Node) -> int:
    for receipt in node.chunk.receipts:
        if receipt.group == group.name and receipt.size:
            return receipt.size
    return group_bytes(group) * (node.chunk.end - node.chunk.start)
