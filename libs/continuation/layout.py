"""Layer groups, and which of their chunks a restore needs.

Layers that keep state of one shape over one window form a group: full attention keeps every position, a sliding
window of w only the last w matter. A chunk is one object per group. Positions [0, P) can be restored when every
full group has [0, P) and every windowed group has [max(0, P - w), P); so for a long history most chunks' windowed
objects are never read. (The next query, at P, looks back w - 1 positions and itself; the w-th is kept so that the
rule does not depend on whether a model counts the query in.)

A chunk may lack its windowed objects: it then carries no boundary of its own, but still serves boundaries far
behind it. Objects are present or absent as a whole. A boundary may lie inside a node (the last token of a fully
known prompt must be computed again for its logits): the node is matched and fetched whole, its last rows are left
unused.

FROZEN: the groups' names and the layout's JSON, `[[name, layer indices], ...]` ordered by first layer (both are in the
fingerprint).
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from libs.continuation.canonical import canonical_json
from libs.continuation.errors import IdentityError

# name in descriptors and group names -> (name in safetensors headers, bytes per value)
DTYPES: dict[str, tuple[str, int]] = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}

_GROUP_NAME = re.compile(r"(?:full|w([1-9][0-9]*))-kv([1-9][0-9]*)-d([1-9][0-9]*)-([a-z0-9]+)")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a model as its descriptor lists it. `window` in tokens, None for full attention."""

    index: int
    window: int | None
    kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers (ascending indices) whose keys and values have one shape, dtype and window."""

    window: int | None
    kv_heads: int
    head_dim: int
    dtype: str
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise IdentityError(f"dtype {self.dtype!r} cannot be stored: use one of {', '.join(DTYPES)}")
        if (self.window is not None and self.window < 1) or self.kv_heads < 1 or self.head_dim < 1:
            raise IdentityError(f"layer group {self.name} has a size below 1: check the model's descriptor")
        if (
            not self.layers
            or self.layers[0] < 0
            or any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False))
        ):
            raise IdentityError(f"layer group {self.name} has layers {self.layers}: expected ascending indices from 0")

    @property
    def name(self) -> str:
        """`full-kv1-d256-float32` or `w512-kv1-d256-float32`."""
        scope = "full" if self.window is None else f"w{self.window}"
        return f"{scope}-kv{self.kv_heads}-d{self.head_dim}-{self.dtype}"

    @property
    def tensor_bytes_per_token(self) -> int:
        """Bytes of one layer's keys (or values) for one token."""
        return self.kv_heads * self.head_dim * DTYPES[self.dtype][1]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' keys and values for one token."""
        return 2 * len(self.layers) * self.tensor_bytes_per_token

    def first_needed(self, boundary: int) -> int:
        """The first position this group must hold for `boundary`."""
        return 0 if self.window is None else max(0, boundary - self.window)


def parse_group_name(name: str, layers: tuple[int, ...]) -> LayerGroup:
    """The group a name describes, with the layers it was found with.

    Raises:
        IdentityError: not a group's name.
    """
    match = _GROUP_NAME.fullmatch(name)
    if match is None:
        raise IdentityError(f"{name!r} is no layer group: expected e.g. full-kv1-d256-float32 or w512-kv1-d256-float32")
    window, kv_heads, head_dim, dtype = match.groups()
    return LayerGroup(int(window) if window else None, int(kv_heads), int(head_dim), dtype, layers)


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Positions [start, end) of one group. Never empty."""

    group: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ChunkNeed:
    """Of the node at `node` in the list given, the object of `group`; of its rows those of positions [start, end)."""

    node: int
    group: str
    start: int
    end: int


class Span(Protocol):
    """What the rules need of a node: the positions it covers."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The layer groups of a model, ordered by first layer; every layer is in exactly one."""

    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        layers = [layer for group in self.groups for layer in group.layers]
        if not layers or len(set(layers)) != len(layers):
            raise IdentityError(f"layout has layers {sorted(layers)}: expected each layer once, and at least one")
        firsts = [group.layers[0] for group in self.groups]
        if firsts != sorted(firsts) or len({group.name for group in self.groups}) != len(self.groups):
            raise IdentityError(
                "layout's groups must be distinct and ordered by first layer: build it with from_layers"
            )

    @classmethod
    def from_layers(cls, layers: Iterable[LayerSpec]) -> "Layout":
        """Groups the layers by (window, KV heads, head dim, dtype)."""
        members: dict[tuple[int | None, int, int, str], list[int]] = {}
        for layer in sorted(layers, key=lambda layer: layer.index):
            members.setdefault((layer.window, layer.kv_heads, layer.head_dim, layer.dtype), []).append(layer.index)
        return cls(tuple(LayerGroup(*shape, tuple(indices)) for shape, indices in members.items()))

    @property
    def json(self) -> str:
        """Canonical JSON, as hashed into the fingerprint."""
        return canonical_json([[group.name, list(group.layers)] for group in self.groups])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of attention state per token while every group still holds it."""
        return sum(group.bytes_per_token for group in self.groups)

    def group(self, name: str) -> LayerGroup:
        """Raises IdentityError where the model has no such group."""
        for group in self.groups:
            if group.name == name:
                return group
        raise IdentityError(f"no layer group {name!r} in this model: it has {[group.name for group in self.groups]}")

    def needed(self, boundary: int) -> tuple[GroupRange, ...]:
        """Which positions of each group a restore of [0, boundary) needs, in the order of the groups."""
        if boundary < 0:
            raise IdentityError(f"boundary {boundary} is negative: it counts processed tokens")
        if boundary == 0:
            return ()
        return tuple(GroupRange(group.name, group.first_needed(boundary), boundary) for group in self.groups)

    def restore_bytes(self, boundary: int) -> int:
        """Bytes of attention state that a restore of [0, boundary) brings to the device."""
        return sum(group.bytes_per_token * (boundary - group.first_needed(boundary)) for group in self.groups)


def needed_chunks(layout: Layout, nodes: Sequence[Span], boundary: int) -> tuple[ChunkNeed, ...]:
    """The objects a restore of [0, boundary) reads, by node and then by group.

    Args:
        nodes: contiguous, the first at position 0; those past the boundary are not needed.

    Raises:
        IdentityError: the nodes do not cover the boundary or leave a gap.
    """
    covered = _covered(nodes)
    if boundary > covered:
        raise IdentityError(
            f"boundary {boundary} is past the {covered} tokens of the nodes given: pass the whole chain"
        )
    needs = layout.needed(boundary)
    return tuple(
        ChunkNeed(index, need.group, max(node.start, need.start), min(node.end, need.end))
        for index, node in enumerate(nodes)
        for need in needs
        if node.start < need.end and need.start < node.end
    )


def longest_restorable(layout: Layout, nodes: Sequence[Span], present: Sequence[Collection[str]], limit: int) -> int:
    """The largest boundary <= limit that the objects present can restore; 0 where none can.

    Args:
        nodes: contiguous, the first at position 0.
        present: for each node, the names of the groups whose object can be had.
    """
    boundary = min(limit, _covered(nodes))
    if len(present) != len(nodes):
        raise IdentityError(f"{len(nodes)} nodes but {len(present)} sets of groups: pass one set per node")
    runs = {group: _runs(nodes, present, group.name) for group in layout.groups}
    # Each round lowers the boundary to the best one that a single group allows; a round without a change satisfies all.
    while boundary > 0:
        lowered = min(_longest_for(group, runs[group], boundary) for group in layout.groups)
        if lowered == boundary:
            break
        boundary = lowered
    return max(boundary, 0)


def _covered(nodes: Sequence[Span]) -> int:
    position = 0
    for node in nodes:
        if node.start != position:
            raise IdentityError(f"nodes leave a gap: one begins at {node.start} where {position} was due")
        position = node.end
    return position


def _runs(nodes: Sequence[Span], present: Sequence[Collection[str]], group: str) -> list[tuple[int, int]]:
    """The maximal stretches [start, end) in which the group's objects are all present."""
    runs: list[tuple[int, int]] = []
    for node, groups in zip(nodes, present, strict=True):
        if group not in groups:
            continue
        if runs and runs[-1][1] == node.start:
            runs[-1] = (runs[-1][0], node.end)
        else:
            runs.append((node.start, node.end))
    return runs


def _longest_for(group: LayerGroup, runs: Sequence[tuple[int, int]], limit: int) -> int:
    for start, end in reversed(runs):
        boundary = min(end, limit)
        if boundary > start and group.first_needed(boundary) >= start:
            return boundary
    return 0
