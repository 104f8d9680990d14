"""The router's memory of chunk facts: an LRU, so that a look-up asks the catalog only for what is not known. Pure.

Chunks are immutable (only layer groups are added), their replicas are not: each entry remembers when it was heard,
and a prefix with an entry older than the replica TTL is `stale`: usable, but worth asking again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.controller.catalog_facts import Node
from libs.controller.knobs import FACT_KNOBS, FactKnobs


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """The longest known run of nodes from the start of a chain, and whether some of it should be asked again."""

    nodes: tuple[Node, ...]
    stale: bool


class FactCache:
    """By (fingerprint, hash). Times in ms on the caller's clock."""

    def __init__(self, knobs: FactKnobs = FACT_KNOBS) -> None:
        self.knobs = knobs
        self._nodes: dict[tuple[str, str], tuple[Node, float]] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, fingerprint: str, nodes: Iterable[Node], now_ms: float) -> None:
        """Nodes as the catalog just answered (tails too); newer facts replace older ones."""
        for node in nodes:
            key = (fingerprint, node.chunk.hash)
            self._nodes.pop(key, None)
            self._nodes[key] = (node, now_ms)
        while len(self._nodes) > self.knobs.nodes:
            del self._nodes[next(iter(self._nodes))]

    def forget(self, fingerprint: str, hashes: Iterable[str]) -> None:
        """Facts that proved wrong (a chunk was collected)."""
        for name in hashes:
            self._nodes.pop((fingerprint, name), None)

    def node(self, fingerprint: str, name: str) -> Node | None:
        """One fact, if known; counts as a use."""
        return self._use((fingerprint, name))[0]

    def known(self, fingerprint: str, hashes: Sequence[str], now_ms: float) -> KnownPrefix:
        """The longest known prefix of a chain."""
        nodes: list[Node] = []
        stale = False
        for name in hashes:
            node, heard_ms = self._use((fingerprint, name))
            if node is None:
                break
            nodes.append(node)
            stale = stale or now_ms - heard_ms >= self.knobs.replica_ttl_ms
        return KnownPrefix(tuple(nodes), stale)

    def _use(self, key: tuple[str, str]) -> tuple[Node | None, float]:
        entry = self._nodes.pop(key, None)
        if entry is None:
            return None, 0.0
        self._nodes[key] = entry
        return entry
