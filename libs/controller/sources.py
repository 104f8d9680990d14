"""Who holds what of one chain: by node and layer group, and by runs of neighbours that the same hold. Pure.

A chain is its full chunks and at most one tail, contiguous from position 0. Each object (one layer group of one node)
is read from the cheapest tier that has it. A boundary P is restorable onto a resident prefix R (0 = none) when every
group has its objects over [max(R, first needed by the group for P), P) (libs/continuation/layout). A tail is restored
whole: its end is a boundary, nothing inside it is.

Holders are bits of slots, read once a plan. A long chain mostly is two or three runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from libs.continuation import chain as chains
from libs.controller.catalog_facts import LayerGroup, Node, ReplicaState
from libs.controller.residency import ResidencyIndex, key_of

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KEPT = 1 << 16  # nodes whose places are kept
_RAM, _SSD, _PEER, _OBJECT = range(4)


def group_bytes(group: LayerGroup) -> int:
    """Bytes of a group's keys and values for one token."""
    return 2 * len(group.layers) * group.kv_heads * group.head_dim * _DTYPE_BYTES.get(group.dtype, 4)


def first_needed(group: LayerGroup, boundary: int) -> int:
    """The first position the group must hold for the boundary."""
    return max(0, boundary - group.window) if group.window else 0


@dataclass(frozen=True, slots=True)
class Held:
    """What the catalog says of a node, by group name: `sizes` of durable groups (0 = not known), `disks`: holders of
    SSD replicas (slots' bits). One object for all nodes of a length of which the same is said.
    """

    span: int
    sizes: dict[str, int] = field(default_factory=dict)
    disks: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Link:
    """One node of a chain: its name and span, and what the catalog says of it: `node` None = nothing.

    `named`: the node with the directories of peers that hold it in memory, of the holders it was made for.
    """

    name: str
    key: int
    parent: str
    start: int
    end: int
    held: Held
    node: Node | None = None
    named: tuple[int, Node] | None = None


class Places:
    """Nodes looked into, as long as they are the same objects and workers sit where they sat."""

    def __init__(self, slot_of_node: Callable[[str], int | None]) -> None:
        self._slot_of_node = slot_of_node
        self._known: dict[int, Link] = {}
        self._shared: dict[tuple[object, ...], Held] = {}
        self._bare: dict[int, Held] = {}  # by length

    def moved(self) -> None:
        """A chunk directory has another worker."""
        self._known.clear()
        self._shared.clear()

    def link(self, node: Node) -> Link:
        """Nodes are immutable: one that was looked into need not be again."""
        found = self._known.get(id(node))
        if found is not None and found.node is node:
            return found
        disks: dict[str, int] = {}
        for replica in node.replicas:
            slot = self._slot_of_node(replica.node) if replica.state is ReplicaState.READY else None
            if slot is not None:
                disks[replica.group] = disks.get(replica.group, 0) | 1 << slot
        chunk = node.chunk
        sizes = {receipt.group: receipt.size for receipt in chunk.receipts}
        held = self._held(chunk.end - chunk.start, sizes, disks)
        link = Link(chunk.hash, key_of(chunk.hash), chunk.parent, chunk.start, chunk.end, held, node)
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[id(node)] = link
        return link

    def bare(self, nodes: Sequence[chains.Node]) -> list[Link]:
        """Nodes of which the catalog says nothing."""
        held, found = self._bare, list[Link]()
        for node in nodes:
            name, start, end = node.hash, node.start, node.end
            span = end - start
            known = held.get(span)
            if known is None:
                known = held[span] = Held(span)
            found.append(Link(name, key_of(name), node.parent, start, end, known))
        return found

    def _held(self, span: int, sizes: dict[str, int], disks: dict[str, int]) -> Held:
        if len(self._shared) >= _KEPT:
            self._shared.clear()
        key = (span, *sorted(sizes.items()), None, *sorted(disks.items()))
        return self._shared.setdefault(key, Held(span, sizes, disks))


@dataclass(frozen=True, slots=True)
class Shared:
    """What every worker can restore from peers and the store: up to `boundary` from nothing, no further than `reach` on
    top of something; `token_bytes` at least (windows apart), from `tiers` (places in SOURCES).
    """

    boundary: int
    reach: int
    token_bytes: float
    tiers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """nodes[first : last + 1], of one length and held by the same. By group: the holders in memory and on disk (bits),
    whether the store has them, and bytes of each node.
    """

    first: int
    last: int
    span: int
    memory: tuple[int, ...]
    disks: tuple[int, ...]
    durable: tuple[bool, ...]
    sizes: tuple[int, ...]

    def places(self, slot: int, order: Sequence[int]) -> tuple[int, ...]:
        """By group, the first of `order` (places in SOURCES) from which the worker in the slot can read; -1 = none."""
        found = []
        for memory, disks, durable in zip(self.memory, self.disks, self.durable, strict=True):
            own_memory, own_disk = memory >> slot & 1, disks >> slot & 1
            for place in order:
                if place == _OBJECT:
                    has = durable
                elif place == _PEER:
                    has = memory ^ own_memory << slot != 0 or disks ^ own_disk << slot != 0
                else:
                    has = bool(own_memory if place == _RAM else own_disk)
                if has:
                    found.append(place)
                    break
            else:
                found.append(-1)
        return tuple(found)


class Sources:
    """See the module. `runs`: the whole chain, in order; `ends`: of its nodes."""

    def __init__(self, links: Sequence[Link], groups: Sequence[LayerGroup], index: ResidencyIndex) -> None:
        self.groups = groups
        self.ends = [link.end for link in links]
        self.runs: list[Run] = []
        marks: list[object] = [link.held for link in links]
        ram: list[int] = []
        if index.ram:
            ram = [index.ram.get(link.key, 0) for link in links]
            parted = [link.key if link.key in index.parts else 0 for link in links] if index.parts else ram
            marks = list(zip(map(id, marks), ram, parted, strict=True))
        if not links:
            return
        firsts = [0, *[at for at, (one, other) in enumerate(pairwise(marks), 1) if one is not other and one != other]]
        for first, after in pairwise([*firsts, len(marks)]):
            link, held, memory = links[first], links[first].held, ram[first] if ram else 0
            sizes = tuple([held.sizes.get(group.name, 0) or group_bytes(group) * held.span for group in groups])
            run = Run(
                first,
                after - 1,
                held.span,
                tuple([index.memory_of(link.key, group.name) if memory else 0 for group in groups]),
                tuple([held.disks.get(group.name, 0) for group in groups]),
                tuple([group.name in held.sizes for group in groups]),
                sizes,
            )
            self.runs.append(run)

    def shared(self) -> Shared | None:
        """What peers and the store hold together; None = nothing."""
        # What lies before a window need not be there: only groups that see everything end it.
        wanted = [not group.window for group in self.groups]
        boundary, reach, whole, rates = 0, 0, True, list[float]()
        peers = store = False
        for run in self.runs:
            held = [memory or disks for memory, disks in zip(run.memory, run.disks, strict=True)]
            peers, store = peers or any(held), store or any(run.durable)
            if all([own or kept or not one for own, kept, one in zip(held, run.durable, wanted, strict=True)]):
                reach = self.ends[run.last]
                boundary = reach if whole else boundary
                rates.append(sum([size for size, one in zip(run.sizes, wanted, strict=True) if one]) / run.span)
            else:
                whole = False
        tiers = tuple([tier for tier, there in ((_PEER, peers), (_OBJECT, store)) if there])
        return Shared(boundary, reach, min(rates), tiers) if rates and tiers else None

    @property
    def any(self) -> bool:
        """Whether there is anything to restore."""
        return any([any(run.memory) or any(run.disks) or any(run.durable) for run in self.runs])
