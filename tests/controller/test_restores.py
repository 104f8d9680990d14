"""Restores against a look at every node: large fleets, long chains, with and without windows."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.controller import table
from libs.controller.catalog_facts import LayerGroup
from libs.controller.protocol import Tier
from libs.controller.residency import ResidencyIndex
from libs.controller.restores import Best, Read, Reader, Restores
from libs.controller.sources import Held, Link, Sources
from tests.controller.world import FULL, WINDOW

OTHER = LayerGroup("other", (4,), 0, 2, 64, "float32")
GROUPS = {
    "one": (FULL,),
    "two": (FULL, OTHER),
    "window": (WINDOW, FULL),
    "windows": (replace(WINDOW, window=700), OTHER),
}
SLOTS = 4


def a_chain(draw: random.Random, groups: tuple[LayerGroup, ...]) -> Sources:
    """Up to 24 nodes in a few runs of equal holders; perhaps a tail; sizes as they are or with overhead."""
    nodes, links, at = draw.randint(1, 24), list[Link](), 0
    while len(links) < nodes:
        durable = {group.name: draw.choice([0, 90_000]) for group in groups if draw.random() < 0.7}
        disks = {group.name: draw.getrandbits(SLOTS) for group in groups if draw.random() < 0.7}
        for _ in range(draw.randint(1, 8)):
            tail = len(links) == nodes - 1 and draw.random() < 0.3
            end = at + (draw.randrange(16, 256, 16) if tail else 256)
            links.append(Link(f"n{len(links)}", len(links), "", at, end, Held(end - at, durable, disks)))
            at = end
            if len(links) == nodes:
                break
    index = ResidencyIndex()
    index.names = [f"w{slot}" for slot in range(SLOTS)]
    return Sources(links, groups, index)


def a_reader(draw: random.Random, found: Restores) -> Reader:
    values = [0.0] * (table.ORDER + 5)
    for tier in range(5):
        values[table.LATENCY + tier] = draw.choice([0.0, draw.uniform(0, 60)])
        values[table.PER_BYTE + tier] = draw.choice([1e-5, draw.uniform(1e-6, 3e-3)])
        values[table.BREAK_EVEN + tier] = draw.choice([0, 0, 300, 1_000])
    order = draw.sample(range(4), 4)
    slot = draw.randrange(SLOTS)
    queue_ms = draw.choice([0.0, draw.uniform(0, 3_000)])
    return Reader(values, found.places(slot, order), queue_ms, draw.uniform(0.01, 3), 20.0)


def every_node(found: Restores, reader: Reader, resident: int) -> Best:
    best = Best()
    begin = bisect_right(found.ends, resident)
    for node in range(begin, found._until):
        read = found._read(reader, resident, begin, node)
        if read is not None:
            found._count(best, read, reader.values, resident, 1)
    return best


def same(one: Best, other: Best) -> None:
    assert (one.usable, one.paying) == (other.usable, other.paying)
    for here, there in zip(one.reads, other.reads, strict=True):
        assert (here is None) == (there is None)
        if here is not None and there is not None:
            assert here.ttft_ms == pytest.approx(there.ttft_ms)
            if here.link == there.link:
                assert here == pytest.approx(there)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(sorted(GROUPS)))
def test_what_is_found_is_the_best_of_all_nodes(seed: int, kind: str) -> None:
    draw = random.Random(seed)
    sources = a_chain(draw, GROUPS[kind])
    length = sources.ends[-1] + draw.randint(1, 300)
    found = Restores(sources, length, draw.choice([length - 1, draw.randint(0, length)]))
    reader = a_reader(draw, found)
    resident = draw.choice([0, 0, *sources.ends, sources.ends[0] + 16])
    wanted = every_node(found, reader, resident)
    same(found.best(reader, resident), wanted)
    same(found._windowed(reader, resident), wanted)


def _ends(found: Restores, values: object, resident: int, begin: int) -> list[int]:
    return [node for node in (begin, found._until - 1) if begin <= node < found._until]


def test_an_edge_that_is_not_looked_at_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restores, "_edges", _ends)
    with pytest.raises((AssertionError, ExceptionGroup)):  # of several kinds of failure
        test_what_is_found_is_the_best_of_all_nodes()


def test_a_read_leans_on_as_little_as_it_can() -> None:
    best = Best()
    for read in (
        Read(5.0, 512, 9, 1.0, 3, 1, 0, 0),
        Read(5.0, 256, 5, 1.0, 3, 0, 0, 0),
        Read(6.0, 0, 0, 0.0, 3, 0, 0, 0),
    ):
        best.take(read)
    taken = best.reads[3]
    assert taken is not None and taken.boundary == 256
    assert table.SOURCES[3] is Tier.OBJECT
