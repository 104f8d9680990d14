"""Requests that are held: for a worker's answer, and for a prefix that others compute."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from libs.controller import candidates, policy
from libs.controller import router_effects as fx
from libs.controller import router_events as rx
from libs.controller.fences import RouterFence
from libs.controller.fleet import Fleet
from libs.controller.knobs import PolicyKnobs, RouterKnobs
from libs.controller.prefix_holds import news
from libs.controller.protocol import (
    AssignmentId,
    DeclineReason,
    ErrorDelivery,
    GenerationRequest,
    Gone,
    OfferReply,
    RankedCandidate,
    Resident,
    StatusCode,
    Tier,
    TierCost,
)
from libs.controller.router_table import Phase
from tests.controller.cluster import request
from tests.controller.test_router import Driver, at
from tests.controller.world import MODEL, SALT, heartbeat, observe

HOLD = rx.Hold("ab", 2_048, (("a", 1), ("b", 1)), 500.0, 2_000.0)


def submitted(d: Driver, *names: str) -> None:
    for name in names:
        d.submit(request(name), origin=len(d.log))


def planned(d: Driver, name: str, *workers: str, hold: rx.Hold | None = None, leads: bool = False) -> None:
    wanted = next(p for p in reversed(d.all(fx.PlanRequested)) if p.request_id == name)
    ranked = tuple(RankedCandidate(at(worker)) for worker in workers)
    d.feed(rx.Planned(name, wanted.plan_id, rx.Plan(ranked, hold=hold, leads=leads)))


def offers(d: Driver) -> list[str]:
    return [effect.offer.request.request_id for effect in d.all(fx.SendOffer)]


def answered(d: Driver, name: str, accepted: bool = True, reason: DeclineReason = DeclineReason.UNSPECIFIED) -> None:
    sent = next(e for e in reversed(d.all(fx.SendOffer)) if e.offer.request.request_id == name)
    d.feed(rx.ReplyReceived(sent.worker, OfferReply(sent.offer.assignment, 1, accepted, reason)))


# --- windows ---


def test_beyond_the_bound_requests_are_held_until_the_worker_answers_and_then_planned_anew() -> None:
    d = Driver(RouterKnobs(offers_unanswered=2))
    submitted(d, "r1", "r2", "r3", "r4")
    for name in ("r1", "r2", "r3", "r4"):
        planned(d, name, "a", "b")
    assert offers(d) == ["r1", "r2"] and d.machine.held == 2
    assert d.machine.phase("r3") is d.machine.phase("r4") is Phase.HELD
    answered(d, "r1")
    assert d.last(fx.PlanRequested).request_id == "r3" and d.machine.phase("r3") is Phase.PLANNING
    planned(d, "r3", "b", "a")  # by now the other worker is the better one: the window goes to the next
    assert d.last(fx.SendOffer).worker == "b" and d.last(fx.PlanRequested).request_id == "r4"
    planned(d, "r4", "a")
    assert offers(d) == ["r1", "r2", "r3", "r4"] and d.machine.held == 0


@pytest.mark.parametrize("how", ["declined", "timed out", "dropped", "lost", "cancelled", "told"])
def test_however_an_offer_ends_its_window_opens(how: str) -> None:
    d = Driver(RouterKnobs(offers_unanswered=1))
    submitted(d, "r1", "r2")
    planned(d, "r1", "a")
    planned(d, "r2", "a")
    offer = d.offer
    assert d.machine.phase("r2") is Phase.HELD
    match how:
        case "declined":
            answered(d, "r1", False, DeclineReason.QUEUE_LONGER)
        case "timed out":
            d.feed(rx.OfferTimedOut(offer.assignment))
        case "dropped":
            d.feed(rx.RouteDropped(offer.assignment, "a", 1, "gone"))
        case "lost":
            d.lose()
        case "cancelled":
            d.feed(rx.RequestCancelled("r1"))
        case _:
            d.delta(7)
    assert d.machine.phase("r2") is Phase.PLANNING


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_who_ends_while_held_leaves_the_window_to_the_next(how: str) -> None:
    d = Driver(RouterKnobs(offers_unanswered=1))
    submitted(d, "r1", "r2", "r3")
    for name in ("r1", "r2", "r3"):
        planned(d, name, "a")
    origin = d.machine._requests["r2"].origin
    d.feed(rx.RequestCancelled("r2") if how == "cancelled" else rx.DeadlineReached("r2", origin))
    assert d.machine.phase("r2") is Phase.DONE and d.machine.held == 1
    answered(d, "r1")
    assert d.machine.phase("r3") is Phase.PLANNING
    # Also if it is being planned for its window.
    d.feed(rx.RequestCancelled("r3"))
    assert d.machine.held == 0 and len(d.machine._windows._kept) == 0


def test_offers_that_nobody_answers_spend_no_attempt_and_are_bounded_by_the_deadline() -> None:
    d = Driver()
    submitted(d, "r")
    for _ in range(20):
        planned(d, "r", "a", "b")
        for _ in ("a", "b"):
            d.feed(rx.OfferTimedOut(d.offer.assignment))
        assert d.machine.phase("r") is Phase.WAITING
        d.feed(rx.CapacityFreed(1))
        assert d.last(fx.PlanRequested).avoid == ("a", "b")
    origin = d.machine._requests["r"].origin
    d.feed(rx.DeadlineReached("r", origin))
    end = d.terminal
    assert isinstance(end, ErrorDelivery) and end.code is StatusCode.DEADLINE_EXCEEDED
    assert len({cancel.cancel.assignment for cancel in d.all(fx.SendCancel)}) == 40  # each told once
    # Every late acceptance is withdrawn.
    for number in range(1, 41):
        reply = OfferReply(AssignmentId("r", number), 1, True)
        assert [type(one) for one in d.feed(rx.ReplyReceived("a", reply))] == [fx.SendCancel]


# --- prefixes ---


def test_a_request_is_held_until_news_of_the_prefix_and_planned_with_its_seat() -> None:
    d = Driver()
    submitted(d, "r1", "r2")
    planned(d, "r1", "c", hold=HOLD)
    planned(d, "r2", "c", hold=HOLD)
    timers = [one for one in d.all(fx.SetTimer) if one.timer.kind is fx.TimerKind.HOLD]
    assert [one.after_ms for one in timers] == [500.0, 500.0] and d.machine.held == 2
    assert set(d.machine.awaited) == {"ab"} and not d.all(fx.SendOffer)
    assert d.feed(rx.PrefixesReported("stranger", 1, ("ab",))) == []
    assert d.feed(rx.PrefixesReported("a", 1, ("cd",))) == []
    d.now = 300.0
    d.feed(rx.PrefixesReported("a", 1, ("ab",)))
    again = d.all(fx.PlanRequested)[-2:]
    assert [one.herd for one in again] == [rx.Herd("ab", 2_048, 2, 1_700.0), rx.Herd("ab", 2_048, 3, 1_700.0)]
    assert not d.machine.awaited and d.machine.held == 0
    planned(d, "r1", "c")
    d.reply()
    d.result(0)
    assert d.last(fx.RecordDecision).decision.held_ms == 300.0


@pytest.mark.parametrize("how", ["expired", "lost", "other lost", "retired"])
def test_a_held_request_is_released_by_its_timer_and_by_the_loss_of_any_leader(how: str) -> None:
    d = Driver()
    submitted(d, "r")
    planned(d, "r", "c", hold=HOLD)
    plan_id = d.last(fx.PlanRequested).plan_id
    match how:
        case "expired":
            d.now = 500.0
            d.feed(rx.HoldExpired("r", plan_id))
        case "lost":
            d.feed(rx.WorkerUnavailable("a", 1, rx.Loss.PROCESS))
        case "other lost":
            d.feed(rx.WorkerUnavailable("b", 1, rx.Loss.SILENCE))
        case _:
            d.feed(rx.WorkerUnavailable("b", 1, rx.Loss.RETIRED))
    assert d.machine.phase("r") is Phase.PLANNING and not d.machine.awaited
    # A timer that fires all the same changes nothing.
    assert d.feed(rx.HoldExpired("r", plan_id)) == []
    assert d.machine.fence.counts["HoldExpired", RouterFence.STALE_PLAN] == 1


@pytest.mark.parametrize("how", ["cancelled", "declined", "failed", "timed out", "dropped"])
def test_when_the_leading_request_ends_early_those_held_for_it_look_again(how: str) -> None:
    d = Driver()
    submitted(d, "leader", "r")
    planned(d, "leader", "a", leads=True)
    planned(d, "r", "c", hold=HOLD)
    offer = d.offer
    match how:
        case "cancelled":
            d.feed(rx.RequestCancelled("leader"))
        case "declined":
            answered(d, "leader", False, DeclineReason.QUEUE_LONGER)
        case "failed":
            d.reply()
            d.lose()
        case "timed out":
            d.feed(rx.OfferTimedOut(offer.assignment))
        case _:
            d.feed(rx.RouteDropped(offer.assignment, "a", 1, ""))
    assert d.machine.phase("r") is Phase.PLANNING
    # The account of the leader's end comes first: whoever plans must not count on it any more.
    kinds = [type(one) for one in d.log if isinstance(one, fx.Unbooked | fx.PlanRequested)]
    if how != "failed":
        assert kinds.index(fx.Unbooked) < len(kinds) - 1
    assert d.last(fx.PlanRequested).herd is not None


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_request_that_ends_while_it_is_held_for_a_prefix_is_forgotten(how: str) -> None:
    d = Driver()
    submitted(d, "r")
    planned(d, "r", "c", hold=HOLD)
    origin = d.machine._requests["r"].origin
    d.feed(rx.RequestCancelled("r") if how == "cancelled" else rx.DeadlineReached("r", origin))
    assert d.machine.held == 0 and not d.machine.awaited
    cancelled = {one.timer.kind for one in d.all(fx.CancelTimer)}
    assert cancelled == {fx.TimerKind.HOLD, fx.TimerKind.DEADLINE}


def test_a_waiter_that_is_held_passes_its_slot_on() -> None:
    d = Driver()
    for name in ("r1", "r2"):
        d.submit(request(name), origin=len(d.log))
        d.plan(obstacle=rx.ObstacleKind.NO_CAPACITY, request_id=name)
    d.feed(rx.CapacityFreed(1))
    planned(d, "r1", "c", hold=HOLD)
    assert d.machine.phase("r1") is Phase.HELD and d.machine.phase("r2") is Phase.PLANNING


def test_what_a_heartbeat_tells_of_awaited_prefixes() -> None:
    def beat(*resident: Tier, gone: Tier | None = None, snapshot: bool = False) -> tuple[str, ...]:
        came = tuple(Resident("ab", 256, tier, MODEL.fingerprint) for tier in resident)
        went = (Gone("ab", gone),) if gone else ()
        return news(heartbeat("a", resident=came, gone=went, snapshot=snapshot), ["ab"])

    assert beat() == beat(Tier.GPU) == beat(Tier.INFLIGHT) == beat(Tier.GPU, gone=Tier.INFLIGHT) == ()
    assert beat(Tier.INFLIGHT, snapshot=True) == ()
    assert beat(Tier.RAM) == beat(Tier.GPU, Tier.RAM) == beat(gone=Tier.INFLIGHT) == beat(snapshot=True) == ("ab",)
    assert news(heartbeat("a"), ()) == ()


# --- plans ---

TIERS = tuple(TierCost(tier, 1.0, 20_000.0) for tier in (Tier.GPU, Tier.RAM, Tier.SSD, Tier.PEER))
KNOBS = PolicyKnobs()


def asked(name: str, shared: int = 2_048, own: int = 40) -> GenerationRequest:
    mark = 50_000 + sum(map(ord, name))
    tokens = (*range(shared), *range(mark, mark + own))
    return GenerationRequest(name, "m", tokens, len(tokens), 16, tenant_salt=SALT, deadline_ms=60_000)


def plan(fleet: Fleet, wanted: GenerationRequest, now_ms: float = 0.0, herd: rx.Herd | None = None) -> rx.Plan:
    return candidates.plan(wanted, [candidates.variant(MODEL, wanted)], fleet, now_ms, herd=herd)


def booked(fleet: Fleet, wanted: GenerationRequest, now_ms: float = 0.0) -> str:
    best = plan(fleet, wanted, now_ms).ranked[0].candidate
    fleet.account(fx.Booked(AssignmentId(wanted.request_id, 1), best), now_ms)
    return best.worker


def a_fleet(workers: int = 8, knobs: PolicyKnobs = KNOBS, **changes: object) -> Fleet:
    beats = [heartbeat(f"w{i}", **{"tiers": TIERS, **changes}) for i in range(workers)]
    return observe(Fleet(knobs), *beats)


def test_two_routers_choose_the_same_workers_for_a_new_prefix_and_hold_the_rest() -> None:
    one, other = a_fleet(), a_fleet()
    leaders = {booked(one, asked("x1")), booked(one, asked("x2"))}
    assert leaders == {booked(other, asked("y1")), booked(other, asked("y2"))} and len(leaders) == 2
    held = plan(one, asked("x3"))
    assert held.hold is not None and held.hold.tokens == 2_048
    assert {worker for worker, _ in held.hold.leaders} == leaders
    assert held.hold.wait_ms <= held.hold.alone_ms == pytest.approx(2_088 + 20, rel=0.01)
    assert {one.reason: one.count for one in held.pruned}["held"] >= 6


def test_different_prompts_are_not_drawn_to_the_same_worker() -> None:
    fleet = a_fleet(40)
    chosen = set()
    for number in range(40):
        tokens = tuple(range(number * 10_000, number * 10_000 + 2_048))
        wanted = GenerationRequest("r", "m", tokens, len(tokens), 16, tenant_salt=SALT, deadline_ms=1_000)
        chosen.add(plan(fleet, wanted).ranked[0].candidate.worker)
    assert len(chosen) > 20


@pytest.mark.parametrize("why", ["short", "no peers", "dear peers", "break-even", "unreadable", "far", "nobody"])
def test_nobody_is_held_where_it_is_not_worth_it(why: str) -> None:
    tiers, now_ms, knobs = TIERS, 0.0, KNOBS
    match why:
        case "short":
            knobs = replace(KNOBS, hold_least_ms=3_000.0)
        case "no peers":
            tiers = TIERS[:3]
        case "dear peers":
            tiers = (*TIERS[:3], TierCost(Tier.PEER, 1_000.0, 20_000.0))
        case "break-even":
            tiers = (*TIERS[:3], TierCost(Tier.PEER, 1.0, 20_000.0, 4_096))
        case "unreadable":
            tiers = (TIERS[0], TIERS[3])
    fleet = a_fleet(knobs=knobs, tiers=tiers)
    if why != "nobody":
        for name in ("x1", "x2"):
            booked(fleet, asked(name), now_ms)
    if why == "far":
        # Long overdue: whoever was computing it is not believed any more.
        now_ms = 10_000.0
    assert plan(fleet, asked("x3"), now_ms).hold is None


def resident(fleet: Fleet, wanted: GenerationRequest, worker: str, *tiers: Tier) -> rx.Herd:
    """The worker has the whole of the shared part."""
    chunks = candidates.variant(MODEL, wanted).chain.chunks[:8]
    held = tuple(Resident(chunk.hash, chunk.end, tier, MODEL.fingerprint) for chunk in chunks for tier in tiers)
    observe(fleet, heartbeat(worker, tiers=TIERS, resident=held))
    return rx.Herd(chunks[-1].hash, chunks[-1].end, 0, 500.0)


def test_who_was_held_waits_for_the_copy_and_is_then_dealt_to_all() -> None:
    fleet, wanted = a_fleet(), asked("x3")
    herd = resident(fleet, wanted, "w0", Tier.GPU)
    held = plan(fleet, wanted, herd=herd)
    assert held.hold is not None and held.hold.wait_ms == KNOBS.hold_grace_ms
    assert plan(fleet, wanted).hold is None  # a stranger goes where it is
    assert plan(fleet, wanted, herd=replace(herd, patience_ms=0.0)).ranked[0].candidate.worker == "w0"
    resident(fleet, wanted, "w0", Tier.GPU, Tier.RAM)
    plans = [plan(fleet, wanted, herd=replace(herd, seat=seat)) for seat in range(16)]
    assert all(one.hold is None for one in plans)
    firsts = [one.ranked[0].candidate for one in plans]
    assert [sum(one.worker == f"w{i}" for one in firsts) for i in range(8)] == [2] * 8
    assert all(one.cached_tokens >= 2_048 for one in firsts)


def test_a_lost_prefix_is_computed_by_one_whom_all_routers_choose() -> None:
    herds = [rx.Herd("ab" * 32, 2_048, seat, 100.0) for seat in range(8)]
    chosen = {plan(a_fleet(), asked(f"x{herd.seat}"), herd=herd).ranked[0].candidate.worker for herd in herds}
    assert len(chosen) == 1


# --- those who come when it is there already ---


def busy(knobs: PolicyKnobs = KNOBS) -> tuple[Fleet, dict[str, str]]:
    """Forty requests with a prefix that one worker has by now, in memory too."""
    fleet = a_fleet(knobs=knobs)
    first = asked("x0")
    leader = booked(fleet, first)
    fleet.account(fx.Accepted(AssignmentId("x0", 1)), 1.0)
    chunks = candidates.variant(MODEL, first).chain.chunks[:8]
    tiers = (Tier.GPU, Tier.RAM)
    held = tuple(Resident(chunk.hash, chunk.end, tier, MODEL.fingerprint) for chunk in chunks for tier in tiers)
    observe(fleet, heartbeat(leader, tiers=TIERS, resident=held), now_ms=2_200.0)
    return fleet, {f"x{i}": booked(fleet, asked(f"x{i}"), 2_200.0) for i in range(1, 40)}


def test_of_many_who_come_when_it_is_there_all_but_the_first_few_are_dealt() -> None:
    _, chosen = busy()
    first = {chosen[f"x{i}"] for i in range(1, KNOBS.herd_least)}
    assert len(first) == 1  # a few go where it is
    # Then the others catch up: 8 went to the first worker by themselves, 32 are dealt to 7.
    every = [*first, *chosen.values()]
    assert all(4 <= every.count(f"w{i}") <= 8 for i in range(8))


@pytest.mark.parametrize("workers", [2, 8, 40])
def test_where_one_alone_would_serve_them_another_computes_it_too(workers: int) -> None:
    fleet = a_fleet(workers, tiers=TIERS[:3])  # nobody reads from a peer
    leader = booked(fleet, asked("x0"))
    fleet.account(fx.Accepted(AssignmentId("x0", 1)), 1.0)
    chosen = []
    for i in range(1, 40):
        best = plan(fleet, asked(f"x{i}"), 800.0 + i).ranked[0].candidate
        fleet.account(fx.Booked(AssignmentId(f"x{i}", 1), best), 800.0 + i)
        chosen.append((best.worker, best.tier))
    few = KNOBS.herd_least - 1
    assert set(chosen[:few]) == {(leader, Tier.INFLIGHT)}
    computing = [worker for worker, tier in chosen if tier is Tier.NONE]
    assert len(computing) == KNOBS.prefix_copies - 1 and leader not in computing
    served = [sum(worker == one for worker, _ in chosen) + (one == leader) for one in (leader, *computing)]
    assert sum(served) == 40 and max(served) - min(served) <= 1


def test_who_could_fetch_a_part_of_it_is_none_to_deal_to_yet() -> None:
    fleet = a_fleet(2, tiers=TIERS[:3])
    leader = booked(fleet, asked("x0"))
    fleet.account(fx.Accepted(AssignmentId("x0", 1)), 1.0)
    (other,) = {"w0", "w1"} - {leader}
    chunks = candidates.variant(MODEL, asked("x0")).chain.chunks[:1]
    part = tuple(Resident(chunk.hash, chunk.end, Tier.RAM, MODEL.fingerprint) for chunk in chunks)
    observe(fleet, heartbeat(other, tiers=TIERS[:3], resident=part), now_ms=700.0)
    chosen = []
    for i in range(1, 40):
        best = plan(fleet, asked(f"x{i}"), 800.0 + i).ranked[0].candidate
        fleet.account(fx.Booked(AssignmentId(f"x{i}", 1), best), 800.0 + i)
        chosen.append(best)
    few = KNOBS.herd_least
    assert [one.worker for one in chosen[:few]] == [leader] * few
    assert (chosen[few].worker, chosen[few].cached_tokens) == (other, 256)
    assert all(one.cached_tokens == 2_048 for one in chosen[few + 1 :])
    assert 18 <= sum(one.worker == other for one in chosen) <= 20


def test_a_conversation_of_a_herd_that_goes_on_is_not_computed_once_more() -> None:
    fleet, computing = a_fleet(tiers=TIERS[:3]), set()
    for i in range(30):
        best = plan(fleet, asked(f"x{i}"), 800.0 * (i > 0)).ranked[0].candidate
        fleet.account(fx.Booked(AssignmentId(f"x{i}", 1), best), 800.0 * (i > 0))
        fleet.account(fx.Accepted(AssignmentId(f"x{i}", 1)), 800.0)
        computing |= {best.worker} if best.tier is Tier.NONE else set()
    assert len(computing) == KNOBS.prefix_copies
    chunks = candidates.variant(MODEL, asked("y", own=300)).chain.chunks
    for worker, count in zip(sorted(computing), (8, 9), strict=True):
        held = tuple(Resident(chunk.hash, chunk.end, Tier.GPU, MODEL.fingerprint) for chunk in chunks[:count])
        observe(fleet, heartbeat(worker, tiers=TIERS[:3], resident=held), now_ms=3_000.0)
    again = plan(fleet, asked("y", own=300), 3_000.0).ranked[0].candidate
    assert (again.worker, again.tier, again.cached_tokens) == (max(computing), Tier.GPU, 2_304)


@pytest.mark.parametrize("workers", [8, 40])
def test_whom_they_are_dealt_to_is_recorded_with_what_is_kept(workers: int) -> None:
    fleet = a_fleet(workers)
    leader = booked(fleet, asked("x0"))
    fleet.account(fx.Accepted(AssignmentId("x0", 1)), 1.0)
    chunks = candidates.variant(MODEL, asked("x0")).chain.chunks[:8]
    held = tuple(
        Resident(chunk.hash, chunk.end, tier, MODEL.fingerprint) for chunk in chunks for tier in (Tier.GPU, Tier.RAM)
    )
    observe(fleet, heartbeat(leader, tiers=TIERS, resident=held), now_ms=2_200.0)
    for i in range(1, 80):
        found = plan(fleet, asked(f"x{i}"), 2_200.0)
        best = found.ranked[0].candidate
        fleet.account(fx.Booked(AssignmentId(f"x{i}", 1), best), 2_200.0)
        again = policy.rank(f"x{i}", found.ranked[::-1], (), KNOBS, found.draw)
        assert again[0].candidate == best
    most = max(fleet.herds.served(chunks[0].hash).values())
    assert most <= max(KNOBS.herd_least, 80 / min(workers, KNOBS.ranked) * 1.3)


def test_who_is_offered_elsewhere_counts_there_alone() -> None:
    fleet, wanted = a_fleet(2), [asked(f"x{i}") for i in range(12)]
    last = Counter[str]()
    for one in wanted:
        ranked = plan(fleet, one, 100.0).ranked
        offers = [next(option.candidate for option in ranked if option.candidate.worker == w) for w in ("w0", "w1")]
        for number, candidate in enumerate((*offers, ranked[0].candidate), 1):
            fleet.account(fx.Booked(AssignmentId(one.request_id, number), candidate), 100.0)
            fleet.account(fx.Unbooked(AssignmentId(one.request_id, number)), 100.0)
        last[ranked[0].candidate.worker] += 1
    prefix = candidates.variant(MODEL, wanted[0]).chain.chunks[0].hash
    assert +Counter(fleet.herds.served(prefix)) == last


def test_nobody_is_dealt_when_the_herd_is_over() -> None:
    fleet, _ = busy()
    late = plan(fleet, asked("y"), KNOBS.herd_ms + 1.0)
    assert late.draw.band_ms == 0.0


def test_few_are_no_herd() -> None:
    fleet, chosen = busy(replace(KNOBS, herd_least=100))
    assert plan(fleet, asked("y"), 2_200.0).draw.band_ms == 0.0
    at_first = [chosen[f"x{i}"] for i in range(1, KNOBS.herd_least)]
    assert len(set(at_first)) == 1  # by time alone


def test_a_worker_may_be_later_by_half_of_what_it_spares() -> None:
    fleet, _ = busy()
    found = plan(fleet, asked("y"), 2_200.0)
    best = min(found.ranked, key=lambda one: one.candidate.ttft_ms).candidate
    assert KNOBS.deal_gain == 2.0 < KNOBS.hold_gain
    assert found.draw.band_ms == pytest.approx(best.cached_tokens * best.prefill_ms_per_token / 2)
