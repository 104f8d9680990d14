"""Bytes and facts: what lies on disks, in the object store and in host memory, and what the catalog says of it.

The order that matters (invariant 6): bytes first, durable, then their fact. A fact goes before its bytes when a chunk
is collected; bytes that are destroyed by a fault leave a fact behind, which whoever finds out withdraws.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.continuation import chain as chains
from libs.controller.catalog_facts import Chunk, Node, Receipt, Replica, ReplicaState
from libs.simulation.declared import BYTES_PER_TOKEN, GROUP

OBJECT = "object"


@dataclass(slots=True)
class Store:
    """Durable bytes by place (a worker's disk, or `object`): chunk name -> whether they are sound."""

    sound: dict[str, dict[str, bool]] = field(default_factory=dict)

    def put(self, place: str, name: str) -> None:
        """The bytes are durable."""
        self.sound.setdefault(place, {})[name] = True

    def has(self, place: str, name: str) -> bool:
        """Whether bytes are there, sound or not."""
        return name in self.sound.get(place, {})

    def reads(self, place: str, name: str) -> bool:
        """Whether a verified read succeeds."""
        return self.sound.get(place, {}).get(name, False)

    def drop(self, place: str, name: str) -> None:
        """The bytes are gone."""
        self.sound.get(place, {}).pop(name, None)

    def spoil(self, place: str, name: str) -> None:
        """The bytes are damaged."""
        if self.has(place, name):
            self.sound[place][name] = False


@dataclass(slots=True)
class Fact:
    """What the catalog knows of one chunk."""

    node: chains.Node
    places: dict[str, None] = field(default_factory=dict)  # where its bytes are said to be


class Catalog:
    """Facts by chunk name, in the order they came. `away_until`: no answer before."""

    def __init__(self) -> None:
        self.facts: dict[str, Fact] = {}
        self.away_until = 0.0
        self.version = 0

    def publish(self, node: chains.Node, place: str) -> None:
        """Durable bytes are known from now on."""
        self.facts.setdefault(node.hash, Fact(node)).places[place] = None
        self.version += 1

    def withdraw(self, name: str, place: str) -> None:
        """They are not there, as somebody found out, or will be deleted now."""
        fact = self.facts.get(name)
        if fact is None:
            return
        fact.places.pop(place, None)
        if not fact.places:
            del self.facts[name]
        self.version += 1

    def look_up(self, chain: chains.Chain) -> tuple[tuple[Node, ...], Node | None]:
        """The known full chunks of a chain from its start, and the longest known tail behind them."""
        found: list[Node] = []
        for link in chain.chunks:
            fact = self.facts.get(link.hash)
            if fact is None:
                break
            found.append(_node(fact))
        if len(found) < len(chain.chunks):
            return tuple(found), None
        for link in reversed(chain.tails()):
            fact = self.facts.get(link.hash)
            if fact is not None:
                return tuple(found), _node(fact)
        return tuple(found), None


def _node(fact: Fact) -> Node:
    link = fact.node
    size = (link.end - link.start) * BYTES_PER_TOKEN
    receipts = (Receipt(GROUP, "b", link.hash, "e", size, "c"),) if OBJECT in fact.places else ()
    replicas = tuple(Replica(place, GROUP, ReplicaState.READY, "c") for place in fact.places if place != OBJECT)
    return Node(Chunk(link.hash, link.parent, link.start, link.end, receipts=receipts, tail=link.is_tail), replicas)
