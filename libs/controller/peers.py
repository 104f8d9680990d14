"""A chain's nodes as an offer carries them: with the directories of workers that hold them in memory. Pure.

A peer is found by its directory, and memory holds what its disk may have given up: such a directory is named as a
replica of no known content. Who holds a node in memory itself needs nobody. Neighbours in a chain mostly have the same
holders, so what is named of them is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from libs.controller.catalog_facts import Chunk, LayerGroup, Node, Replica, ReplicaState
from libs.controller.fleet import Fleet
from libs.controller.knobs import PolicyKnobs
from libs.controller.residency import bits
from libs.controller.sources import Link


class Named:
    """The nodes of one plan's chain, made when they are wanted."""

    def __init__(self, links: Sequence[Link], groups: Sequence[LayerGroup], fleet: Fleet, knobs: PolicyKnobs) -> None:
        self._links, self._groups, self._fleet, self._knobs = links, groups, fleet, knobs
        self._bare: tuple[Node, ...] = ()
        self._full: tuple[Node, ...] = ()
        self._holders: list[int] = []
        self._anyone = 0
        self._own: dict[int, tuple[Node, ...]] = {}

    def nodes(self, begin: int, end: int, slot: int) -> tuple[Node, ...]:
        """As the worker in the slot is told them."""
        if not self._full:
            self._make()
        if not self._anyone >> slot & 1:
            return self._full[begin:end]
        own = self._own.get(slot)
        if own is None:
            holds = [bool(holders >> slot & 1) for holders in self._holders]
            own = tuple([self._bare[at] if held else self._full[at] for at, held in enumerate(holds)])
            self._own[slot] = own
        return own[begin:end]

    def _make(self) -> None:
        ram, parts = self._fleet.index.ram, self._fleet.index.parts
        self._bare = tuple([link.node or _bare(link) for link in self._links])
        self._holders = [ram.get(link.key, 0) for link in self._links] if ram else [0] * len(self._links)
        full = list(self._bare)
        last, peers = 0, _Peers([], 0)
        for at, holders in enumerate(self._holders):
            if not holders:
                continue
            link = self._links[at]
            if holders is not last:
                self._anyone |= holders
            known = link.named
            if known is not None and known[0] is holders and link.key not in parts:
                full[at] = known[1]
                continue
            if holders is not last or link.key in parts:
                last, peers = holders, self._peers(link, holders)
            full[at] = _with(self._bare[at], link, peers)
            if link.node is not None and link.key not in parts:
                link.named = (holders, full[at])
        self._full = tuple(full)

    def _peers(self, link: Link, holders: int) -> _Peers:
        index = self._fleet.index
        memory = [(group.name, index.memory_of(link.key, group.name)) for group in self._groups]
        found, slots = list[tuple[int, Replica]](), 0
        # By name, so that what is named hangs on no order of arrival.
        for _, slot in nsmallest(self._knobs.peers_named, [(index.names[slot], slot) for slot in bits(holders)]):
            view = self._fleet.view(index.names[slot])
            if view is not None and view.heartbeat.node:
                slots |= 1 << slot
                found += [
                    (slot, Replica(view.heartbeat.node, name, ReplicaState.READY, ""))
                    for name, held in memory
                    if held >> slot & 1
                ]
        return _Peers(found, slots)


@dataclass(frozen=True, slots=True)
class _Peers:
    """Replicas to name, each with its holder's slot; and these slots' bits."""

    replicas: list[tuple[int, Replica]]
    slots: int


def _bare(link: Link) -> Node:
    return Node(Chunk(link.name, link.parent, link.start, link.end))


def _with(node: Node, link: Link, peers: _Peers) -> Node:
    """Those that the catalog names itself are not named twice."""
    if any([disks & peers.slots for disks in link.held.disks.values()]):
        named = [replica for slot, replica in peers.replicas if not link.held.disks.get(replica.group, 0) >> slot & 1]
    else:
        named = [replica for _, replica in peers.replicas]
    return Node(node.chunk, (*node.replicas, *named)) if named else node
