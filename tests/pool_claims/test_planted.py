"""The judges of the pool's claims, on pools, tunnels and figures with a fault; the claims' slices hold them against
honest ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from libs.pool import readiness
from libs.pool.books import Books
from libs.pool.floor import CellActivity, Floors
from libs.pool.knobs import PoolPolicy
from libs.tunnel import Closed, CloseReason, Route, Tunnel
from prove import (
    p6_cancel,
    p6_families,
    p6_floor,
    p6_frames,
    p6_nobody_hangs,
    p6_routes,
    p6_stopped_consumer,
    p6_table,
    pooled,
)
from prove.checks import Checks
from prove.pool_day import day
from tests.pool.logical import logically
from tests.pool.rig import CALM
from tests.pool.table import rows
from tests.pool.test_idle_routes import ten_minutes
from tests.pool.test_invariants import _FULL, _shared_limit


@pytest.mark.parametrize("name", ["a guard that keeps what it took", "a victim that stays Preparing"])
async def test_an_enumeration_notices(name: str) -> None:
    assert await p6_cancel.planted(name)


@pytest.mark.parametrize("name", p6_routes.PLANTED)
async def test_routes_over_a_faulty_pool(name: str) -> None:
    assert await p6_routes.planted(name)


def failed(checks: Checks) -> list[str]:
    return [str(one["name"]) for one in checks.failed]


async def test_a_stopped_consumer_that_takes_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    _FULL.clear()
    checks = Checks()
    async with (
        pooled.echoing(1) as workers,
        pooled.pooled(workers, CALM, route_items=16, route_congested_s=0.05) as made,
    ):
        await made.full()
        before = await workers[0].rest()
        with monkeypatch.context() as planted:
            planted.setattr(Route, "deliver", _shared_limit)
            # Deltas for far longer than the stopped one's channel holds out.
            seen = await p6_stopped_consumer.played(made, 4, 600, with_stopped=True)
        await p6_stopped_consumer.settled(checks, made, workers[0], seen, before, 4, 1)
    assert any("lack a delta" in name for name in failed(checks)), failed(checks)


def test_nothing_is_told_by_noise() -> None:
    checks = Checks()
    p6_stopped_consumer.judge(checks, [1.0, 2.0, 9.0], [2.0, 2.0, 2.0])
    assert len(checks.failed) == 1


@pytest.mark.parametrize(
    ("stopped", "good"), [([4.1, 4.0, 3.9], True), ([4.9, 4.8, 4.7], True), ([6.0, 6.1, 3.0], False)]
)
def test_latencies_are_held_against_the_noise(stopped: list[float], good: bool) -> None:
    checks = Checks()
    p6_stopped_consumer.judge(checks, [3.6, 4.0, 4.2], stopped)
    assert (not checks.failed) is good


def test_an_idle_route_that_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def sweep(self: Tunnel, now: float) -> None:
        if now - self.entry.opened_at > 300:
            for route in list(self.entry.routes.values()):
                self.end_route(route, Closed(CloseReason.IDLE))

    monkeypatch.setattr(Tunnel, "_sweep", sweep)
    with pytest.raises(AssertionError, match="it ended"):
        logically(lambda: ten_minutes(PoolPolicy(reinit_interval_s=0)))


async def test_a_bind_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p6_nobody_hangs, "_SLACK_S", 0.5)
    monkeypatch.setattr("libs.pool.core.without_writer", lambda *_args: readiness.Hold(30.0))
    checks = Checks()
    worker = pooled.EchoProcess("w0")
    worker.port = 1  # nobody is there
    async with pooled.pooled([worker], CALM) as made:
        await p6_nobody_hangs.answers(checks, made, "planted")
    assert len(failed(checks)) == 4


@pytest.mark.parametrize(
    ("taken", "faults"),
    [
        ([(1, 1), (1, 2), (2, 4), (2, 5)], 0),
        ([(1, 1), (1, 1)], 1),
        ([(1, 1), (2, 1), (1, 2)], 1),
        ([(1, 1), (1, 3)], 1),
        ([(1, 2), (1, 1), (1, 2)], 1),
    ],
)
def test_heartbeats_that_are_not_single(taken: list[tuple[int, int]], faults: int) -> None:
    assert len(p6_nobody_hangs.faults(taken)) == faults


async def test_an_only_endpoint_that_is_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Books, "outage", lambda _self: frozenset())
    monkeypatch.setattr(pooled, "LIMIT_S", 2.0)
    checks = Checks()
    async with pooled.echoing(1) as workers:
        with pytest.raises(TimeoutError):
            await p6_families.outage(checks, workers[0])
    assert failed(checks) == ["outage mode True: quarantined"]


def _never_idle(self: Floors, *_args: Any) -> None:
    _UPDATE(self, *_args)
    for activity in self.cells.values():
        activity.idle = False


def _oscillates(self: Floors, policy: PoolPolicy, cells: Any, busy: Any, now: float) -> None:
    _UPDATE(self, policy, cells, busy, now)
    for activity in self.cells.values():
        if not activity.idle and now - activity.last_active > 5:
            activity.idle = True
            self.switches += 1


def _slow_to_restore(self: Floors, cells: Any, now: float) -> bool:
    awake = [cell for cell in cells if not self.cells.get(cell, CellActivity(0, 0)).idle]
    return _DEMAND(self, awake, now)


_UPDATE, _DEMAND = Floors.update, Floors.demand


@pytest.mark.parametrize(
    ("where", "wrong"), [("update", _never_idle), ("update", _oscillates), ("demand", _slow_to_restore)]
)
def test_a_floor_that_does_not_follow(where: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Floors, where, wrong)
    checks = Checks()
    p6_floor.judge(checks, day(PoolPolicy(), 1, 120.0), PoolPolicy(), full=False)
    assert any("asks for" in name or name == "switches" for name in failed(checks)), failed(checks)


def test_bursts_over_the_limit() -> None:
    checks = Checks()
    bursts = {
        name: p6_floor.Bursts([value] * 3, [value] * 3)
        for name, value in (("static", 10.0), ("static again", 10.5), ("adaptive", 12.5))
    }
    p6_floor.judge_bursts(checks, bursts)
    assert len(checks.failed) == 2


@pytest.mark.parametrize(("per_s", "p50_ms", "faults"), [(5_100.0, 0.5, 0), (4_900.0, 0.5, 1), (5_100.0, 0.71, 1)])
def test_frames_that_are_few_or_late(per_s: float, p50_ms: float, faults: int) -> None:
    checks = Checks()
    fast, slow = (
        {"bare 1": [10_000.0] * 3, "tunnel 1": [9_000.0] * 3},
        {"bare 1": [10_000.0] * 3, "tunnel 1": [per_s] * 3},
    )
    found = {
        "single": fast,
        "payload": fast,
        "full": slow,
        "p50_ms": {"bare 1": [0.4] * 3, "tunnel 1": [p50_ms] * 3},
    }
    p6_frames.judge(checks, found, 1)
    assert len(checks.failed) == faults


def test_a_row_that_needs_no_line_is_about_other_lines() -> None:
    needless, held = p6_table.needless(), {row.id: row for row in rows()}
    assert needless.line == held["F2"].line
    assert needless.test != held["F2"].test
