"""What iterations are charged to: prompt rows, decode steps, and what that predicts for a prompt of any length."""

from __future__ import annotations

import itertools
import random

import pytest

from services.worker.runtime.measurements import (
    Measurements,
    Meter,
    Timing,
    ahead_ms,
    prefill_timings,
    prompts_ms,
    steady,
    step_ms,
    turnover,
    whole_prompts,
)

STEP, ROW = 8.0, 0.1
"""A device for which an iteration costs so many ms, and so many more a prompt row."""


def measured(*prompts: int, budget: int = 512) -> Meter:
    """Prompts of these lengths, one at a time, each with a few decode steps behind it."""
    meter = Meter()
    for _ in range(20):
        meter.iteration(STEP, 1, 0, 0, drew=False)
    for length in prompts:
        for start in range(0, length, budget):
            end = min(start + budget, length)
            meter.iteration(STEP + ROW * (end - start), 0, end - start, end, drew=end == length)
    return meter


def predicted(meter: Meter, tokens: int, length: int) -> float:
    """Prompt rows at their cost, and a decode step for the first token."""
    found = Measurements(prefill_token_ms=meter.prefill_token_ms, decode_step_ms=meter.decode_step_ms)
    return prompts_ms(prefill_timings(found), [(tokens, length)]) + step_ms(found.decode_step_ms, 1)


@pytest.mark.parametrize("tokens", [10, 40, 120, 250])
def test_short_prompts_are_predicted_whatever_was_measured(tokens: int) -> None:
    meter = measured(*[12, 200, 17, 250, 90, 30] * 20)
    assert predicted(meter, tokens, tokens) == pytest.approx(STEP + ROW * tokens, rel=0.05)


@pytest.mark.parametrize("tokens", [700, 1_000, 1_500, 2_000])
def test_long_ones_take_an_iteration_for_each_of_their_parts(tokens: int) -> None:
    meter = measured(*[700, 1_000, 1_500, 2_000] * 20)
    parts = -(-tokens // 512)
    assert predicted(meter, tokens, tokens) == pytest.approx(parts * STEP + ROW * tokens, rel=0.08)


def test_of_small_iterations_little_is_learnt() -> None:
    small, large = Meter(), Meter()
    for meter, rows in ((small, 8), (large, 256)):
        for _ in range(8):
            meter.iteration(25.6, 0, 256, 256, drew=False)  # 0.1 ms a row
        meter.iteration(0.5 * rows, 0, rows, 256, drew=False)  # 0.5 ms a row
    assert small.prefill_token_ms[256].recent_ms < 0.105 < 0.15 < large.prefill_token_ms[256].recent_ms


def test_one_iteration_that_was_held_up_says_little_and_a_device_that_became_slower_much() -> None:
    once, since = Timing(), Timing()
    for _ in range(40):
        once, since = once.add(1.0), since.add(1.0)
    assert once.add(50.0).recent_ms < 1.11
    for _ in range(30):
        since = since.add(5.0)
    assert since.recent_ms == pytest.approx(5.0, rel=0.2)
    for _ in range(30):
        since = since.add(1.0)
    assert since.recent_ms == pytest.approx(1.0, rel=0.2)


def test_a_small_first_iteration_is_soon_outweighed() -> None:
    meter = Meter()
    meter.iteration(0.8 * 8, 0, 8, 900, drew=False)
    for _ in range(2):
        meter.iteration(0.1 * 512, 0, 512, 900, drew=False)
    assert meter.prefill_token_ms[1_024].recent_ms == pytest.approx(0.1, rel=0.15)


def test_more_lanes_than_were_measured_are_taken_for_the_most() -> None:
    timings = {1: Timing(1, 5.0, 5.0), 4: Timing(1, 9.0, 9.0)}
    assert [step_ms(timings, lanes) for lanes in (0, 1, 2, 4, 8)] == [0.0, 5.0, 9.0, 9.0, 9.0]
    assert step_ms({}, 3) == 0.0 and prompts_ms([], [(5, 5)]) == 0.0


@pytest.mark.parametrize(
    ("lanes", "prompts", "elapsed", "coming", "wanted"),
    [
        ((0, 0), (), 0.0, (), 0.0),
        ((2, 0), (), 3.0, (), 9.0 - 3.0),  # the rest of a step
        ((2, 0), (), 20.0, (), 0.0),
        ((0, 1), (300,), 10.0, (), 30.0 + 5.0 - 10.0),  # it draws in the iteration that runs
        ((1, 1), (300,), 10.0, (), 30.0 + 9.0 - 10.0),
        ((1, 1), (1_000,), 10.0, (), 100.0 + 5.0 - 10.0),  # whose other rows share an iteration with the new job's
        ((1, 1), (1_600,), 10.0, (), 160.0 + 5.0 + 2 * 9.0 - 10.0),
        ((0, 0), (300, 400), 0.0, (), 70.0 + 0.0),  # not begun yet
        ((1, 0), (), 1.0, (600,), 60.0 + 5.0 + 5.0 - 1.0),
    ],
)
def test_what_is_ahead_of_one_more_prompt(
    lanes: tuple[int, int], prompts: tuple[int, ...], elapsed: float, coming: tuple[int, ...], wanted: float
) -> None:
    found = Measurements(
        decode_step_ms={1: Timing(1, 5.0, 5.0), 2: Timing(1, 9.0, 9.0)},
        prefill_token_ms={4_096: Timing(1, 0.1, 0.1)},
        decoding_lanes=lanes[0],
        prefilling_lanes=lanes[1],
        waiting_jobs=len(prompts) - lanes[1],
        pending_prompts=tuple([(tokens, tokens) for tokens in prompts]),
        elapsed_ms=elapsed,
    )
    assert ahead_ms(found, coming, 512) == pytest.approx(wanted)


def test_who_waits_takes_a_lane_too() -> None:
    """A hundred short answers on eight lanes are twelve turns of each, not one."""
    assert turnover([2] * 8, [], 8) == 2 and turnover([2] * 7, [], 8) == 0
    assert turnover([9, 1, 5], [], 3) == 1
    assert turnover([9, 1, 5], [3, 3, 3], 3) == 7, "behind the third of them, which went behind the first"
    assert turnover([2] * 8, [2] * 92, 8) == 24
    assert turnover([], [4] * 8, 8) == 4 and turnover([4], [4] * 6, 8) == 0


@pytest.mark.parametrize("crowded", [0, 1, 4, 9])
def test_a_warm_up_outlasts_the_start_of_a_cluster(crowded: int) -> None:
    """While other processes start, repetitions take long, and ever less; then they take what they take, about."""
    draw = random.Random(crowded)
    slow = (400.0 * 0.8**number * draw.uniform(0.97, 1.0) for number in range(crowded))
    usual = (30.0 * draw.uniform(1.0, 1.1) for _ in itertools.count())
    took: list[float] = []
    for ms in itertools.chain(slow, usual):
        if steady(took):
            break
        took.append(ms)
    assert min(took) < 33.0 and len(took) <= crowded + 12


def test_of_the_warm_up_the_quickest_counts_and_then_the_mean_of_late() -> None:
    meter = Meter(warming=True)
    for ms in (900.0, 40.0, 31.0, 30.0, 90.0):
        meter.iteration(ms, 0, 300, 300, drew=False)
        meter.iteration(ms / 10, 1, 0, 0, drew=False)
    assert meter.prefill_token_ms[512].recent_ms == pytest.approx(0.1) and meter.decode_step_ms[1].recent_ms == 3.0
    assert meter.prefill_token_ms[512].count == 5
    meter.warming = False
    for _ in range(20):
        meter.iteration(45.0, 0, 300, 300, drew=False)
    assert meter.prefill_token_ms[512].recent_ms == pytest.approx(0.15, rel=0.05)


def test_who_was_held_up_when_it_was_first_measured_seems_no_slower_than_it_is() -> None:
    """Nobody would give it work, and it would not be measured again."""
    meter = Meter()
    for ms in (170.0, 160.0, 55.0, 140.0):
        meter.iteration(ms, 0, 512, 4_096, drew=False)
    assert meter.prefill_token_ms[4_096].recent_ms * 512 == pytest.approx(55.0)
    for _ in range(30):
        meter.iteration(100.0, 0, 512, 4_096, drew=False)
    assert meter.prefill_token_ms[4_096].recent_ms * 512 == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize("length", [300, 512, 700, 1_024, 1_300, 2_048])
def test_a_prompt_is_as_dear_as_its_rows_at_their_own_contexts(length: int) -> None:
    """Rows far behind cost several times as much as the first ones, as with attention on a small model."""
    meter = Meter()
    for end in (512, 1_024, 1_536, 2_048) * 20:
        meter.iteration(512 * end / 10_000, 0, 512, end, drew=False)
    timings = prefill_timings(Measurements(prefill_token_ms=meter.prefill_token_ms))
    price = next(ms for longest, ms in whole_prompts(timings) if length <= longest)
    exact = sum(min(512, length - start) * (start + 512) / 10_000 for start in range(0, length, 512))
    assert prompts_ms(timings, [(length, length)]) == pytest.approx(exact, rel=0.15)
    assert prompts_ms(timings, [(100, length)]) >= prompts_ms(timings, [(100, 100)])
    if length in (512, 1_024, 2_048):
        assert price * length == pytest.approx(exact, rel=0.1)
    else:
        assert 0.99 * exact < price * length < 1.3 * exact, "by the price of its last rows it would be up to twice"
