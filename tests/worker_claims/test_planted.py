"""Each checker of the worker's claims is shown the fault it is there for, and must see it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prove import p3_cases, p3_checkpoint_decode, p3_no_starvation, p3_offer_reply, p3_serialized, p3_soak, paths
from prove.checkpoint_modes import Mode
from prove.checks import Checks
from prove.judging import Generation, Judge, Tally
from prove.p3_checkpoint_decode import Rounds
from prove.p3_never_short import without_the_copied_page
from prove.p3_serialized import _Plan, compare
from prove.page_mixes import play
from prove.paths import History
from prove.prose import Prose
from prove.worker_bench import Ask, Bench, fresh_salt
from services.worker.pages.books import Books
from services.worker.pages.pool import PagePool
from services.worker.pages.route import Reservation
from services.worker.runtime.iteration import Batch, Budgets, LaneView, plan
from services.worker.runtime.job import Event, Finished, Started
from services.worker.runtime.serial import SerialLoop

# --- 3-exact ---


async def test_a_wrong_token_and_a_float_tie_are_told_apart(folder: Path, bench: Bench) -> None:
    prompt = Prose(folder, 1).prompt(120)
    right = (await bench.run(Ask(prompt, 8, fresh_salt()))).tokens
    wrong = [*right[:4], (right[4] + 1) % 500, *right[5:]]
    groups = await Judge(folder).judge_groups(
        {"right": [Generation("a", prompt, right)], "wrong": [Generation("b", prompt, wrong)]}
    )
    assert groups["right"].exact and groups["right"].flips == 0
    assert not groups["wrong"].exact and groups["wrong"].flips >= 1


async def test_a_wrong_probability_and_a_token_the_mask_forbids_are_seen(folder: Path) -> None:
    prompt = Prose(folder, 3).prompt(40)
    ways = {option.name: option for option in paths.options(5, [7, 8])}
    async with Bench(folder, {"kv_bytes": 8 << 20}, masks=paths.masks(512)) as bench:
        masked = await paths.sampled(bench, prompt, 6, ways["greedy mask"], fresh_salt())
        told = await paths.sampled(bench, prompt, 6, ways["logprobs"], fresh_salt())
    honest = {"masked": [masked.generation(1)], "told": [told.generation(1)]}
    allowed = next(token for token in range(512) if token % 7 == masked.output[0] % 7 and token != masked.output[0])
    other = replace(masked.generation(2), output=[allowed, *masked.output[1:]])
    forbidden = replace(masked.generation(3), output=[masked.output[0] + 1, *masked.output[1:]])
    said = [replace(told.logprobs[0], logprob=told.logprobs[0].logprob + 0.01), *told.logprobs[1:]]
    missing = [replace(one, top_ids=one.top_ids[1:], top_logprobs=one.top_logprobs[1:]) for one in told.logprobs]
    planted = {
        "another token": [other],
        "a forbidden token": [forbidden],
        "a wrong probability": [replace(told.generation(4), logprobs=said)],
        "the likeliest left out": [replace(told.generation(5), logprobs=missing)],
        "one probability too few": [replace(told.generation(6), logprobs=told.logprobs[:-1])],
    }
    verdicts = await Judge(folder).judge_groups({**honest, **planted})
    assert [name for name, tally in verdicts.items() if not tally.exact] == list(planted)


async def test_a_path_that_was_not_taken_is_noticed(folder: Path, bench: Bench) -> None:
    prose, draw = Prose(folder, 2), random.Random(2)
    nowhere = History(prose.prompt(400), fresh_salt())
    played = await paths.resident(bench, nowhere, prose.continuation(8), 2)
    assert any("resident tokens" in why for why in played.missed)
    nowhere = History(prose.prompt(400), fresh_salt())
    assert (await paths.partial(bench, nowhere, draw, prose.continuation(8), 2)).missed
    nowhere = History(prose.prompt(400), fresh_salt())
    assert all(one.missed for one in await paths.forked(bench, nowhere, [prose.continuation(8)] * 2, 2))


def test_prompts_are_the_seeds_own_and_differ_early(folder: Path) -> None:
    one, again, other = Prose(folder, 5), Prose(folder, 5), Prose(folder, 6)
    first = [one.prompt(300) for _ in range(40)]
    assert first == [again.prompt(300) for _ in range(40)]
    assert other.prompt(300) not in first
    assert all(len(prompt) == 300 for prompt in first)
    assert len({tuple(prompt[:256]) for prompt in first}) == 40, "no two share a chunk"


# --- 3-serialized ---


async def test_another_token_of_one_side_fails_the_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SerialLoop._step

    def crooked(self: SerialLoop, job, sampler, span, position, primed):  # type: ignore[no-untyped-def]
        token, logits = honest(self, job, sampler, span, position, primed)
        return (token if logits is None or position % 7 else (token + 1) % 500), logits

    async def judge(_self: Judge, cases: Sequence[Generation]) -> Tally:
        return Tally(len(cases), wrong=["other tokens"])

    monkeypatch.setattr(SerialLoop, "_step", crooked)
    monkeypatch.setattr(Judge, "judge", judge)  # costs a process; what it tells apart has its own test
    checks = Checks()
    await compare(checks, "tiny", folder, _Plan(1, 8, 40, 60, 8 << 20))
    assert any("tokens" in str(one["name"]) for one in checks.failed)


async def test_a_page_lost_by_one_side_fails_the_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SerialLoop.submit

    def wasteful(self: SerialLoop, job) -> None:  # type: ignore[no-untyped-def]
        pool: PagePool = job.pages._pages._pool
        pool._books.frames[0].take(1)
        honest(self, job)

    monkeypatch.setattr(SerialLoop, "submit", wasteful)
    monkeypatch.setattr(p3_serialized, "_REST_S", 0.3)
    checks = Checks()
    await compare(checks, "tiny", folder, _Plan(1, 4, 40, 60, 8 << 20))
    assert {"tiny, wave 1: pages at rest", "tiny, wave 1: integrity"} <= {str(one["name"]) for one in checks.failed}


# --- 3-cancel ---


async def test_pages_kept_after_a_cancel_are_noticed(
    folder: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = bench.offer(Ask(Prose(folder, 3).prompt(400), 200, fresh_salt()))
    await cut.drawn(2)
    cut.cancel()
    assert await bench.rest() == []
    honest = Books.dismiss

    def keeping(self: Books, reservation: Reservation) -> None:
        honest(self, reservation)
        for spare in reservation.spare:
            spare.clear()

    monkeypatch.setattr(Books, "dismiss", keeping)
    cut = bench.offer(Ask(Prose(folder, 4).prompt(400), 900, fresh_salt()))
    await cut.drawn(2)
    cut.cancel()
    assert any("reserved" in why for why in await bench.rest(within=1.0))


# --- 3-never-short ---


def test_mixes_run_short_without_the_copied_page_and_not_with_it() -> None:
    seeds = range(100, 106)
    assert play(seeds).failures == []
    with without_the_copied_page():
        assert play(seeds).failures


def test_a_page_behind_the_window_given_back_too_soon_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Books.give_back

    def too_much(self: Books, reservation: Reservation, g: int) -> int:
        lost = honest(self, reservation, g)
        spare = reservation.spare[g]
        if spare:
            self.frames[g].give_back(spare.pop())
        return lost

    monkeypatch.setattr(Books, "give_back", too_much)
    assert play(range(100, 112)).failures


# --- 3-no-starvation ---


def test_a_policy_that_starves_prompts_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decodes_only(lanes: Sequence[LaneView], queue: Sequence[int], budgets: Budgets) -> Batch:
        batch = plan(lanes, queue, budgets)
        return Batch(batch.refills, batch.decodes, ()) if batch.decodes else batch

    monkeypatch.setattr("services.worker.runtime.loop.plan", decodes_only)
    problems, _ = p3_no_starvation.starved(p3_no_starvation.batches_beside_decodes(folder, 40), 40)
    assert problems


def test_interleaving_on_one_lane_is_noticed() -> None:
    start, end = [Started(name, 0) for name in "ab"], [Finished(name, "length", 1) for name in "ab"]
    good: list[Sequence[Event]] = [[start[0]], [end[0], start[1]], [end[1]]]
    assert p3_no_starvation.interleaved(good) == []
    assert p3_no_starvation.interleaved([[start[0], start[1]], [end[0]], [end[1]]])


# --- figures ---


def rounds(ms: float, slow: float, *, dropped: int = 0, beside: int = 1) -> Rounds:
    return Rounds([[ms] * 90 + [slow] * 10 for _ in range(4)], captured=10, beside=beside, dropped=dropped)


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({}, []),
        ({Mode.LOCAL: rounds(11, 13)}, ["local: p50"]),
        ({Mode.LOCAL: rounds(10, 20)}, ["local: p99"]),
        ({Mode.SATURATED: rounds(10, 20, dropped=3)}, ["saturated: p99"]),
        ({Mode.SATURATED: rounds(10, 12)}, ["saturated: ranges dropped"]),
        ({Mode.STORE: rounds(10, 12, beside=0)}, ["store: bytes captured beside decode"]),
        ({Mode.STORE: rounds(30, 90)}, []),
    ],
)
def test_checkpoints_that_slow_decode_or_never_drop_fail(changed: dict[Mode, Rounds], failed: list[str]) -> None:
    found = {mode: rounds(10, 12) for mode in Mode} | {Mode.SATURATED: rounds(10, 12, dropped=3)} | changed
    outcome = p3_checkpoint_decode.judged(found, limits=True)
    assert outcome.figure["failed"] == failed  # type: ignore[index, call-overload]


def test_slow_replies_and_idle_lanes_fail() -> None:
    found = p3_offer_reply.Found({16: [3.0] * 98 + [80.0] * 2}, tokens=10, decoding=[8, 8])
    assert not p3_offer_reply.judged(found, 25.0).passed
    found.ms = {16: [3.0] * 99 + [80.0]}
    assert p3_offer_reply.judged(found, 25.0).passed
    found.decoding = [8, 3]
    assert not p3_offer_reply.judged(found, 25.0).passed


def test_a_leak_fails_the_soak_and_a_warm_up_does_not() -> None:
    mib = 2**20
    warm = [300 * mib + 4 * mib * step for step in range(100)] + [700 * mib] * 400
    leak = [700 * mib + mib * step // 5 for step in range(500)]
    assert abs(p3_soak.growth(warm)) <= 0.05
    assert p3_soak.growth(leak) > 0.05
    found = p3_soak.Found(10, memory=warm)
    found.counts.update(dict.fromkeys(p3_soak.KINDS, 500))
    assert p3_soak.judged(found, 500, 1.0, memory=True).passed
    found.problems = ["page 3 is reserved by nobody"]
    assert not p3_soak.judged(found, 500, 1.0, memory=True).passed
    found.problems, found.counts["forks"] = [], 499
    assert not p3_soak.judged(found, 500, 1.0, memory=True).passed


def test_a_table_with_a_gap_or_a_wrong_answer_fails() -> None:
    def rows() -> list[dict[str, object]]:
        full: dict[str, object] = {
            "history": 512, "ttft_ms": 3.0, "itl_p50_ms": 1.0, "pages": {"g": {"free": 1}}, "bytes_by_tier": {"gpu": 0},
            "evictions": {}, "exact": True,
        }  # fmt: skip
        return [{"case": case, **full} for case in p3_cases.CASES]

    def fails(table: list[dict[str, object]]) -> list[object]:
        return [one["name"] for one in p3_cases.judged(table, [512]).failed]  # type: ignore[arg-type]

    assert fails(rows()) == []
    assert fails(rows()[1:]) == ["cases missing"]
    for field, value, name in (
        ("pages", {}, "fields left empty"),
        ("itl_p50_ms", 0.0, "cases without times"),
        ("exact", False, "answers not exact"),
    ):
        table = rows()
        table[2][field] = value
        assert fails(table) == [name]
