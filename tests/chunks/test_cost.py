"""The meter: overlapping reads count once, failures not at all; it finds latency and bandwidth of a known medium."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.chunks.cost import CostMeter, Price


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_reads_are_one_busy_period() -> None:
    clock = Clock()
    meter = CostMeter(Price(1.0, 1_000.0), clock)
    with meter.reading() as one:
        clock.now = 0.1
        with meter.reading() as two:
            clock.now = 0.5
            two.bytes = 400_000
        clock.now = 1.0
        one.bytes = 600_000
    price = meter.price()
    assert price.samples == 1 and price.bytes_per_ms == pytest.approx(1_000, rel=0.05)


def test_a_failed_read_says_nothing() -> None:
    clock = Clock()
    meter = CostMeter(Price(1.0, 1_000.0), clock)
    with pytest.raises(OSError), meter.reading():
        clock.now = 3.0
        raise OSError
    assert meter.price().samples == 0


def test_a_busy_period_without_end_is_measured_all_the_same() -> None:
    clock = Clock()
    meter = CostMeter(Price(1.0, 1_000.0), clock)
    with meter.reading():
        for _ in range(50):
            with meter.reading() as read:
                clock.now += 0.1
                read.bytes = 200_000
        assert meter.price().samples > 3
    assert meter.price().bytes_per_ms == pytest.approx(2_000, rel=0.1)


@given(
    latency=st.floats(0.1, 50),
    rate=st.floats(1e3, 1e6),
    sizes=st.lists(st.integers(1, 10**8), min_size=60, max_size=120),
)
def test_it_converges(latency: float, rate: float, sizes: list[int]) -> None:
    meter = CostMeter(Price(5.0, 1e5))
    for index, size in enumerate(sizes):
        wanted = 1 if index % 2 else max(size, int(20 * latency * rate))
        meter.observe(wanted, latency + wanted / rate)
    price = meter.price()
    for size in (1, 10**7):
        assert price.ms(size) == pytest.approx(latency + size / rate, rel=0.15)


def test_what_varies_is_expected_to_take_its_usual_time_and_a_stall_is_not() -> None:
    draw, meter, found = random.Random(1), CostMeter(Price(5.0, 1e5)), list[float]()
    for number in range(400):
        taken = (10.0 + 1e6 / 1e5) * draw.lognormvariate(0.0, 0.5)
        meter.observe(1_000_000, taken * (50 if number % 20 == 0 else 1))
        found.append(meter.price().ms(1_000_000))
    assert sum(found[50:]) / 350 == pytest.approx(20.0, rel=0.2)
