"""What is learned of workers: persistent errors, differences that the measurements show, and none that they do not."""

from __future__ import annotations

import random
from statistics import pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.controller import smoothing
from libs.controller.corrections import Corrections, Said, believed
from libs.controller.knobs import POLICY_KNOBS
from libs.controller.protocol import Candidate, Tier, Timings

TRUE_MS = 0.15  # a prompt token
FIRST_MS = 12.0


def learned(
    seed: int, speeds: dict[str, float], says: dict[str, float], prompts: int = 150, noise: float = 0.2
) -> dict[str, float]:
    """Ms a prompt token believed of each worker after its prompts. `speeds`: over the usual; `says`: over the truth."""
    draw, corrections = random.Random(seed), Corrections()
    for _ in range(prompts):
        for worker, speed in speeds.items():
            tokens, ratio = draw.randint(200, 12_000), corrections.of(worker)
            said = TRUE_MS * speed * says[worker]
            candidate = Candidate(
                worker, 1, "f", Tier.NONE, compute_tokens=tokens, prefill_ms_per_token=said * ratio.prefill,
                first_token_ms=FIRST_MS * ratio.first,
            )  # fmt: skip
            measured = tokens * TRUE_MS * speed * draw.uniform(1 - noise, 1 + noise)
            first = FIRST_MS * draw.choice([1.0, 1.0, 4.0])
            corrections.learn(candidate, Timings(0.0, 0.0, measured, first), Said(said, FIRST_MS))
    return {name: TRUE_MS * speed * says[name] * corrections.of(name).prefill for name, speed in speeds.items()}


WORKERS = [f"w{number}" for number in range(8)]
EQUAL = dict.fromkeys(WORKERS, 1.0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9))
def test_equal_workers_are_believed_equal_whatever_they_say(seed: int) -> None:
    draw = random.Random(seed)
    for says in (EQUAL, {name: draw.uniform(0.72, 1.3) for name in WORKERS}):
        costs = learned(seed, EQUAL, says)
        assert pstdev(costs.values()) < 0.008 * TRUE_MS
        assert sum(costs.values()) / len(costs) == pytest.approx(TRUE_MS, rel=0.03)


def test_without_doubt_equal_workers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.controller.corrections.believed", lambda level, usual, doubt: level)
    with pytest.raises(AssertionError):
        test_equal_workers_are_believed_equal_whatever_they_say()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0.8, 1.25, 2.0]))
def test_a_worker_that_is_another_stays_another(seed: int, speed: float) -> None:
    draw = random.Random(seed)
    says = {name: draw.uniform(0.8, 1.25) for name in WORKERS}
    costs = learned(seed, {**EQUAL, "w3": speed}, says)
    assert costs.pop("w3") == pytest.approx(TRUE_MS * speed, rel=0.08)
    assert pstdev(costs.values()) < 0.008 * TRUE_MS


def test_of_two_kinds_each_keeps_its_own() -> None:
    speeds = {name: 1.0 if number % 2 else 2.0 for number, name in enumerate(WORKERS)}
    costs = learned(1, speeds, EQUAL)
    assert all(costs[name] == pytest.approx(TRUE_MS * speed, rel=0.08) for name, speed in speeds.items())


def test_a_worker_that_is_alone_is_like_itself() -> None:
    assert learned(2, {"w0": 1.0}, {"w0": 0.75})["w0"] == pytest.approx(TRUE_MS, rel=0.03)


@settings(deadline=None)
@given(st.floats(0.1, 9), st.floats(0.1, 9), st.floats(0, 5))
def test_what_is_believed_lies_between_the_usual_and_the_measured(level: float, usual: float, doubt: float) -> None:
    found = believed(level, usual, doubt)
    assert min(level, usual) <= found + 1e-9 and found <= max(level, usual) + 1e-9
    if abs(level - usual) <= doubt:
        assert found == usual
    assert believed(level, usual, 0.0) == pytest.approx(level)


def test_a_worker_that_says_its_work_takes_no_time_is_no_trouble() -> None:
    corrections = Corrections()
    one = Candidate("a", 1, "f", Tier.NONE, compute_tokens=500, prefill_ms_per_token=0.0, first_token_ms=0.0)
    corrections.learn(one, Timings(0.0, 0.0, 600.0, 5.0), Said(0.0, 0.0))
    assert corrections.of("a").prefill == 1.0


def test_who_is_gone_or_changes_its_model_is_no_measure_for_others() -> None:
    corrections = Corrections()
    for worker, model in (("a", "f"), ("b", "f"), ("a", "g"), ("b", "g")):
        one = Candidate(worker, 1, model, Tier.NONE, compute_tokens=500, prefill_ms_per_token=1.0)
        corrections.learn(one, Timings(0.0, 0.0, 600.0, 0.0), Said(1.0, 10.0))
    assert set(corrections._levels) == {"g"}
    assert all(len(levels) == 2 for levels in corrections._levels["g"])
    corrections.forget("a")
    corrections.forget("b")
    corrections.forget("c")
    assert not corrections._levels and corrections.of("a").prefill == 1.0
    assert corrections.changed == {"a", "b", "c"}
    assert POLICY_KNOBS.correction_doubt > 0


def test_a_worker_that_says_that_it_became_slower_is_believed_unless_it_always_varies() -> None:
    for noise, says, wanted in ((0.0, 1.5, 1.5), (0.03, 1.5, 1.5), (0.03, 1.06, 1.0), (0.0, 1.06, 1.06)):
        corrections = Corrections()
        for _ in range(300):
            ratio = corrections.of("w")
            one = Candidate("w", 1, "f", Tier.NONE, compute_tokens=1_000, prefill_ms_per_token=2.0 * ratio.prefill)
            corrections.learn(one, Timings(0.0, 0.0, 2_400.0, 0.0), Said(2.0, 10.0, 0.0, noise, noise))
        assert corrections.of("w").prefill == pytest.approx(1.2, rel=0.01)
        corrections.reported("w", Said(2.0 * says, 10.0, 0.0, noise, noise))
        assert 2.0 * says * corrections.of("w").prefill == pytest.approx(2.4 * wanted, rel=0.03)
    corrections.reported("nobody", Said(1.0, 1.0))
    assert corrections.of("nobody").prefill == 1.0


def test_noise_is_how_far_reports_scatter() -> None:
    draw, noise = random.Random(3), smoothing.QUIET
    for _ in range(400):
        noise = smoothing.noise(noise, 1.0, draw.uniform(0.7, 1.3), 0.05)
    assert noise.variance == pytest.approx(0.03, rel=0.4)
    assert noise.smoothed == pytest.approx(0.173 * (0.05 / 1.95) ** 0.5, rel=0.3)
    assert smoothing.noise(noise, 0.0, 1.0, 0.05) == noise


def test_restores_of_equal_workers_are_believed_equal_whatever_they_say() -> None:
    draw, corrections = random.Random(4), Corrections()
    says = {name: draw.uniform(0.72, 1.3) for name in WORKERS}
    for _ in range(150):
        for worker, off in says.items():
            true_ms, ratio = draw.uniform(20, 400), corrections.of(worker)
            one = Candidate(worker, 1, "f", Tier.SSD, load_ms=true_ms * off * ratio.restore)
            measured = true_ms * draw.uniform(0.8, 1.2)
            corrections.learn(one, Timings(0.0, measured, 0.0, 0.0), Said(1.0, 10.0, byte_ms=1e-6 * off))
    believed_of = [off * corrections.of(worker).restore for worker, off in says.items()]
    assert pstdev(believed_of) < 0.008 and sum(believed_of) / len(believed_of) == pytest.approx(1.0, rel=0.03)
