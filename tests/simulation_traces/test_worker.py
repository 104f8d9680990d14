"""A simulated worker's times, computed by hand from what is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.simulation.traces.costs import DECLARED, Costs, TierSet
from libs.simulation.traces.recorded import Recorded
from libs.simulation.traces.tiers import Changes, Directory, Local, Tiers
from libs.simulation.traces.worker import Job, Worker


def request(tokens: int, output: int = 1, first: int = 0) -> Recorded:
    return Recorded(0.0, tokens, output, tuple(range(first, first + -(-tokens // 512))))


def worker(tiers: TierSet = TierSet.LOCAL, costs: Costs = DECLARED, directory: Directory | None = None) -> Worker:
    return Worker(0, costs, tiers, directory or Directory())


def play(at: Worker, *jobs: tuple[float, Job]) -> list[Job]:
    """Feeds jobs at their times and lets the worker run to its end."""
    waiting, ended = list(jobs), list[Job]()
    for _ in range(100_000):
        if waiting and waiting[0][0] <= at.next_ms:
            now, job = waiting.pop(0)
            at.arrive(job, now)
        elif at.next_ms < float("inf"):
            ended += at.form(at.next_ms)
        elif not waiting:
            return ended
    raise AssertionError("the worker does not come to rest")


def test_one_prompt_alone() -> None:
    job = Job(0, request(5_000, 10), 0.0)
    play(worker(), (100.0, job))
    # 2,048 + 2,048 + 904 tokens at 0.15 ms, nobody decodes; then ten iterations of 12 ms.
    assert job.prefilled_ms == pytest.approx(100 + 750)
    assert job.first_ms == pytest.approx(100 + 750 + 12)
    assert job.ended_ms == pytest.approx(100 + 750 + 120)


def test_a_prefill_is_stretched_while_a_lane_decodes() -> None:
    first, second = Job(0, request(512, 1_000), 0.0), Job(1, request(4_096, 1, 100), 0.0)
    play(worker(), (0.0, first), (1_000.0, second))
    assert first.prefilled_ms == pytest.approx(76.8)
    # The iteration under way at 1,000 ends first: 76.8 + 77 x 12 = 1,000.8; then two of 307.2 + 12.
    assert second.started_ms == pytest.approx(1_000.8)
    assert second.prefilled_ms == pytest.approx(1_000.8 + 2 * 319.2)
    assert second.first_ms == pytest.approx(1_000.8 + 2 * 319.2 + 12)


def test_prompts_are_read_in_turn_and_share_an_iteration() -> None:
    first, second = Job(0, request(1_024, 1), 0.0), Job(1, request(2_048, 1, 100), 0.0)
    at = worker()
    at.arrive(first, 0.0)
    at.arrive(second, 0.0)
    play(at)
    # 1,024 of the first and 1,024 of the second; then the rest, beside the first one's decode.
    assert first.prefilled_ms == pytest.approx(307.2) and first.first_ms == pytest.approx(307.2 + 12 + 153.6)
    assert second.started_ms == pytest.approx(153.6)
    assert second.prefilled_ms == pytest.approx(307.2 + 12 + 153.6)


def test_the_seventeenth_waits_for_a_lane() -> None:
    jobs = [(0.0, Job(number, request(2_048, 100, 100 * number), 0.0)) for number in range(17)]
    play(worker(), *jobs)
    last = jobs[16][1]
    assert last.started_ms == pytest.approx(min(job.ended_ms for _, job in jobs))


def test_a_second_prompt_finds_the_first_ones_blocks() -> None:
    first, second = Job(0, request(5_120), 0.0), Job(1, request(5_120), 0.0)
    play(worker(), (0.0, first), (5_000.0, second))
    assert second.hits == {"device": 5_119} and second.computed == 1
    assert second.first_ms == pytest.approx(5_000 + 0.15 + 12)


@pytest.mark.parametrize(
    ("tiers", "hit", "ready_ms"),
    [
        (TierSet.PEER, "peer", 10_239 * (0.03 + 0.06) + 0.5 + 2.0),
        (TierSet.OBJECT, "object", 10_239 * 0.08 + 60.0),
        (TierSet.LOCAL, "", 0.0),
    ],
)
def test_what_others_have_is_loaded_where_it_may_be(tiers: TierSet, hit: str, ready_ms: float) -> None:
    directory, blocks = Directory(), range(20)
    for block in blocks:
        if tiers is TierSet.OBJECT:
            directory.stored[block] = 4_000.0
        else:
            directory.set(Local.SSD, block, 1 << 5)
    job = Job(0, request(10_240), 0.0)
    play(worker(tiers, directory=directory), (5_000.0, job))
    if not hit:
        assert job.computed == 10_240
        return
    assert job.hits[hit] == 10_239 and job.load_ms == pytest.approx(ready_ms)
    assert job.prefilled_ms == pytest.approx(5_000 + ready_ms + 10_239 * 0.01 + 0.15)


def test_an_object_is_there_five_seconds_after_it_was_computed() -> None:
    directory = Directory()
    job = Job(0, request(1_024), 0.0)
    play(worker(TierSet.OBJECT, directory=directory), (0.0, job))
    assert [*directory.stored.values()] == [pytest.approx(153.6 + 5_000)] * 2


def test_what_leaves_a_tier_stays_in_the_one_below() -> None:
    costs = replace(DECLARED, device_blocks=2, ram_blocks=4, ssd_blocks=6)
    directory = Directory()
    tiers = Tiers(0, costs, directory)
    for first in range(0, 8, 2):
        tiers.use([first, first + 1])
    assert [tiers.has(Local.DEVICE, block) for block in range(8)] == [False] * 6 + [True] * 2
    assert [tiers.has(Local.RAM, block) for block in range(8)] == [False] * 4 + [True] * 4
    assert [tiers.has(Local.SSD, block) for block in range(8)] == [False] * 2 + [True] * 6
    tiers.use([2, 3])  # from the disk, and the newest everywhere now
    assert tiers.prefix([2, 3]) == 2 and not tiers.has(Local.DEVICE, 6)
    assert tiers.has(Local.RAM, 7) and not tiers.has(Local.RAM, 4)
    assert set(directory.holders[Local.DEVICE]) == {2, 3}


def test_of_one_prompt_the_end_leaves_first() -> None:
    costs = replace(DECLARED, device_blocks=3)
    tiers = Tiers(0, costs, Directory())
    tiers.use([1, 2, 3])
    tiers.use([9])
    assert [tiers.has(Local.DEVICE, block) for block in (1, 2, 3, 9)] == [True, True, False, True]


class Plain:
    """A tier as one would write it first: one block after another."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held, self.changed = capacity, list[int](), dict[int, None]()

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self.held:
                self.held.remove(block)
            else:
                self.changed[block] = None
            self.held.append(block)
        while len(self.held) > self.capacity:
            self.changed[self.held.pop(0)] = None


def as_plain(capacities: tuple[int, int, int], uses: Sequence[tuple[int, bool]], tiers: Tiers) -> None:
    """Prompts that share their beginnings, and now and then a look at what changed."""
    plain = [Plain(capacity) for capacity in capacities]
    directory = Directory()
    tiers._directory = directory
    for first, looks in uses:
        prompt = [*range(first % 3), *range(10 * first, 10 * first + 1 + first % 5)]
        prompt = list(dict.fromkeys(prompt))
        tiers.use(prompt)
        for tier, one in zip(Local, plain, strict=True):
            one.use(prompt)
            assert list(tiers._held[tier]) == one.held and set(directory.holders[tier]) == set(one.held)
            if looks:
                entered, left = [
                    [block for block in one.changed if (block in one.held) == is_in] for is_in in (True, False)
                ]
                assert tiers.drain(tier) == Changes(tuple(entered), tuple(left))
                one.changed.clear()


USES = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30)


@given(st.tuples(st.integers(1, 6), st.integers(4, 12), st.integers(8, 30)), USES)
def test_tiers_do_what_plain_ones_do(capacities: tuple[int, int, int], uses: list[tuple[int, bool]]) -> None:
    costs = replace(DECLARED, device_blocks=capacities[0], ram_blocks=capacities[1], ssd_blocks=capacities[2])
    as_plain(capacities, uses, Tiers(3, costs, Directory()))


class Forgetful(Tiers):
    """Planted: what is used again is not made the newest."""

    def use(self, blocks: Sequence[int]) -> None:
        super().use([block for block in blocks if not self.has(Local.SSD, block)])


def test_planted_tiers_that_forget_what_was_used_are_caught() -> None:
    costs = replace(DECLARED, device_blocks=4, ram_blocks=8, ssd_blocks=16)
    with pytest.raises(AssertionError):
        as_plain((4, 8, 16), [(1, True), (2, True), (1, True), (4, True)], Forgetful(3, costs, Directory()))
