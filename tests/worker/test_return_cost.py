"""What an evicted prefix would cost, by measurements: cheapest way, monotone, and the default before any."""

from __future__ import annotations

import pytest

from libs.controller.protocol import PrefillCost, Tier, TierCost
from services.worker.echo.model import LAYOUT
from services.worker.pages.eviction import default_return_cost
from services.worker.return_cost import MeasuredReturnCost

PREFILL = (PrefillCost(256, 1.0), PrefillCost(1_024, 2.0))
SIZE = LAYOUT.restore_bytes(1_000)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def priced(*tiers: TierCost, prefill: tuple[PrefillCost, ...] = PREFILL) -> MeasuredReturnCost:
    cost = MeasuredReturnCost(LAYOUT, Clock())
    cost.measure(lambda: prefill, lambda: tiers)
    return cost


def test_before_anything_is_measured_the_default_stands() -> None:
    assert MeasuredReturnCost(LAYOUT)(800, 512) == default_return_cost(800, 512)
    assert priced(TierCost(Tier.SSD, 1.0, 1e6), prefill=())(800, 512) == default_return_cost(800, 512)


def test_what_is_not_durable_is_computed_at_its_lengths_cost() -> None:
    cost = priced(TierCost(Tier.SSD, 1.0, 1e6))
    assert cost(200, 0) == 200
    assert cost(1_000, 0) == 2_000
    assert cost(5_000, 0) == 10_000, "beyond what was measured, the longest measured length's"


def test_the_durable_part_comes_from_the_cheapest_tier_and_then_to_the_device() -> None:
    ssd, store = TierCost(Tier.SSD, 2.0, SIZE / 10), TierCost(Tier.OBJECT, 30.0, SIZE / 40)
    assert priced(ssd, store)(1_000, 1_000) == pytest.approx(12.0)
    assert priced(store)(1_000, 1_000) == pytest.approx(70.0)
    upload = TierCost(Tier.GPU, 1.0, SIZE / 5)
    assert priced(ssd, store, upload)(1_000, 1_000) == pytest.approx(18.0)
    assert priced(ssd)(1_200, 1_000) == pytest.approx(12.0 + 200 * 2.0)


def test_a_tier_slower_than_computing_costs_what_computing_costs() -> None:
    assert priced(TierCost(Tier.OBJECT, 60_000.0, 1.0))(1_000, 1_000) == 2_000


def test_measurements_are_taken_again_after_a_while_and_not_for_every_route() -> None:
    clock, asked = Clock(), []
    cost = MeasuredReturnCost(LAYOUT, clock)
    cost.measure(lambda: PREFILL, lambda: asked.append(1) or (TierCost(Tier.SSD, 2.0, 1e9),))  # type: ignore[func-returns-value]
    for _ in range(50):
        cost(1_000, 512)
    assert len(asked) == 1
    clock.now = 5.0
    cost(1_000, 512)
    assert len(asked) == 2


def test_memory_and_peers_do_not_make_it_cheaper() -> None:
    """They may have given it up by the time it is wanted."""
    ssd = TierCost(Tier.SSD, 2.0, SIZE / 10)
    near = (TierCost(Tier.RAM, 0.01, 1e9), TierCost(Tier.PEER, 0.1, 1e9))
    assert priced(ssd, *near)(800, 512) == priced(ssd)(800, 512)
