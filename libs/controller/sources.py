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
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import numpy as np
import numpy.typing as npt

from libs.controller.catalog_facts import LayerGroup, Node, ReplicaState
from libs.controller.protocol import Tier
from libs.controller.residency import ResidencyIndex, key_of
from libs.controller.table import (
    BREAK_EVEN,
    BY_FIRST,
    BY_RESTORE,
    FIRST,
    LATENCY,
    NO_WAY,
    ORDER,
    PER_BYTE,
    SOURCES,
    Flags,
    Floats,
    Ints,
    predicted_ms,
)

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KEPT = 1 << 16  # nodes whose places are kept
_RAM, _SSD, _PEER, _OBJECT, _GPU = range(5)
_NONE = int(NO_WAY)
Places8 = npt.NDArray[np.int8]


def group_bytes(group: LayerGroup) -> int:
    """Bytes of a group's keys and values for one token."""
    return 2 * len(group.layers) * group.kv_heads * group.head_dim * _DTYPE_BYTES.get(group.dtype, 4)


def first_needed(group: LayerGroup, boundaries: Ints) -> Ints:
    """The first position the group must hold for each boundary."""
    return np.maximum(boundaries - group.window, 0) if group.window else np.zeros_like(boundaries)


@dataclass(slots=True)
class Link:
    """One node of a chain: its name and span, and what the catalog says of it by group name: `node` None = nothing.

    `sizes`: of durable groups, 0 = not known; `disks`: holders (slots' bits) of SSD replicas; `named`: the node with
    the directories of peers that hold it in memory, of the holders it was made for.
    """

    name: str
    key: int
    parent: str
    start: int
    end: int
    node: Node | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    disks: dict[str, int] = field(default_factory=dict)
    named: tuple[int, Node] | None = None


class Places:
    """Nodes looked into, as long as they are the same objects and workers sit where they sat."""

    def __init__(self, slot_of_node: Callable[[str], int | None]) -> None:
        self._slot_of_node = slot_of_node
        self._known: dict[int, Link] = {}

    def moved(self) -> None:
        """A chunk directory has another worker."""
        self._known.clear()

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
        link = Link(chunk.hash, key_of(chunk.hash), chunk.parent, chunk.start, chunk.end, node, sizes, disks)
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[id(node)] = link
        return link


@dataclass(frozen=True, slots=True)
class Cases:
    """The workers and the resident prefixes in question. One entry each: [case].

    `rows`: the table's, of these workers; `queue`: ms, corrected; `per_token`: ms a prompt token, stretched and
    corrected; `fits`: whether the page demand on top of the prefix can be met.
    """

    slots: Ints
    resident: Ints
    rows: Floats
    queue: Floats
    per_token: Floats
    fits: Flags


@dataclass(frozen=True, slots=True)
class Restores:
    """The best way of each case from one farthest tier: nodes[begins : links + 1] are read. Raw times in ms; a `ttft`
    of infinity where there is none.
    """

    tier: Tier
    links: Ints
    begins: Ints
    load: Floats
    restore: Floats
    size: Floats
    ttft: Floats


@dataclass(slots=True)
class Found:
    """The best restores by farthest tier, and how many were usable, too short to pay, or without room."""

    best: list[Restores]
    usable: int = 0
    short: int = 0
    cramped: int = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """A boundary that any worker can restore, the bytes it takes at least (windows apart), and the tiers it comes from
    (places in SOURCES).
    """

    boundary: int
    size: float
    tiers: tuple[int, ...]


class Sources:
    """Who holds what of a chain, by node and group: bits of slots, read once a plan."""

    def __init__(self, links: Sequence[Link], groups: Sequence[LayerGroup], index: ResidencyIndex) -> None:
        self.links, self.groups = links, groups
        self.ends: Ints = np.array([link.end for link in links], np.int64)
        self.memory: list[list[int]] = []
        self.disks: list[list[int]] = []
        self.durable: list[list[bool]] = []
        self.sizes: list[Floats] = []
        self._slots = len(index.names)
        for group in groups:
            name, per_token = group.name, group_bytes(group)
            if index.parts:
                self.memory.append([index.memory_of(link.key, name) for link in links])
            else:
                self.memory.append([index.ram.get(link.key, 0) for link in links] if index.ram else [])
            self.disks.append([link.disks.get(name, 0) for link in links])
            sizes = [link.sizes.get(name, -1) for link in links]
            self.durable.append([size >= 0 for size in sizes])
            whole = [
                size if size > 0 else per_token * (link.end - link.start)
                for size, link in zip(sizes, links, strict=True)
            ]
            self.sizes.append(np.array(whole, np.float64))

    def local(self) -> list[int]:
        """Who holds some of each node in memory or on disk."""
        lists = [masks for masks in (*self.memory, *self.disks) if any(masks)]
        if not lists:
            return []
        return lists[0] if len(lists) == 1 else [reduce(or_, masks) for masks in zip(*lists, strict=True)]

    def shared(self) -> Shared | None:
        """What every worker can restore from peers and the store together; None = nothing."""
        peers = [
            [bool(m or d) for m, d in zip(memory or disks, disks, strict=True)]
            for memory, disks in zip(self.memory, self.disks, strict=True)
        ]
        either = [
            [peer or kept for peer, kept in zip(*lists, strict=True)] for lists in zip(peers, self.durable, strict=True)
        ]
        whole = min([has.index(False) if False in has else len(has) for has in either], default=0)
        if not whole:
            return None
        full = [sizes for group, sizes in zip(self.groups, self.sizes, strict=True) if not group.window]
        size = sum([float(sizes[:whole].sum()) for sizes in full])
        tiers = [tier for tier, lists in ((_PEER, peers), (_OBJECT, self.durable)) if any([any(has) for has in lists])]
        return Shared(self.links[whole - 1].end, size, tuple(tiers))

    @property
    def any(self) -> bool:
        """Whether there is anything to restore."""
        lists: tuple[Sequence[int], ...] = (*self.memory, *self.disks, *self.durable)
        return any(any(held) for held in lists)

    def restores(self, cases: Cases, length: int, limit: int) -> Found:
        """The best restore of every case and farthest tier; no boundary beyond `limit`, prompt of `length` tokens."""
        ends, resident = self.ends, cases.resident[:, None]
        count, nodes = len(cases.slots), len(ends)
        order = cases.rows[ORDER : ORDER + 4].astype(np.int8)
        span = ends - resident
        usable = (span > 0) & (ends <= limit)
        begins = np.full((count, 1), nodes)
        sizes: list[Floats | None] = [None] * 4
        for index, group in enumerate(self.groups):
            chosen = self._chosen(index, cases, order)
            needed = np.maximum(resident, first_needed(group, ends)) if group.window else resident
            missing = np.where(chosen == _NONE, ends, 0)
            usable &= np.maximum.accumulate(missing, axis=1) <= needed
            # Nodes before this one end where nothing is needed.
            lo = np.searchsorted(ends, needed, "right")
            begins = np.minimum(begins, lo)
            for tier in range(4):
                taken = chosen == order[tier][:, None]
                if tier == _PEER:
                    taken &= chosen < _NONE
                if not taken.any():
                    continue
                sums = np.zeros((count, nodes + 1))
                np.cumsum(taken * self.sizes[index], axis=1, out=sums[:, 1:])
                size = sums[:, 1:] - np.take_along_axis(sums, lo, 1)
                before = sizes[tier]
                sizes[tier] = size if before is None else before + size
        if not usable.any():
            return Found([])
        return self._best(cases, sizes, usable, span, np.broadcast_to(begins, span.shape), length)

    def _chosen(self, group: int, cases: Cases, order: Places8) -> Places8:
        """Of each node the place of the cheapest tier that has its object, in the worker's own order; or _NONE."""
        slots = cases.slots
        chosen: Places8 = np.full((len(slots), len(self.links)), _NONE, np.int8)
        memory = self._held(self.memory[group], slots)
        disks = self._held(self.disks[group], slots)
        for tier, has in ((_RAM, memory), (_SSD, disks)):
            if has is not None:
                np.minimum(chosen, order[tier][:, None], out=chosen, where=has)
        if (memory is not None or disks is not None) and (order[_PEER] < _NONE).any():
            others = np.zeros(chosen.shape, np.bool_)
            for holders, own in ((self.memory[group], memory), (self.disks[group], disks)):
                if own is not None:
                    others |= np.array([mask.bit_count() for mask in holders], np.int32) > own
            np.minimum(chosen, order[_PEER][:, None], out=chosen, where=others)
        durable = self.durable[group]
        if any(durable):
            np.minimum(chosen, order[_OBJECT][:, None], out=chosen, where=np.array(durable))
        return chosen

    def _held(self, masks: Sequence[int], slots: Ints) -> Flags | None:
        """Which of the slots hold which node; None if nobody at all holds any."""
        if not any(masks):
            return None
        width = -(-self._slots // 8)
        raw = np.frombuffer(b"".join([mask.to_bytes(width, "little") for mask in masks]), np.uint8)
        columns = raw.reshape(len(masks), width).T[slots >> 3]
        held: Flags = (columns & (1 << (slots & 7)).astype(np.uint8)[:, None]).astype(np.bool_)
        return held

    def _best(
        self, cases: Cases, sizes: Sequence[Floats | None], usable: Flags, span: Ints, begins: Ints, length: int
    ) -> Found:
        rows = cases.rows[:, :, None]
        farthest = np.full(usable.shape, -1, np.int8)
        load, total = np.zeros(usable.shape), np.zeros(usable.shape)
        for tier, size in enumerate(sizes):
            if size is not None:
                read = size > 0
                load += (size * rows[PER_BYTE + tier] + rows[LATENCY + tier]) * read
                total += size
                farthest[read] = tier
        restore = total * rows[PER_BYTE + _GPU] + rows[LATENCY + _GPU]
        prefill = (length - self.ends) * cases.per_token[:, None]
        restore_by = restore * rows[BY_RESTORE]
        first = rows[FIRST] * rows[BY_FIRST]
        ttft = predicted_ms(cases.queue[:, None], load * rows[BY_RESTORE], restore_by, prefill, first)
        found = Found([])
        every = np.arange(len(cases.slots))
        for tier in range(4):
            if sizes[tier] is None:
                continue
            here = usable & (farthest == tier)
            long = here & (span >= rows[BREAK_EVEN + tier])
            fitting = long & cases.fits[:, None]
            ways, pay = int(np.count_nonzero(fitting)), int(np.count_nonzero(long))
            found.short += int(np.count_nonzero(here)) - pay
            found.cramped += pay - ways
            found.usable += ways
            if not ways:
                continue
            costs = np.where(fitting, ttft, np.inf)
            at = costs.argmin(axis=1)  # of equals the one that leans on less
            picked = (every, at)
            found.best.append(
                Restores(
                    SOURCES[tier],
                    at,
                    begins[picked],
                    load[picked],
                    restore[picked],
                    total[picked],
                    costs[picked],
                )
            )
        return found
