"""Properties of the pure iteration policy, over random lanes and queues and over whole simulated runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.runtime.iteration import Batch, Budgets, LaneView, plan


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[LaneView], list[int], Budgets]:
    lanes = draw(st.integers(1, 9))
    tokens = draw(st.integers(1 if lanes == 1 else lanes + 1, lanes + 40))
    occupied = draw(st.lists(st.integers(0, lanes - 1), unique=True, max_size=lanes))
    pending = st.one_of(st.just(1), st.integers(1, 60))
    order = draw(st.permutations(range(len(occupied))))
    views = [LaneView(lane, draw(pending), at) for lane, at in zip(occupied, order, strict=True)]
    return views, draw(st.lists(pending, max_size=6)), Budgets(lanes, tokens)


@given(situations())
def test_every_batch_is_legal(situation: tuple[list[LaneView], list[int], Budgets]) -> None:
    views, queue, budgets = situation
    batch = plan(views, queue, budgets)
    pending = {view.lane: view.pending for view in views}
    assert not set(batch.refills) & set(pending), "a running lane is never refilled"
    assert len(batch.refills) == min(len(queue), budgets.lanes - len(views))
    assert list(batch.refills) == sorted(batch.refills)
    pending |= dict(zip(batch.refills, queue, strict=False))
    assert set(batch.decodes) == {lane for lane, count in pending.items() if count == 1}, "no decode is ever skipped"
    assert all(1 <= count <= pending[lane] and pending[lane] > 1 for lane, count in batch.prompts)
    rows = len(batch.decodes) + sum(count for _, count in batch.prompts)
    assert rows <= budgets.tokens
    wanting = sum(count for count in pending.values() if count > 1)
    given_out = sum(count for _, count in batch.prompts)
    assert given_out == min(wanting, budgets.tokens - len(batch.decodes)), "no token of the budget is wasted"
    if wanting and budgets.lanes > 1:
        assert batch.prompts, "a prompt in a lane always advances"
    assert bool(rows) == bool(pending)


@given(situations())
def test_the_oldest_prompt_goes_first(situation: tuple[list[LaneView], list[int], Budgets]) -> None:
    views, _, budgets = situation
    batch = plan(views, (), budgets)
    prompts = sorted((view for view in views if view.pending > 1), key=lambda view: view.admitted)
    assert [lane for lane, _ in batch.prompts] == [view.lane for view in prompts[: len(batch.prompts)]]
    assert all(count == view.pending for (_, count), view in zip(batch.prompts[:-1], prompts, strict=False))


def test_a_prompt_under_seven_decoding_lanes_gets_its_token_each_iteration() -> None:
    budgets = Budgets(8, 9)
    decoding = [LaneView(lane, 1, lane) for lane in range(7)]
    pending = 1000
    for _ in range(500):
        batch = plan([*decoding, LaneView(7, pending, 7)], [50, 50], budgets)
        assert batch == Batch((), tuple(range(7)), ((7, 2),))
        pending -= 2
    assert pending == 0


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=8))
def test_a_single_lane_never_interleaves(jobs: list[tuple[int, int]]) -> None:
    """Whole run: rows of one job only, until it has drawn all its tokens."""
    budgets, queue = Budgets(1, 8), list(range(len(jobs)))
    pending, left = [prompt for prompt, _ in jobs], [new for _, new in jobs]
    running: int | None = None
    trace: list[int] = []
    for _ in range(1000):
        views = [] if running is None else [LaneView(0, pending[running], 0)]
        batch = plan(views, [pending[job] for job in queue], budgets)
        if batch.refills:
            running = queue.pop(0)
        if running is None:
            break
        assert len(batch.decodes) + len(batch.prompts) == 1
        trace.append(running)
        pending[running] -= 1 if batch.decodes else batch.prompts[0][1]
        if pending[running] == 0:
            left[running] -= 1
            pending[running] = 1
            if left[running] == 0:
                running = None
    assert left == [0] * len(jobs)
    assert trace == sorted(trace)


@pytest.mark.parametrize(("lanes", "tokens"), [(0, 5), (1, 0), (2, 2), (8, 8)])
def test_budgets_that_could_starve_are_refused(lanes: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budgets(lanes, tokens)
