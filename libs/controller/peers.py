"""A chain's nodes as an offer carries them: with the directories of workers that hold them in memory. Pure.

A peer is found by its directory, and memory holds what its disk may have given up: such a directory is named as a
replica of no known content. Who holds a node in memory itself needs nobody. Neighbours in a chain mostly have the same
holders, so what is named of them is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

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
            own = tuple(
                bare if holders >> slot & 1 else full
                for bare, full, holders in zip(self._bare, self._full, self._holders, strict=True)
            )
            self._own[slot] = own
        return own[begin:end]

    def _make(self) -> None:
        ram = self._fleet.index.ram
        self._bare = tuple(
            Node(Chunk(link.name, link.parent, link.start, link.end)) if link.place is None else link.place.node
            for link in self._links
        )
        self._holders = [ram.get(link.key, 0) for link in self._links] if ram else [0] * len(self._links)
        full: list[Node] = []
        last, found = 0, tuple[tuple[int, Replica], ...]()
        for node, link, holders in zip(self._bare, self._links, self._holders, strict=True):
            if not holders:
                full.append(node)
                continue
            if holders is not last or link.key in self._fleet.index.parts:
                found, last = self._peers(link, holders), holders
                self._anyone |= holders
            disks = link.place.disks if link.place is not None else {}
            named = [replica for slot, replica in found if not disks.get(replica.group, 0) >> slot & 1]
            full.append(Node(node.chunk, (*node.replicas, *named)) if named else node)
        self._full = tuple(full)

    def _peers(self, link: Link, holders: int) -> tuple[tuple[int, Replica], ...]:
        index, found = self._fleet.index, []
        memory = [(group.name, index.memory_of(link.key, group.name)) for group in self._groups]
        for slot in islice(bits(holders), self._knobs.peers_named):
            view = self._fleet.view(index.names[slot])
            if view is not None and view.heartbeat.node:
                found += [
                    (slot, Replica(view.heartbeat.node, name, ReplicaState.READY, ""))
                    for name, held in memory
                    if held >> slot & 1
                ]
        return tuple(found)
