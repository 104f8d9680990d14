"""Which boundaries of one chain can be restored at which worker, from where, and how fast. Pure arithmetic for
`candidates`, over all of a plan's workers and boundaries at once.

A chain is its full chunks and at most one tail, contiguous from position 0. Each object (one layer group of one node)
is read from the cheapest tier that has it. A boundary P is restorable onto a resident prefix R (0 = none) when every
group has its objects over [max(R, first needed by the group for P), P) (libs/continuation/layout). A tail is restored
whole: its end is a boundary, nothing inside it is.

Arrays are [case, node]: a case is a worker with the resident prefix that a restore would be put on top of. What a
boundary takes of a tier is a difference of two running sums, also for a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from libs.controller.catalog_facts import LayerGroup, Node, ReplicaState
from libs.controller.protocol import Tier
from libs.controller.residency import ResidencyIndex
from libs.controller.table import (
    BREAK_EVEN,
    BY_FIRST,
    BY_QUEUE,
    BY_RESTORE,
    FIRST,
    LATENCY,
    NO_WAY,
    ORDER,
    PER_BYTE,
    QUEUE,
    SOURCES,
    Flags,
    Floats,
    Ints,
)

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KEPT = 1 << 16  # nodes whose places are kept
_RAM, _SSD, _PEER, _OBJECT, _GPU = range(5)


def group_bytes(group: LayerGroup) -> int:
    """Bytes of a group's keys and values for one token."""
    return 2 * len(group.layers) * group.kv_heads * group.head_dim * _DTYPE_BYTES.get(group.dtype, 4)


def first_needed(group: LayerGroup, boundaries: Ints) -> Ints:
    """The first position the group must hold for each boundary."""
    return np.maximum(boundaries - group.window, 0) if group.window else np.zeros_like(boundaries)


@dataclass(frozen=True, slots=True)
class Place:
    """What the catalog says of a node, by group name: sizes where known, holders (slots' bits) of SSD replicas."""

    node: Node
    sizes: dict[str, int]  # of durable groups; 0 = not known
    disks: dict[str, int]


class Places:
    """Nodes looked into, as long as they are the same objects and workers sit where they sat."""

    def __init__(self, slot_of_node: Callable[[str], int | None]) -> None:
        self._slot_of_node = slot_of_node
        self._known: dict[int, Place] = {}

    def moved(self) -> None:
        """A chunk directory has another worker."""
        self._known.clear()

    def of(self, node: Node) -> Place:
        """Nodes are immutable: one that was looked into need not be again."""
        found = self._known.get(id(node))
        if found is not None and found.node is node:
            return found
        disks: dict[str, int] = {}
        for replica in node.replicas:
            slot = self._slot_of_node(replica.node) if replica.state is ReplicaState.READY else None
            if slot is not None:
                disks[replica.group] = disks.get(replica.group, 0) | 1 << slot
        place = Place(node, {receipt.group: receipt.size for receipt in node.chunk.receipts}, disks)
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[id(node)] = place
        return place


@dataclass(slots=True)
class Link:
    """One node of the chain: its name and span, and what the catalog says of it (None = nothing)."""

    name: str
    key: int
    parent: str
    start: int
    end: int
    place: Place | None


@dataclass(frozen=True, slots=True)
class Cases:
    """The workers and the resident prefixes in question. One entry each: [case].

    `rows`: the table's, of these workers; `per_token`: ms a prompt token, stretched and corrected; `fits`: whether the
    page demand on top of the prefix can be met.
    """

    slots: Ints
    resident: Ints
    rows: Floats
    per_token: Floats
    fits: Flags


@dataclass(frozen=True, slots=True)
class Restore:
    """The best way of one case and one farthest tier: nodes[begin : index + 1] are read. Raw times in ms."""

    case: int
    tier: Tier
    index: int
    begin: int
    load_ms: float
    restore_ms: float
    size: int
    ttft_ms: float


@dataclass(slots=True)
class Found:
    """The best restores, and how many were usable, too short to pay, or without room."""

    best: list[Restore]
    usable: int = 0
    short: int = 0
    cramped: int = 0


class Sources:
    """Who holds what of a chain, by node and group: bits of slots, read once a plan."""

    def __init__(self, links: Sequence[Link], groups: Sequence[LayerGroup], index: ResidencyIndex) -> None:
        self.links, self.groups = links, groups
        self.ends: Ints = np.array([link.end for link in links], np.int64)
        self.memory: list[list[int]] = []
        self.disks: list[list[int]] = []
        self.durable: list[list[bool]] = []
        self.sizes: list[Ints] = []
        self._slots = len(index.names)
        for group in groups:
            name, per_token = group.name, group_bytes(group)
            in_memory = index.memory_of if index.parts else lambda key, _: index.ram.get(key, 0)
            self.memory.append([in_memory(link.key, name) for link in links] if index.ram else [])
            places = [link.place for link in links]
            self.disks.append([place.disks.get(name, 0) if place is not None else 0 for place in places])
            self.durable.append([place is not None and name in place.sizes for place in places])
            known = [place.sizes.get(name, 0) if place is not None else 0 for place in places]
            whole = [size or per_token * (link.end - link.start) for size, link in zip(known, links, strict=True)]
            self.sizes.append(np.array(whole, np.int64))

    def local(self, position: int) -> int:
        """Who holds some of the node in memory or on disk."""
        found = 0
        for memory, disks in zip(self.memory, self.disks, strict=True):
            found |= (memory[position] if memory else 0) | disks[position]
        return found

    def shared(self) -> list[tuple[int, int, int]]:
        """How far anybody can restore from each tier that all can reach: its place in SOURCES, boundary, bytes."""
        found = []
        for tier, has in (
            (_PEER, [[bool(m or d) for m, d in zip(memory or disks, disks, strict=True)] for memory, disks in
                     zip(self.memory, self.disks, strict=True)]),
            (_OBJECT, self.durable),
        ):  # fmt: skip
            whole = 0
            while whole < len(self.links) and all(group[whole] for group in has):
                whole += 1
            if whole:
                size = sum(int(sizes[:whole].sum()) for sizes in self.sizes)
                found.append((tier, self.links[whole - 1].end, size))
        return found

    @property
    def any(self) -> bool:
        """Whether there is anything to restore."""
        return any(any(bools) for bools in (*self.memory, *self.disks, *self.durable))

    def restores(self, cases: Cases, length: int, limit: int) -> Found:
        """The best restore of every case and farthest tier; no boundary beyond `limit`, prompt of `length` tokens."""
        ends, rows, resident = self.ends, cases.rows, cases.resident[:, None]
        count, nodes = len(cases.slots), len(ends)
        sizes = np.zeros((4, count, nodes), np.int64)
        usable = (ends > resident) & (ends <= limit)
        begins = np.full((count, nodes), nodes)
        for index, group in enumerate(self.groups):
            chosen = self._chosen(index, cases)
            needed = np.maximum(resident, first_needed(group, ends))
            missing = np.where(chosen == NO_WAY, ends, 0)
            usable &= np.maximum.accumulate(missing, axis=1) <= needed
            # Nodes before this one end where nothing is needed.
            lo = np.searchsorted(ends, needed, "right")
            np.minimum(begins, lo, out=begins)
            for tier in range(4):
                taken = chosen == rows[ORDER + tier][:, None]
                if tier == _PEER:
                    taken &= chosen < NO_WAY
                if not taken.any():
                    continue
                sums = np.zeros((count, nodes + 1), np.int64)
                np.cumsum(np.where(taken, self.sizes[index], 0), axis=1, out=sums[:, 1:])
                sizes[tier] += sums[:, 1:] - np.take_along_axis(sums, lo, 1)
        if not usable.any():
            return Found([])
        return self._best(cases, sizes, usable, begins, length)

    def _chosen(self, group: int, cases: Cases) -> Floats:
        """Of each node the place of the cheapest tier that has its object, in the worker's own order; or NO_WAY."""
        rows, slots = cases.rows, cases.slots
        chosen: Floats = np.full((len(slots), len(self.links)), NO_WAY)
        memory = self._held(self.memory[group], slots)
        disks = self._held(self.disks[group], slots)
        for tier, has in ((_RAM, memory), (_SSD, disks)):
            if has is not None:
                np.minimum(chosen, np.where(has, rows[ORDER + tier][:, None], NO_WAY), out=chosen)
        if (memory is not None or disks is not None) and (rows[ORDER + _PEER] < NO_WAY).any():
            others = np.zeros(chosen.shape, np.bool_)
            for holders, own in ((self.memory[group], memory), (self.disks[group], disks)):
                if own is not None:
                    others |= np.array([mask.bit_count() for mask in holders]) > own
            np.minimum(chosen, np.where(others, rows[ORDER + _PEER][:, None], NO_WAY), out=chosen)
        durable = self.durable[group]
        if any(durable):
            np.minimum(chosen, np.where(durable, rows[ORDER + _OBJECT][:, None], NO_WAY), out=chosen)
        return chosen

    def _held(self, masks: Sequence[int], slots: Ints) -> Flags | None:
        """Which of the slots hold which node; None if nobody at all holds any."""
        if not any(masks):
            return None
        width = -(-self._slots // 8)
        columns: list[Flags] = []
        last, column = -1, np.zeros(len(slots), np.bool_)
        for mask in masks:
            if mask is not last:
                raw = np.frombuffer(mask.to_bytes(width, "little"), np.uint8)
                column = (raw[slots >> 3] >> (slots & 7) & 1).astype(np.bool_)
                last = mask
            columns.append(column)
        return np.stack(columns, axis=1)

    def _best(self, cases: Cases, sizes: Ints, usable: Flags, begins: Ints, length: int) -> Found:
        rows = cases.rows[:, :, None]
        read = sizes > 0
        farthest = np.full(usable.shape, -1)
        load = np.zeros(usable.shape)
        for tier in range(4):
            if read[tier].any():
                load += np.where(read[tier], rows[LATENCY + tier] + sizes[tier] * rows[PER_BYTE + tier], 0.0)
                farthest[read[tier]] = tier
        total = sizes.sum(axis=0)
        restore = np.where(total > 0, rows[LATENCY + _GPU] + total * rows[PER_BYTE + _GPU], 0.0)
        least = np.take_along_axis(cases.rows[BREAK_EVEN : BREAK_EVEN + 4].T, np.maximum(farthest, 0), 1)
        short = usable & (self.ends - cases.resident[:, None] < least)
        usable = usable & ~short & (farthest >= 0)
        cramped = usable & ~cases.fits[:, None]
        usable = usable & ~cramped
        ttft = (
            np.maximum(rows[QUEUE] * rows[BY_QUEUE], load * rows[BY_RESTORE])
            + restore * rows[BY_RESTORE]
            + (length - self.ends) * cases.per_token[:, None]
            + rows[FIRST] * rows[BY_FIRST]
        )
        found = Found([], int(usable.sum()), int(short.sum()), int(cramped.sum()))
        every = np.arange(len(cases.slots))
        for tier in range(4):
            costs = np.where(usable & (farthest == tier), ttft, np.inf)
            at = costs.argmin(axis=1)  # of equals the one that leans on less
            here = costs[every, at]
            for case in np.nonzero(np.isfinite(here))[0].tolist():
                index = int(at[case])
                found.best.append(
                    Restore(
                        case,
                        SOURCES[tier],
                        index,
                        int(begins[case, index]),
                        float(load[case, index]),
                        float(restore[case, index]),
                        int(total[case, index]),
                        float(here[case]),
                    )
                )
        return found
