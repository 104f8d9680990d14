"""Draws against an independent float64 rewrite in NumPy, on made-up logits and on the oracle's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.runtime.errors import NotFiniteError, RuntimeRefusalError
from services.worker.runtime.philox import uniform
from services.worker.runtime.sampling import SamplerState, Sampling, draw, token_logprobs
from tests.worker_runtime.harness import Harness, Subject

Row = npt.NDArray[np.float64]


def kept_mass(logits: Row, tokens: Sequence[int], output_start: int, sampling: Sampling) -> Row:
    """Normalised probabilities after every rule, by sorting the whole vocabulary."""
    row = logits.copy()
    for token in set(tokens):
        factor = sampling.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(tokens[output_start:]):
        count = list(tokens[output_start:]).count(token)
        row[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        row[token] += bias
    p = np.exp((row - row.max()) / sampling.temperature)
    order = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0.0
    cumulative = np.cumsum(p[order]) / p.sum()
    p[order[int(np.searchsorted(cumulative, sampling.top_p)) + 1 :]] = 0.0
    p[p < sampling.min_p * p.max()] = 0.0
    return p / p.sum()


def agrees(p: Row, token: int, u: float, slack: float) -> bool:
    """Whether u lies in the token's interval of the cumulative distribution, give or take a float tie."""
    high = float(p[: token + 1].sum())
    return p[token] > 0 and high - p[token] - slack <= u <= high + slack


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(0, 40),
    min_p=st.floats(0.0, 0.5),
    repetition_penalty=st.floats(0.7, 1.5),
    presence_penalty=st.floats(-1.0, 1.0),
    frequency_penalty=st.floats(-1.0, 1.0),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 31), st.floats(-5, 5)), max_size=3, unique_by=lambda pair: pair[0]
    ).map(tuple),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=300, deadline=None)
@given(SAMPLINGS, st.integers(0, 2**32 - 1), st.lists(st.integers(0, 31), min_size=1, max_size=12), st.integers(0, 3))
def test_every_rule_against_numpy(sampling: Sampling, seed: int, tokens: list[int], choice: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 32).astype(np.float32)
    start = len(tokens) // 2
    state = SamplerState(sampling, tokens, start, choice, None)
    token = state.choose(torch.from_numpy(logits), len(tokens))
    p = kept_mass(logits.astype(np.float64), tokens, start, sampling)
    assert agrees(p, token, uniform(sampling.seed, len(tokens), choice), 1e-5)


def test_equal_logits_are_cut_by_lowest_id() -> None:
    logits = torch.zeros(50)
    for seed in range(200):
        sampling = Sampling(temperature=1.0, top_k=7, seed=seed)
        assert SamplerState(sampling, [], 0, 0, None).choose(logits, 3) < 7
        sampling = Sampling(temperature=1.0, top_p=0.1, seed=seed)
        assert SamplerState(sampling, [], 0, 0, None).choose(logits, 3) < 5
    biased = Sampling(logit_bias=((30, 1.0), (20, 1.0)))
    assert SamplerState(biased, [], 0, 0, None).choose(logits, 0) == 20, "greedy takes the lowest id of equals"


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), st.floats(0.0, 1.0, exclude_max=True))
def test_draw_never_picks_what_has_no_weight(weights: list[float], u: float) -> None:
    row = torch.tensor([*weights, 0.5, 0.0], dtype=torch.float64)
    token = draw(row, u)
    assert row[token] > 0
    total = float(row.sum())
    assert float(row[:token].sum()) <= u * total * (1 + 1e-12) + 1e-300
    assert draw(row, 1.0 - 2.0**-53) == int(torch.nonzero(row)[-1])


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    state = SamplerState(Sampling(temperature=1.0, seed=99), [], 0, 0, None)
    drawn = np.bincount([state.choose(logits, position) for position in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(drawn, logits.softmax(0).numpy(), atol=0.025)


class _Odd:
    """A grammar that allows odd ids only, and after an id divisible by three nothing below 10."""

    def __init__(self) -> None:
        self.last = -1
        self.seen: list[int] = []

    def advance(self, token: int) -> None:
        self.seen.append(token)
        self.last = token

    def allowed(self) -> torch.Tensor | None:
        ids = torch.arange(32)
        return (ids % 2 == 1) & (ids >= 10 if self.last % 3 == 0 else ids >= 0)


def test_mask_wins_over_bias_and_is_replayed() -> None:
    grammar = _Odd()
    state = SamplerState(Sampling(logit_bias=((2, 100.0),)), [5, 8, 9], 1, 0, grammar)
    assert grammar.seen == [8, 9]
    token = state.choose(torch.zeros(32), 3)
    assert token == 11


def test_nan_and_nothing_allowed_are_errors() -> None:
    sampling = Sampling(temperature=1.0)
    for logits in (torch.full((8,), float("nan")), torch.full((8,), float("-inf"))):
        with pytest.raises(NotFiniteError):
            SamplerState(sampling, [], 0, 0, None).choose(logits, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logit_bias": ((999, 1.0),)},
        {"logprobs": -1},
        {"seed": -1},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(RuntimeRefusalError, match=next(iter(wrong))):
        Sampling(**wrong).validate(32)


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    found = token_logprobs(logits, 3, 2)
    expected = logits.double().log_softmax(0).tolist()
    assert found.chosen == pytest.approx(expected[3])
    assert found.top == ((1, pytest.approx(expected[1])), (2, pytest.approx(expected[2])))
    assert token_logprobs(logits, 0, 0).top == ()


CASES = {
    "temperature": Sampling(temperature=1.0, seed=1),
    "top_p": Sampling(temperature=1.3, top_p=0.8, seed=2),
    "top_k": Sampling(temperature=1.5, top_k=20, seed=3),
    "min_p": Sampling(temperature=1.5, min_p=0.05, seed=4),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.3, seed=5),
    "presence": Sampling(temperature=0.8, presence_penalty=1.5, frequency_penalty=0.7, seed=6),
    "bias": Sampling(temperature=1.0, logit_bias=((100, 3.0), (200, -4.0)), logprobs=3, seed=2**64 - 1),
}


@pytest.mark.parametrize("name", CASES)
def test_runtime_draws_are_those_of_the_oracle(tiny: Subject, harness: Harness, name: str) -> None:
    """Teacher forced: each drawn token again from the oracle's logits; and a resumed attempt continues the same
    text."""
    sampling = CASES[name]
    prompt = tiny.prompt(90, seed=11)
    harness.loop.submit(harness.job("stranger", tiny.prompt(300, seed=12), 60))
    output = harness.run(harness.job("whole", prompt, 40, sampling, choice=2))
    logits = tiny.logits([*prompt, *output]).double().numpy()
    for index, token in enumerate(output):
        before = [*prompt, *output[:index]]
        p = kept_mass(logits[len(before) - 1], before, len(prompt), sampling)
        assert agrees(p, token, uniform(sampling.seed, len(before), 2), 1e-4), index
    resumed = harness.job("resumed", [*prompt, *output[:17]], 23, sampling, choice=2, output_start=len(prompt))
    assert harness.run(resumed) == output[17:]
    other = harness.run(harness.job("other choice", prompt, 40, sampling, choice=3))
    assert other != output
    harness.finish("stranger")


def test_replayed_penalties_matter(tiny: Subject, harness: Harness) -> None:
    """The resume above has teeth: counted as prompt, the same tokens draw another text."""
    sampling = Sampling(temperature=0.7, presence_penalty=2.0, frequency_penalty=2.0, seed=6)
    prompt = tiny.prompt(90, seed=13)
    output = harness.run(harness.job("whole", prompt, 60, sampling))
    forgot = harness.run(harness.job("forgot", [*prompt, *output[:30]], 30, sampling))
    assert forgot != output[30:]
