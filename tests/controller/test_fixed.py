"""What is fixed of a first token: learned by tier, from medians, without waits; and the lanes that decode beside it."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.controller import candidates
from libs.controller.candidates import variant
from libs.controller.discovery import Observed
from libs.controller.fixed import NOTHING, Beyond, FixedCosts, _Model, first_ms, part_of
from libs.controller.fleet import Fleet
from libs.controller.knobs import POLICY_KNOBS
from libs.controller.protocol import (
    AssignmentId,
    Candidate,
    DecodeCost,
    Load,
    OfferReply,
    Resident,
    Tier,
    Timings,
    Usage,
)
from libs.controller.router_effects import Accepted, Booked, Measured, Unbooked
from tests.controller.world import MODEL, a_request, fixed_ms, heartbeat, observe

F = MODEL.fingerprint
ONE = Candidate("w", 1, F, Tier.GPU, compute_tokens=40, prefill_ms_per_token=0.1, first_token_ms=5.0)
BUSY = replace(ONE, queue_ms=50.0)


def predicted(costs: FixedCosts, one: Candidate = ONE) -> Candidate:
    """With what is known now."""
    own = one.first_token_ms + costs.way_ms(F, one.worker)
    return replace(one, first_token_ms=first_ms(own, costs.of(F)[one.tier]))


def learn(costs: FixedCosts, one: Candidate, timings: Timings, way_ms: float = 0.0) -> None:
    """One attempt that was predicted with what is known now; its first token is measured without the way."""
    said = predicted(costs, one)
    beyond = costs.predicted(said, costs.way_ms(F, one.worker))
    costs.learn(said, replace(timings, first_token_ms=timings.first_token_ms + way_ms), way_ms, beyond)


def test_a_crowd_makes_no_way_longer_and_may_prove_it_shorter() -> None:
    costs = FixedCosts()
    for number in range(30):
        learn(costs, replace(ONE, worker="wv"[number % 2]), Timings(0.0, 0.0, 4.0, 5.0), 3.0 + number % 3)
    before = costs.way_ms(F, "w")
    for number in range(30):
        learn(costs, replace(BUSY, worker="w"), Timings(50.0, 0.0, 4.0, 5.0), 200.0 + number)
    assert costs.way_ms(F, "w") == before < 6
    for number in range(15):
        learn(costs, replace(ONE, worker="w"), Timings(0.0, 0.0, 4.0, 5.0), 100.0 + number)
    assert costs.way_ms(F, "w") > 50, "an idle worker that is far is far"
    for _ in range(30):
        learn(costs, replace(BUSY, worker="w"), Timings(50.0, 0.0, 4.0, 5.0), 3.0)
    assert costs.way_ms(F, "w") < 6


def test_half_of_the_predictions_are_soon_too_high_and_half_too_low() -> None:
    draw, costs, ratios = random.Random(1), FixedCosts(), list[float]()
    for _ in range(300):
        late = 500.0 if draw.random() < 0.1 else 0.0  # a scheduler that had others to run
        queue, way = 2.0 * draw.uniform(0.5, 1.5), 3.0 * draw.uniform(0.5, 1.5) + late
        first = 5.0 + 6.0 * draw.uniform(0.5, 1.5)
        ratios.append((4.0 + predicted(costs).first_token_ms) / (queue + 4.0 + first + way))
        learn(costs, ONE, Timings(queue, 0.0, 4.0, first), way)
    assert median(ratios[20:]) == pytest.approx(1.0, abs=0.06)
    assert costs.way_ms(F, "w") == pytest.approx(3.0, rel=0.25)
    assert costs.of(F)[Tier.GPU] == pytest.approx(8.0, rel=0.25)
    assert costs.of(F)[Tier.NONE] == pytest.approx(8.0, rel=0.25), (
        "a tier without measurements is taken for a usual one"
    )
    assert costs.of("another") == NOTHING and costs.way_ms("another", "w") == 0.0


def test_a_wait_that_was_predicted_is_no_part_of_it() -> None:
    costs = FixedCosts()
    for _ in range(40):
        learn(costs, BUSY, Timings(900.0, 0.0, 4.0, 11.0))
    assert costs.of(F)[Tier.GPU] == pytest.approx(6.0)


def test_a_few_attempts_are_enough_and_one_is_not() -> None:
    costs = FixedCosts()
    for count in range(8):
        assert (costs.of(F)[Tier.GPU] > 0) == (count >= POLICY_KNOBS.fixed_prior)
        costs.learn(ONE, Timings(0.0, 0.0, 4.0, 25.0), 0.0, Beyond())
    assert costs.of(F)[Tier.GPU] == pytest.approx(20.0)


def test_it_is_bounded_and_frozen_in_overload() -> None:
    costs = FixedCosts()
    for _ in range(40):
        costs.learn(replace(BUSY, tier=Tier.NONE, queue_ms=6_000.0), Timings(0.0, 0.0, 4.0, 25.0), 0.0, Beyond())
    assert costs.of(F) == NOTHING
    for first in (5.0, 400.0):
        for _ in range(40):
            slow = replace(BUSY, first_token_ms=first)
            costs.learn(slow, Timings(0.0, 0.0, 4.0, 9_000.0), 0.0, Beyond())
        assert costs.of(F)[Tier.GPU] == max(POLICY_KNOBS.fixed_bound_ms, first), "a slow device is slow in all"


def test_a_negative_one_leaves_something_of_a_first_token() -> None:
    costs = FixedCosts()
    for _ in range(40):
        costs.learn(replace(BUSY, compute_tokens=400), Timings(0.0, 0.0, 0.1, 5.1), 0.0, Beyond())
    assert costs.of(F)[Tier.GPU] == pytest.approx(5.2 - 45.0)
    assert predicted(costs).first_token_ms == 0.5
    for own, fixed in ((5.0, 3.0), (5.0, -4.0), (5.0, -33.8)):
        assert first_ms(own, fixed) - part_of(first_ms(own, fixed), fixed) == pytest.approx(own)


def test_a_restore_is_never_cheaper_than_what_is_resident() -> None:
    costs, read = FixedCosts(), replace(BUSY, tier=Tier.RAM, load_ms=2.0)
    for _ in range(40):
        learn(costs, BUSY, Timings(0.0, 0.0, 4.0, 25.0))
    found = costs.of(F)
    assert found[Tier.RAM] == found[Tier.SSD] == found[Tier.GPU] == pytest.approx(20.0), "of those nothing is known"
    for _ in range(40):
        learn(costs, read, Timings(0.0, 0.0, 4.0, 9.0))  # it proved resident
    found = costs.of(F)
    assert found[Tier.RAM] == found[Tier.GPU] == pytest.approx(4.0)
    for _ in range(40):
        learn(costs, read, Timings(0.0, 12.0, 4.0, 9.0))
    assert costs.of(F)[Tier.RAM] == pytest.approx(14.0) and costs.of(F)[Tier.GPU] == pytest.approx(4.0)
    for _ in range(40):
        learn(costs, read, Timings(0.0, 0.1, 4.0, 5.0))
    assert costs.of(F)[Tier.RAM] == costs.of(F)[Tier.GPU]


def test_a_way_is_the_workers_own_as_far_as_it_clearly_differs() -> None:
    draw, costs = random.Random(2), FixedCosts()
    for one in (41.0, 26.0, 3.0, 101.0):  # a process that was cold
        learn(costs, replace(ONE, worker="v"), Timings(0.0, 0.0, 4.0, 5.0), one)
    for number in range(60):
        learn(costs, ONE, Timings(0.0, 0.0, 4.0, 5.0), 4.0 * draw.uniform(0.7, 1.3))
        learn(costs, replace(ONE, worker="near"), Timings(0.0, 0.0, 4.0, 5.0), 4.0 * draw.uniform(0.7, 1.3))
        if number % 2:
            learn(costs, replace(ONE, worker="far"), Timings(0.0, 0.0, 4.0, 5.0), 40.0 * draw.uniform(0.7, 1.3))
    assert costs.way_ms(F, "v") == costs.way_ms(F, "unknown") < 8, "not measured again, it is taken for one of them"
    assert costs.way_ms(F, "far") == pytest.approx(40.0, rel=0.2)
    costs.forget("far")
    assert costs.way_ms(F, "far") < 8


def test_a_plan_counts_it_to_the_first_token_of_its_tier() -> None:
    request = a_request(600)
    entry = variant(MODEL, request)
    held = tuple(Resident(link.hash, link.end, Tier.GPU, F) for link in entry.chain.chunks)
    fleet = observe(Fleet(), heartbeat("w", resident=held))
    before = {o.candidate.tier: o.candidate for o in candidates.plan(request, (entry,), fleet, 0.0).ranked}
    fixed_ms(fleet, {Tier.GPU: 7.0})
    after = {o.candidate.tier: o.candidate for o in candidates.plan(request, (entry,), fleet, 0.0).ranked}
    assert after[Tier.GPU].first_token_ms == before[Tier.GPU].first_token_ms + 7.0
    assert after[Tier.GPU].ttft_ms == pytest.approx(before[Tier.GPU].ttft_ms + 7.0)
    assert after[Tier.NONE] == before[Tier.NONE]


def test_what_was_predicted_with_it_teaches_no_more_of_it() -> None:
    fleet = observe(Fleet(), heartbeat("w", decode=(DecodeCost(8, 5.0),)))
    for number in range(60):
        assignment = AssignmentId(f"r{number}", 1)
        one = replace(ONE, first_token_ms=first_ms(5.0, fleet.fixed.of(F)[Tier.GPU]))
        fleet.account(Booked(assignment, one), float(number))
        fleet.account(Measured(one, Usage(), Timings(0.0, 0.0, 4.0, 17.0), 0.0, assignment), float(number))
        fleet.account(Unbooked(assignment), float(number))
    assert fleet.fixed.of(F)[Tier.GPU] == pytest.approx(12.0, rel=0.02)


def lanes(fleet: Fleet) -> int:
    view = fleet.view("w")
    assert view is not None
    return view.lanes


def test_own_assignments_are_lanes_from_offer_to_end_and_those_of_others_as_heartbeats_say() -> None:
    first, second = AssignmentId("r", 1), AssignmentId("s", 1)
    fleet = observe(Fleet(), heartbeat("w", load=Load(0.0, active=2)))
    assert lanes(fleet) == 2
    fleet.account(Booked(first, ONE), 1.0)
    assert lanes(fleet) == 3
    fleet.replied("w", OfferReply(first, 1, True, load=Load(0.0, active=3)), 2.0)
    fleet.account(Accepted(first), 2.0)
    assert lanes(fleet) == 3, "the reply counts the assignment itself"
    fleet.account(Booked(second, ONE), 3.0)
    fleet.account(Unbooked(second), 4.0)
    fleet.observe(Observed(heartbeat("w", sequence=2, load=Load(0.0, active=3)), False, True), 30.0)
    assert lanes(fleet) == 3
    fleet.observe(Observed(heartbeat("w", sequence=3, load=Load(0.0, active=1)), False, True), 60.0)
    assert lanes(fleet) == 1, "the others have ended"
    fleet.account(Unbooked(first), 70.0)
    fleet.account(Unbooked(first), 70.0)
    assert lanes(fleet) == 0
    fleet.account(Booked(first, ONE), 80.0)
    fleet.observe(Observed(heartbeat("w", epoch=2), True, True), 90.0)
    assert lanes(fleet) == 0, "another process"
    fleet.account(Unbooked(first), 91.0)


def test_beside_lanes_a_request_waits_for_half_a_step_and_shares_the_next() -> None:
    fleet = observe(Fleet(), heartbeat("w", decode=(DecodeCost(1, 10.0), DecodeCost(8, 24.0))))
    request = a_request(200)
    entry = variant(MODEL, request)
    found = [candidates.plan(request, (entry,), fleet, 0.0).ranked[0].candidate]
    fleet.account(Booked(AssignmentId("o", 1), replace(ONE, compute_tokens=0)), 0.0)
    found.append(candidates.plan(request, (entry,), fleet, 500.0).ranked[0].candidate)
    assert [one.queue_ms for one in found] == [0.0, 5.0] and [one.first_token_ms for one in found] == [10.0, 24.0]
    # A prompt of one iteration is not stretched: the lanes' step in it is the first token's.
    assert [one.prefill_ms_per_token for one in found] == [1.0, pytest.approx(1.0 + 15 * 10.0 / 8_192)]
    fleet.account(Unbooked(AssignmentId("o", 1)), 501.0)
    assert candidates.plan(request, (entry,), fleet, 502.0).ranked[0].candidate == found[0]


ATTEMPTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from([Tier.GPU, Tier.RAM, Tier.NONE, Tier.INFLIGHT]),
        st.floats(0.0, 40.0),
        st.floats(0.5, 90.0),
        st.sampled_from([0.0, 2.0]),
        st.booleans(),
    ),
    max_size=40,
)


def as_from_scratch(attempts: list[tuple[str, Tier, float, float, float, bool]]) -> None:
    """What is kept of medians is what they would be if nothing were kept."""
    costs = FixedCosts()
    for worker, tier, queue, first, restore, forget in attempts:
        learn(costs, replace(ONE, worker=worker, tier=tier), Timings(queue, restore, 4.0, first), queue / 3)
        if forget and queue < 5:
            costs.forget(worker)
        fresh = copy.deepcopy(costs)
        model = fresh._models[F]
        model.medians.clear()
        model.levels.clear()
        usual = fresh._median(model.every, 0.0)
        wanted = [fresh._median(model.tiers.get(one, ()), usual) for one in Tier]
        found = [costs._models[F].medians.get(one, (usual, usual)) for one in Tier]
        assert [own if of == usual else None for of, own in found] == wanted
        assert [costs.way_ms(F, one) for one in "abc"] == [fresh.way_ms(F, one) for one in "abc"]


@settings(deadline=None)
@given(ATTEMPTS)
def test_what_is_kept_of_medians_is_what_they_are(
    attempts: list[tuple[str, Tier, float, float, float, bool]],
) -> None:
    as_from_scratch(attempts)


@pytest.mark.parametrize("kept", ["levels", "medians"])
def test_planted_medians_that_are_kept_for_ever_are_caught(kept: str) -> None:
    class Kept(dict[object, object]):
        def pop(self, *args: object) -> None:
            """Nothing is ever dropped."""

    made = _Model()
    setattr(made, kept, Kept())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr("libs.controller.fixed._Model", lambda: made)
        usual = [("b", Tier.NONE, 0.3, 9.0, 0.0, False), *[("a", Tier.NONE, 0.3, 9.0, 0.0, False)] * 20]
        as_from_scratch([*usual, *[("b", Tier.GPU, 39.0, 90.0, 0.0, False)] * 9])
