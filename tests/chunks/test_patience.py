"""When a read is late: learnt from reads that delivered, bounded below and above."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.chunks.patience import Patience


def test_before_anything_is_measured_it_waits_a_few_expectations() -> None:
    assert Patience(floor_ms=1.0).delay_ms(50.0) == 200.0


def test_it_waits_as_long_as_nearly_all_of_late() -> None:
    patience = Patience(floor_ms=1.0)
    for index in range(64):
        patience.observe(10.0, 60.0 if index % 32 == 31 else 10.0)
    assert patience.delay_ms(10.0) == pytest.approx(20.0)  # the few outliers are what hedging is for
    for _ in range(64):
        patience.observe(10.0, 70.0)
    assert patience.delay_ms(10.0) == pytest.approx(70.0)


@given(
    ratios=st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e6)), max_size=200),
    expected=st.floats(0, 1e5),
    floor=st.floats(1, 100),
)
def test_it_is_bounded_and_never_below_twice_the_expectation_but_for_the_bound(ratios, expected, floor) -> None:
    patience = Patience(floor_ms=floor, most_ms=1_000.0)
    for one, took in ratios:
        patience.observe(one, took)
    delay = patience.delay_ms(expected)
    assert floor <= delay <= 1_000.0 or delay == 1_000.0
    assert delay >= min(1_000.0, 2 * expected) - 1e-6
