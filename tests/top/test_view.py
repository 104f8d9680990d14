"""What `segue top` draws: an operator finds who lacks tunnels, what drains, and what was dropped."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from cli.top.view import Sample, age, cell, screen
from libs.contracts.segue.v1 import pool_pb2 as pb

CELL = "ab" * 32 + "@north"


def drawn(pool: pb.PoolStatus, before: pb.PoolStatus | None = None) -> str:
    out = StringIO()
    earlier = Sample(before, 10.0) if before is not None else None
    Console(file=out, width=200).print(screen(Sample(pool, 12.0), earlier, "router:7000"))
    return out.getvalue()


def test_everything_an_operator_needs_is_on_the_screen() -> None:
    group = pb.CellFamily(cell=CELL, family="ipv6")
    pool = pb.PoolStatus(
        readiness="degraded",
        generation=7,
        missing_cells=[CELL],
        map=pb.MapCurrency(hash="new", committed_hash="old", revision=9, committed_revision=8, empty_refused_ms=65_000),
        pending=pb.PendingGeneration(generation=8, ratio=0.5, deficit=3, triggers=["map"], obstacle="ratio"),
        missing=[group],
        left_missing=[group],
        routes=12,
        held=4,
        endpoints=[
            pb.PoolEndpoint(worker="w0", address="a:1", cells=[CELL], active=1, floor=2, drained=True, listed=True),
            pb.PoolEndpoint(worker="w1", address="b:1", vanished_ms=5_000, quarantined=True, failures=3),
        ],
        writers=[
            pb.PoolWriter(id=1, worker="w0", contour="draining", generation=6, routes=5, replacement="retiring"),
            pb.PoolWriter(
                id=2, worker="w0", contour="active", generation=7, degraded=["ping_slow"], replacement="open"
            ),
        ],
        counters=pb.PoolCounters(route_ends={"done": 30}, dropped={"no_route": 2}, removals={"lost": 1}),
    )
    before = pb.PoolStatus(counters=pb.PoolCounters(route_ends={"done": 10}))
    text = drawn(pool, before)
    for words in (
        "degraded", "generation 7", "map new r9 (committed r8)", "empty map refused for 1m05s", "12 routes, 4 held",
        "warm 0 active 1 draining 1", "no cover: abababab@north", "over ipv6 (left to older ones)",
        "generation 8 pending for the map", "covers 50%, lacks 3 tunnels (ratio)", "drained",
        "left the map 5s ago, quarantined, 3 failures", "ping_slow", "retiring", "lost 1", "done 30 (10.0 /s)",
        "no_route 2",
    ):  # fmt: skip
        assert words in text, (words, text)
    # Who serves stands before who drains.
    assert text.index("ping_slow") < text.index("retiring")


def test_a_pool_without_anything_is_drawn_too() -> None:
    assert "no-map" in drawn(pb.PoolStatus(readiness="no-map"))


@pytest.mark.parametrize(("ms", "text"), [(0, "0s"), (59_999, "59s"), (190_000, "3m10s"), (7_500_000, "2h05m")])
def test_age(ms: int, text: str) -> None:
    assert age(ms) == text


def test_cell() -> None:
    assert (cell("ab" * 32 + "@"), cell("short@z")) == ("abababab", "short@z")
