"""Replay: whatever was ranked and recorded comes out the same, and a policy that was changed does not go unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.decisions import replay as subject
from cli.decisions.records import moment_of, reason_of
from cli.decisions.replay import Kind, NotReplayableError, replay
from libs.contracts.segue.v1 import catalog_pb2 as pb
from libs.contracts.segue.v1 import common_pb2
from libs.controller import policy
from libs.controller.knobs import PolicyKnobs
from libs.controller.protocol import Candidate, RankedCandidate, Tier
from tests.decisions.worlds import crowded, of_many, of_world, recorded


def stored(record: pb.DecisionRecord) -> pb.DecisionRecord:
    """As it comes back from the sealed object: over JSON."""
    text = json.dumps(MessageToDict(record, preserving_proto_field_name=True))
    return ParseDict(json.loads(text), pb.DecisionRecord())


@given(seed=st.integers(0, 100_000), avoid=st.booleans())
def test_what_was_ranked_is_ranked_the_same(seed: int, avoid: bool) -> None:
    record = of_world(seed, avoid)
    if record is not None:
        outcome = replay(stored(record))
        assert outcome.same, outcome.differences
        assert outcome.order == tuple(range(len(record.ranked)))


@settings(max_examples=40)
@given(seed=st.integers(0, 1_000))
def test_a_ranking_that_was_cut_off_is_ranked_the_same(seed: int) -> None:
    for record in (crowded(seed), of_many(seed)):
        outcome = replay(stored(record))
        assert len(record.ranked) > 10 and outcome.same, outcome.differences


def near(*ttfts: float, name: str = "r") -> pb.DecisionRecord:
    options = [
        RankedCandidate(Candidate(f"w{i}", 1, "ab" * 32, Tier.NONE, first_token_ms=ttft, ttft_ms=ttft))
        for i, ttft in enumerate(ttfts)
    ]
    return recorded(policy.rank(name, options, ()), name)


def test_a_part_of_a_ranking_is_no_ranking_of_its_own() -> None:
    """Without its best the band of near ties reaches farther: a router that leaves some out ranks the rest anew."""
    options = [
        RankedCandidate(Candidate(f"w{i}", 1, "ab" * 32, tier, first_token_ms=ttft, ttft_ms=ttft))
        for i, (tier, ttft) in enumerate([(Tier.RAM, 10.0), (Tier.GPU, 11.5), (Tier.GPU, 13.0)])
    ]
    left_over, anew = 0, 0
    for name in (f"r{i}" for i in range(32)):
        part = tuple(one for one in policy.rank(name, options, ()) if one.candidate.tier is Tier.GPU)
        left_over += not replay(recorded(part, name)).same
        anew += not replay(recorded(policy.rank(name, part, ()), name)).same
    assert left_over and not anew


def test_full_precision_is_needed() -> None:
    """Two candidates on the two sides of the band's edge, closer than 32 bits can tell."""
    best = 300.0
    edge = best * (1 + PolicyKnobs().near_tie_ratio)
    names = [f"r{i}" for i in range(32)]
    records = [near(best, edge, edge * (1 + 1e-12), name=name) for name in names]
    assert all(replay(record).same for record in records)
    differ = 0
    for record in records:
        for terms, candidate in zip(record.terms, record.ranked, strict=True):
            terms.first_token_ms = terms.ttft_ms = candidate.ttft_ms  # as a record of 32 bits would have it
        differ += not replay(record).same
    assert differ


def planted(kind: str) -> tuple[str, Callable[..., object]]:
    """A change in the policy, by name."""
    rank, formula = policy.rank, policy.ttft_ms

    Options, Names = Sequence[RankedCandidate], Sequence[str]

    def wider(name: str, options: Options, avoid: Names, _: PolicyKnobs, draw: policy.Draw) -> object:
        return rank(name, options, avoid, PolicyKnobs(near_tie_ratio=0.5, near_tie_ms=50.0), draw)

    def narrower(name: str, options: Options, avoid: Names, _: PolicyKnobs, draw: policy.Draw) -> object:
        return rank(name, options, avoid, PolicyKnobs(near_tie_ratio=0.0, near_tie_ms=0.0), draw)

    def forgiving(name: str, options: Options, avoid: Names, knobs: PolicyKnobs, draw: policy.Draw) -> object:
        return rank(name, options, (), knobs, draw)

    def undealt(name: str, options: Options, avoid: Names, knobs: PolicyKnobs, draw: policy.Draw) -> object:
        return rank(name, options, avoid, knobs)

    def summed(candidate: Candidate) -> float:
        return formula(candidate) + min(candidate.queue_ms, candidate.load_ms)

    return {
        "wider": ("rank", wider),
        "narrower": ("rank", narrower),
        "forgiving": ("rank", forgiving),
        "undealt": ("rank", undealt),
        "summed": ("ttft_ms", summed),
    }[kind]


@pytest.mark.parametrize("kind", ["wider", "narrower", "forgiving", "undealt", "summed"])
def test_a_planted_change_of_the_policy_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record for seed in range(60) for avoid in (False, True) if (record := of_world(seed, avoid))]
    records += [crowded(seed) for seed in range(5)]
    records += [crowded(seed, draw=policy.Draw("cd", seed, 20.0)) for seed in range(5)]
    assert all(replay(record).same for record in records)
    monkeypatch.setattr(subject, *planted(kind))
    different = [outcome for record in records if not (outcome := replay(record)).same]
    assert different, kind
    kinds = {one.kind for outcome in different for one in outcome.differences}
    assert Kind.SCORE in kinds if kind == "summed" else Kind.SCORE not in kinds
    assert Kind.CHOICE in kinds
    for outcome in different:
        assert all("then" in one.detail for one in outcome.differences if one.kind is Kind.SCORE)


def test_the_difference_names_both_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    record = next(
        record for record in (near(10.0, 11.5, name=f"r{i}") for i in range(64)) if record.ranked[0].worker == "w1"
    )
    monkeypatch.setattr(subject, *planted("narrower"))
    (difference,) = replay(record).differences
    assert difference.kind is Kind.CHOICE
    assert difference.detail == "chose w1 by none (11.500 ms), would choose w0 by none (10.000 ms)"


def test_a_record_without_what_is_needed_is_said_to_be_so() -> None:
    record = near(10.0, 20.0)
    for change in ("terms", "ranked", "attempts"):
        partial = pb.DecisionRecord()
        partial.CopyFrom(record)
        partial.ClearField(change)  # type: ignore[arg-type]
        with pytest.raises(NotReplayableError):
            replay(partial)


def test_words_for_reasons_and_times() -> None:
    assert reason_of("worker-lost") == (pb.ATTEMPT_OUTCOME_WORKER_LOST, 0)
    assert reason_of("QUEUE_FULL") == (0, common_pb2.DECLINE_REASON_QUEUE_FULL)
    assert reason_of("") == (0, 0)
    with pytest.raises(ValueError, match="one of completed, declined"):
        reason_of("nonsense")
    assert moment_of("", 10**12) == 0
    assert moment_of("90s", 10**12) == 10**12 - 90_000 and moment_of("1.5h", 10**12) == 10**12 - 5_400_000
    assert moment_of("2026-01-31T12:00:00+00:00", 0) == 1_769_860_800_000
    with pytest.raises(ValueError, match="yesterday"):
        moment_of("yesterday", 0)


def test_an_unknown_tier_or_outcome_of_a_later_version_is_shown_not_refused() -> None:
    from cli.decisions.records import plain

    record = near(10.0, 20.0)
    record.ranked[0].tier = 99  # type: ignore[assignment]
    record.attempts[0].outcome = 99  # type: ignore[assignment]
    shown = plain(record)
    assert shown["ranked"][0]["tier"] == "unknown" and shown["attempts"][0]["outcome"] == "unknown"
