"""Rules of the router machine that random schedules would hide: one case each."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from libs.controller import router_effects as fx
from libs.controller import router_events as rx
from libs.controller.errors import ControllerBugError
from libs.controller.fences import RouterFence
from libs.controller.knobs import RouterKnobs
from libs.controller.protocol import (
    AssignmentId,
    CancelledDelivery,
    Candidate,
    CompletedDelivery,
    DeclineReason,
    Delta,
    ErrorDelivery,
    FinishReason,
    GenerationRequest,
    Offer,
    OfferReply,
    RankedCandidate,
    Result,
    ResultStatus,
    Served,
    StatusCode,
    Submission,
    Tier,
    TierTokens,
    Timings,
    TokensDelivery,
    Usage,
)
from libs.controller.router import RouterMachine
from libs.controller.router_table import Phase
from tests.controller.cluster import request

E = TypeVar("E")


class Driver:
    """A router machine and a shell that notes what it is told."""

    def __init__(self, knobs: RouterKnobs | None = None) -> None:
        self.machine = RouterMachine(knobs or RouterKnobs())
        self.now = 0.0
        self.log: list[fx.RouterEffect] = []

    def feed(self, event: rx.RouterEvent) -> list[fx.RouterEffect]:
        effects = self.machine.handle(event, self.now)
        self.log += effects
        return effects

    def last(self, kind: type[E]) -> E:
        return next(effect for effect in reversed(self.log) if isinstance(effect, kind))

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.log if isinstance(effect, kind)]

    def submit(self, value: GenerationRequest, origin: int = 1, delivered: int = 0, fingerprint: str = "") -> None:
        self.feed(rx.Submitted(Submission(value, delivered, fingerprint), origin))

    def plan(self, *candidates: Candidate, obstacle: rx.ObstacleKind | None = None, request_id: str = "") -> None:
        wanted = next(p for p in reversed(self.all(fx.PlanRequested)) if not request_id or p.request_id == request_id)
        ranked = tuple(RankedCandidate(candidate) for candidate in candidates)
        why = rx.Obstacle(obstacle, "numbers") if obstacle else None
        self.feed(rx.Planned(wanted.request_id, wanted.plan_id, rx.Plan(ranked, (), why)))

    @property
    def offer(self) -> Offer:
        return self.last(fx.SendOffer).offer

    def worker_of(self, offer: Offer) -> str:
        return offer.candidate.worker

    def reply(self, accepted: bool = True, reason: DeclineReason = DeclineReason.UNSPECIFIED) -> None:
        offer = self.offer
        self.feed(rx.ReplyReceived(offer.candidate.worker, OfferReply(offer.assignment, offer.epoch, accepted, reason)))

    def delta(
        self, *tokens: int, index: int | None = None, usage: Usage | None = None, timings: Timings | None = None
    ) -> None:
        offer = self.offer
        at = len(offer.request.tokens) - offer.request.output_start if index is None else index
        said = usage or Usage(offer.request.output_start, 0, 0, offer.request.output_start, len(tokens))
        value = Delta(offer.assignment, offer.epoch, at, tokens, (), said, timings or Timings())
        self.feed(rx.DeltaReceived(offer.candidate.worker, value))

    def result(self, generated: int, reason: FinishReason = FinishReason.LENGTH, **kwargs: object) -> None:
        offer = self.offer
        usage = Usage(offer.request.output_start, 0, 0, offer.request.output_start, generated)
        value = Result(offer.assignment, offer.epoch, ResultStatus.COMPLETED, reason, usage=usage, **kwargs)  # type: ignore[arg-type]
        self.feed(rx.ResultReceived(offer.candidate.worker, value))

    def lose(self, loss: rx.Loss = rx.Loss.PROCESS) -> None:
        offer = self.offer
        self.feed(rx.WorkerUnavailable(offer.candidate.worker, offer.epoch, loss))

    @property
    def terminal(self) -> object:
        ends = [d.delivery for d in self.all(fx.Deliver) if not isinstance(d.delivery, TokensDelivery)]
        assert len(ends) == 1
        return ends[0]


def at(worker: str, tier: Tier = Tier.NONE, cached: int = 0, epoch: int = 1, fingerprint: str = "f") -> Candidate:
    return Candidate(worker, epoch, fingerprint, tier, cached, ttft_ms=10.0)


def test_the_regular_course_in_order() -> None:
    d = Driver()
    d.submit(request("r", 4, 3))
    d.plan(at("a"))
    d.reply()
    d.delta(7, 8)
    d.delta(9, index=2)
    timings = Timings(1, 2, 3, 4, 10)
    d.result(3, timings=timings)
    kinds = [type(effect).__name__ for effect in d.log]
    assert kinds == [
        "SetTimer", "PlanRequested", "Booked", "SetTimer", "SendOffer", "CancelTimer", "Accepted", "Deliver", "Deliver",
        "Measured", "CloseRoute", "Unbooked", "RecordDecision", "CancelTimer", "Deliver",
    ]  # fmt: skip
    end = d.terminal
    assert isinstance(end, CompletedDelivery)
    assert end.finish_reason is FinishReason.LENGTH
    assert end.usage == Usage(4, 0, 0, 4, 3)
    assert (end.served.worker, end.served.workers, end.served.attempts) == ("a", ("a",), 1)
    assert end.served.timings == timings and end.served.predicted_ttft_ms == 10.0
    decision = d.last(fx.RecordDecision).decision
    assert [record.outcome for record in decision.attempts] == [fx.Outcome.COMPLETED]
    assert len(d.machine) == 0


def test_a_decline_moves_on_and_only_a_stale_prefix_keeps_the_worker() -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a", Tier.GPU, 4), at("a", Tier.SSD, 4), at("b"), at("a"))
    d.reply(False, DeclineReason.PREFIX_GONE)
    assert (d.offer.candidate.worker, d.offer.candidate.tier) == ("a", Tier.SSD)
    d.reply(False, DeclineReason.QUEUE_FULL)
    assert d.offer.candidate.worker == "b"
    d.reply(False, DeclineReason.QUEUE_LONGER)
    wanted = d.last(fx.PlanRequested)
    assert wanted.plan_id == 2 and wanted.avoid == ("a", "b")  # the last `a` went with its worker
    assert [a.decline for a in d.last(fx.RecordDecision).decision.attempts] == [
        DeclineReason.PREFIX_GONE,
        DeclineReason.QUEUE_FULL,
        DeclineReason.QUEUE_LONGER,
    ]


@pytest.mark.parametrize("reason", [DeclineReason.PREFIX_GONE, DeclineReason.INSUFFICIENT_PAGES])
def test_a_partial_plan_that_leads_nowhere_is_followed_by_a_whole_one_before_any_wait(reason: DeclineReason) -> None:
    d = Driver()
    d.submit(request("r"))
    assert not d.last(fx.PlanRequested).whole
    d.feed(rx.Planned("r", 1, rx.Plan((RankedCandidate(at("a", Tier.GPU, 4)),), partial=True)))
    d.reply(False, reason)
    wanted = d.last(fx.PlanRequested)
    assert (wanted.plan_id, wanted.fresh, wanted.whole) == (2, True, True)
    d.plan(at("a"))
    d.reply(False, DeclineReason.INSUFFICIENT_PAGES)
    assert d.machine.phase("r") is Phase.WAITING


@pytest.mark.parametrize("reason", sorted(set(DeclineReason) - {DeclineReason.UNSPECIFIED}))
def test_when_nobody_is_left_the_reason_decides_between_waiting_and_planning(reason: DeclineReason) -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a"))
    d.reply(False, reason)
    roomless = reason in (DeclineReason.INSUFFICIENT_PAGES, DeclineReason.QUEUE_FULL, DeclineReason.DRAINING)
    again = reason is DeclineReason.DUPLICATE  # the same worker, by the next number
    assert d.machine.phase("r") is (Phase.WAITING if roomless else Phase.OFFERED if again else Phase.PLANNING)


def test_a_timed_out_offer_is_cancelled_and_its_late_acceptance_changes_nothing() -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a"), at("b"))
    late = d.offer
    d.feed(rx.OfferTimedOut(late.assignment))
    assert d.last(fx.SendCancel).cancel.assignment == late.assignment
    assert d.offer.candidate.worker == "b" and d.offer.assignment.attempt == 2
    effects = d.feed(rx.ReplyReceived("a", OfferReply(late.assignment, 1, True)))
    assert [type(e) for e in effects] == [fx.SendCancel]  # it would run for nobody
    assert d.machine.phase("r") is Phase.OFFERED
    assert d.feed(rx.OfferTimedOut(late.assignment)) == []
    assert d.machine.fence.counts["OfferTimedOut", RouterFence.STALE_ATTEMPT] == 1


def test_resume_carries_the_delivered_tokens_and_the_rest_of_the_budget() -> None:
    d = Driver()
    d.submit(request("r", 4, 10, deadline_ms=1_000))
    d.plan(at("a", Tier.SSD, 2), at("b"))
    d.reply()
    d.delta(50, 51, 52, usage=Usage(4, 2, 2, 2, 3, (TierTokens(Tier.SSD, 2, 99),)))
    d.now = 400.0
    d.lose()
    wanted = d.last(fx.PlanRequested)
    assert wanted.request.tokens == (1, 2, 3, 4, 50, 51, 52) and wanted.request.output_start == 4
    assert wanted.request.max_new_tokens == 7 and wanted.request.deadline_ms == 600
    assert wanted.fingerprint == "f"
    d.plan(at("b", Tier.GPU, 6))
    d.reply()
    d.delta(53, usage=Usage(4, 6, 0, 1, 1))
    delivery = d.last(fx.Deliver).delivery
    assert isinstance(delivery, TokensDelivery) and delivery.index == 3
    # The request's cost is that of the attempt that first delivered; generated is what was delivered.
    assert delivery.usage == Usage(4, 2, 2, 2, 4, (TierTokens(Tier.SSD, 2, 99),))
    d.result(1)
    end = d.terminal
    assert isinstance(end, CompletedDelivery) and end.served.workers == ("a", "b") and end.served.tier is Tier.SSD


def test_a_lost_result_does_not_cost_a_resume() -> None:
    for tokens, stop, reason in (((5, 6), (), FinishReason.LENGTH), ((5,), (5,), FinishReason.STOP)):
        d = Driver()
        d.submit(request("r", 3, 2, stop_token_ids=stop))
        d.plan(at("a"))
        d.reply()
        d.delta(*tokens)
        d.lose()
        end = d.terminal
        assert isinstance(end, CompletedDelivery) and end.finish_reason is reason
        assert end.usage.generated_tokens == len(tokens) and end.served.worker == "a"


def test_a_result_without_its_last_tokens_is_a_resume() -> None:
    d = Driver()
    d.submit(request("r", 3, 4))
    d.plan(at("a"))
    d.reply()
    d.delta(5)
    d.delta(7, index=2)  # a gap: not delivered
    d.result(4)
    assert d.last(fx.PlanRequested).request.tokens == (1, 2, 3, 5)
    assert d.machine.fence.counts["DeltaReceived", RouterFence.DELTA_GAP] == 1


@pytest.mark.parametrize("answered", [False, True])
def test_a_completion_without_tokens_completes(answered: bool) -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a"))
    if answered:
        d.reply()
    d.result(0, FinishReason.STOP)
    assert isinstance(d.terminal, CompletedDelivery)


def test_two_worker_losses_end_a_request_and_rest_its_prompt() -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a"), at("b"), at("c"))
    d.reply()
    d.lose()
    assert d.offer.candidate.worker == "b"
    d.reply()
    d.lose(rx.Loss.SILENCE)
    end = d.terminal
    assert isinstance(end, ErrorDelivery) and end.code is StatusCode.INTERNAL and "r" in end.message
    assert len(d.all(fx.SendOffer)) == 2  # the third worker lives

    def refused(value: GenerationRequest) -> bool:
        d.log.clear()
        d.submit(value)
        return bool(d.all(fx.Deliver))

    assert refused(request("again"))
    assert isinstance(d.terminal, ErrorDelivery) and d.terminal.code is StatusCode.FAILED_PRECONDITION
    assert not refused(request("longer", 6))  # shares the whole prompt as a prefix, and is another one
    d.now += 600_000
    assert not refused(request("later"))


@pytest.mark.parametrize("how", ["retired", "dropped", "failed", "declined"])
def test_what_is_no_loss_never_rests_a_prompt(how: str) -> None:
    d = Driver()
    d.submit(request("r"))
    for _ in range(4):
        d.plan(at("a"))
        offer = d.offer
        if how == "retired":
            d.lose(rx.Loss.RETIRED)
        elif how == "dropped":
            d.feed(rx.RouteDropped(offer.assignment, "a", 1))
        elif how == "failed":
            d.feed(rx.ResultReceived("a", Result(offer.assignment, 1, ResultStatus.FAILED, error="x")))
        else:
            d.reply(False, DeclineReason.WRONG_EPOCH)
    d.submit(request("other"), origin=2)
    assert d.machine.phase("other") is Phase.PLANNING


def test_a_crash_counts_once_for_a_prompt_however_many_requests_carried_it() -> None:
    d = Driver()
    for name, origin in (("x", 1), ("y", 2)):
        d.submit(request(name), origin=origin)
        d.plan(at("a"), request_id=name)
    d.lose()
    d.submit(request("z"), origin=3)
    assert d.machine.phase("z") is Phase.PLANNING


def test_attempts_are_bounded_and_progress_renews_them() -> None:
    d = Driver()
    d.submit(request("r", 3, 50))
    for _ in range(5):
        d.plan(at("a"))
        d.feed(rx.RouteDropped(d.offer.assignment, "a", 1, "gone"))
    d.plan(at("a"))
    d.reply()
    d.delta(9)
    d.feed(rx.RouteDropped(d.offer.assignment, "a", 1, "gone"))
    for _ in range(5):
        assert d.machine.phase("r") is Phase.PLANNING
        d.plan(at("a"))
        d.feed(rx.RouteDropped(d.offer.assignment, "a", 1, "tunnel gone"))
    end = d.terminal
    assert isinstance(end, ErrorDelivery) and end.code is StatusCode.UNAVAILABLE and "tunnel gone" in end.message
    assert end.retry_after_ms > 0 and end.usage.generated_tokens == 1


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (rx.ObstacleKind.UNKNOWN_MODEL, StatusCode.NOT_FOUND),
        (rx.ObstacleKind.TOO_LONG, StatusCode.INVALID_ARGUMENT),
        (rx.ObstacleKind.NO_COVERAGE, StatusCode.UNAVAILABLE),
        (rx.ObstacleKind.NO_WORKER, None),
        (rx.ObstacleKind.NO_CAPACITY, None),
        (rx.ObstacleKind.CATALOG_AWAY, None),
    ],
)
def test_never_feasible_fails_at_once_and_the_rest_waits(kind: rx.ObstacleKind, code: StatusCode | None) -> None:
    d = Driver()
    d.submit(request("r", deadline_ms=50))
    d.plan(obstacle=kind)
    if code is None:
        assert d.machine.waiting == 1
        d.feed(rx.DeadlineReached("r", 1))
        assert isinstance(d.terminal, ErrorDelivery) and d.terminal.code is StatusCode.DEADLINE_EXCEEDED
        assert "numbers" in d.terminal.message
    else:
        assert isinstance(d.terminal, ErrorDelivery) and d.terminal.code is code


def test_the_queue_is_bounded_in_all_and_by_tenant() -> None:
    d = Driver(RouterKnobs(queue=3, queue_per_tenant=2))
    for number, tenant in enumerate("aaabb"):
        d.submit(request(f"r{number}", tenant=tenant), origin=number)
        d.plan(obstacle=rx.ObstacleKind.NO_CAPACITY, request_id=f"r{number}")
        # A newcomer behind waiters opens a wave; nothing has room in it.
        while any(phase is Phase.PLANNING for phase in map(d.machine.phase, [f"r{i}" for i in range(5)])):
            d.plan(obstacle=rx.ObstacleKind.NO_CAPACITY)
    ends = [e.delivery for e in d.all(fx.Deliver)]
    assert [e.request_id for e in ends] == ["r2", "r4"]
    assert all(isinstance(e, ErrorDelivery) and e.code is StatusCode.RESOURCE_EXHAUSTED for e in ends)
    assert all(isinstance(e, ErrorDelivery) and e.retry_after_ms for e in ends)


def waiting(d: Driver, *names: str, **kwargs: object) -> None:
    for name in names:
        d.submit(request(name, **kwargs), origin=len(d.log))  # type: ignore[arg-type]
        d.plan(obstacle=rx.ObstacleKind.NO_CAPACITY, request_id=name)


def test_a_freed_slot_goes_to_the_first_and_passes_on_if_it_cannot_use_it() -> None:
    d = Driver()
    waiting(d, "low", "other")
    d.submit(request("high", priority=5), origin=99)
    d.plan(obstacle=rx.ObstacleKind.NO_CAPACITY, request_id="high")
    d.log.clear()
    d.feed(rx.CapacityFreed(1))
    assert [p.request_id for p in d.all(fx.PlanRequested)] == ["high"]
    assert not d.last(fx.PlanRequested).fresh
    d.plan(obstacle=rx.ObstacleKind.NO_CAPACITY)
    d.plan(obstacle=rx.ObstacleKind.NO_CAPACITY)
    d.plan(obstacle=rx.ObstacleKind.NO_CAPACITY)
    assert [p.request_id for p in d.all(fx.PlanRequested)] == ["high", "low", "other"]  # each once per wave
    assert d.machine.waiting == 3
    d.feed(rx.CapacityFreed(1))
    d.plan(at("a"))
    d.reply()
    assert d.machine.phase("high") is Phase.ACCEPTED and d.machine.waiting == 2


def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    d = Driver()
    waiting(d, "first")
    d.submit(request("second"), origin=50)
    d.plan(at("a"), request_id="second")
    assert d.machine.phase("second") is Phase.WAITING
    assert d.last(fx.PlanRequested).request_id == "first"
    d.plan(at("a"), request_id="first")
    assert d.offer.request.request_id == "first"


def test_a_broken_stream_goes_before_everybody_else_in_the_queue() -> None:
    d = Driver()
    d.submit(request("stream"))
    d.plan(at("a"))
    d.reply()
    d.delta(1)
    waiting(d, "first", priority=9)
    d.lose()
    d.plan(obstacle=rx.ObstacleKind.UNKNOWN_MODEL, request_id="stream")  # feasible once: it waits
    d.log.clear()
    d.feed(rx.CapacityFreed(1))
    assert d.last(fx.PlanRequested).request_id == "stream"


def test_cancel_in_each_phase_ends_once_and_tells_the_worker() -> None:
    for steps in range(4):
        d = Driver()
        d.submit(request("r"))
        if steps >= 1:
            d.plan(at("a"))
        if steps >= 2:
            d.reply()
        if steps >= 3:
            d.delta(3)
        d.feed(rx.RequestCancelled("r", 1))
        assert isinstance(d.terminal, CancelledDelivery)
        assert d.terminal.usage.generated_tokens == (1 if steps == 3 else 0)
        assert len(d.all(fx.SendCancel)) == (1 if steps else 0)
        assert d.feed(rx.RequestCancelled("r", 1)) == []
        assert d.feed(rx.DeadlineReached("r", 1)) == []


def test_a_cancelled_stream_is_told_how_it_was_served() -> None:
    d = Driver()
    timings = Timings(1.0, 2.0, 3.0, 4.0, 10.0)
    d.submit(request("r"))
    d.plan(at("a", Tier.SSD, epoch=7))
    d.delta(3, timings=timings)
    d.delta(4, index=1)
    d.feed(rx.RequestCancelled("r", 1))
    end = d.terminal
    assert isinstance(end, CancelledDelivery) and end.usage.generated_tokens == 2
    served = end.served
    assert (served.worker, served.workers, served.epoch, served.attempts) == ("a", ("a",), 7, 1)
    assert served.tier is Tier.SSD and served.timings == timings


def test_the_end_names_the_last_attempt_also_if_it_is_over() -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a", Tier.RAM), at("b"))
    d.delta(3, timings=Timings(ttft_ms=5.0))
    d.lose()
    d.plan(at("b", epoch=4))
    d.feed(rx.DeadlineReached("r", 1))
    end = d.terminal
    assert isinstance(end, ErrorDelivery) and end.served.worker == "b" and end.served.epoch == 4
    assert end.served.workers == ("a",) and end.served.attempts == 2 and end.served.tier is Tier.RAM
    assert end.served.timings == Timings()  # of an attempt that came to nothing


def test_a_request_without_an_attempt_was_served_by_nobody() -> None:
    d = Driver()
    d.submit(request("r"))
    d.feed(rx.RequestCancelled("r", 1))
    assert isinstance(d.terminal, CancelledDelivery) and d.terminal.served == Served()


def test_every_delivery_of_tokens_names_its_variant() -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a", fingerprint="f7"))
    d.delta(3)
    d.delta(4, index=1)
    told = [e.delivery for e in d.all(fx.Deliver) if isinstance(e.delivery, TokensDelivery)]
    assert [delivery.fingerprint for delivery in told] == ["f7", "f7"]


def test_a_resubmission_goes_on_where_the_other_router_stopped() -> None:
    d = Driver()
    value = GenerationRequest("r", "m", (1, 2, 3, 70, 71), 3, 4)
    d.submit(value, delivered=2, fingerprint="f2")
    assert d.last(fx.PlanRequested).fingerprint == "f2"
    d.plan(at("a", fingerprint="f2"))
    d.reply()
    d.delta(72)
    delivery = d.last(fx.Deliver).delivery
    assert isinstance(delivery, TokensDelivery) and delivery.index == 2
    assert (delivery.usage.prompt_tokens, delivery.usage.generated_tokens) == (3, 3)


def test_a_resubmission_that_had_everything_completes_at_once() -> None:
    d = Driver()
    d.submit(GenerationRequest("r", "m", (1, 2, 3, 70), 3, 0), delivered=1)
    assert isinstance(d.terminal, CompletedDelivery) and d.terminal.usage.generated_tokens == 1


@pytest.mark.parametrize(
    ("value", "delivered"),
    [
        (GenerationRequest("", "m", (1,), 1, 1), 0),
        (GenerationRequest("r", "m", (), 0, 1), 0),
        (GenerationRequest("r", "m", (1, 2), 3, 1), 0),
        (GenerationRequest("r", "m", (1, 2), 1, 1), 0),
        (GenerationRequest("r", "m", (1, 2), 2, 1), 1),
        (GenerationRequest("r", "m", (1, 2), 2, 0), 0),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_reason(value: GenerationRequest, delivered: int) -> None:
    d = Driver()
    d.submit(value, delivered=delivered)
    assert isinstance(d.terminal, ErrorDelivery) and d.terminal.code is StatusCode.INVALID_ARGUMENT
    assert len(d.machine) == 0


def test_a_second_submission_of_a_live_id_ends_itself_alone() -> None:
    d = Driver()
    d.submit(request("r"), origin=1)
    d.submit(request("r"), origin=2)
    end = d.all(fx.Deliver)
    assert [e.origin for e in end] == [2]
    assert isinstance(end[0].delivery, ErrorDelivery) and end[0].delivery.code is StatusCode.ALREADY_EXISTS
    assert d.feed(rx.RequestCancelled("r", 2)) == []
    assert d.machine.phase("r") is Phase.PLANNING


def test_a_plan_of_nothing_is_our_own_bug() -> None:
    d = Driver()
    d.submit(request("r"))
    with pytest.raises(ControllerBugError):
        d.plan()


def test_silence_of_another_epoch_touches_nothing() -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a", epoch=5))
    assert d.feed(rx.WorkerUnavailable("a", 4, rx.Loss.PROCESS)) == []
    assert d.machine.phase("r") is Phase.OFFERED


def test_the_salt_is_in_no_message_and_no_decision() -> None:
    d = Driver()
    d.submit(request("r", tenant_salt="5a17" * 16))
    d.plan(at("a"))
    d.lose()
    shown = [repr(effect) for effect in d.log]
    assert not any("5a17" in text for text in shown)
    assert AssignmentId("r", 1) < AssignmentId("r", 2)


def test_workers_that_die_together_do_not_end_a_request_that_was_just_moved_between_them() -> None:
    """The second one is lost before it answered: the stream waits for a worker to come back, and goes on."""
    d = Driver()
    d.submit(request("r", 3, 50))
    d.plan(at("a"), at("b"))
    d.reply()
    d.delta(7)
    d.lose()
    d.plan(at("b"))
    d.lose()
    assert d.machine.phase("r") is Phase.PLANNING
    d.plan(at("a", epoch=2))
    d.reply()
    d.delta(8)
    d.lose()
    assert isinstance(d.terminal, ErrorDelivery) and d.terminal.code is StatusCode.INTERNAL


def test_a_request_that_kills_workers_by_its_offer_alone_is_stopped_too() -> None:
    d = Driver()
    d.submit(request("r"))
    for name in "abcd":
        d.plan(at(name))
        d.lose()
    assert isinstance(d.terminal, ErrorDelivery) and d.terminal.code is StatusCode.INTERNAL
    d.log.clear()
    d.submit(request("again"))
    assert isinstance(d.terminal, ErrorDelivery) and d.terminal.code is StatusCode.FAILED_PRECONDITION


def test_the_offer_carries_the_queue_in_the_workers_own_count() -> None:
    """The ranking corrects it; a worker that overestimates its queue would otherwise decline every offer."""
    d = Driver()
    d.submit(request("r"))
    wanted = d.last(fx.PlanRequested)
    corrected = replace(at("a"), queue_ms=500.0)
    d.feed(rx.Planned(wanted.request_id, wanted.plan_id, rx.Plan((RankedCandidate(corrected, (), 1_000.0),))))
    assert d.offer.candidate == replace(corrected, queue_ms=1_000.0)
    d.reply()
    d.delta(1, 2, 3, 4, index=0)
    d.result(4)
    assert d.last(fx.Measured).candidate == corrected, "what is learnt from is what was predicted"
    assert d.last(fx.RecordDecision).decision.ranked[0].candidate == corrected


def test_a_route_dropped_just_before_its_process_is_lost_is_a_loss_and_two_end_the_request() -> None:
    """A process with several tunnels loses them one by one: the first only drops routes."""
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a"), at("b"), at("c"))
    d.reply()
    d.feed(rx.RouteDropped(d.offer.assignment, "a", 1, "tunnel lost"))
    d.feed(rx.RouteDropped(d.offer.assignment, "a", 1, "tunnel lost"))  # once more: stale
    d.feed(rx.WorkerUnavailable("a", 1, rx.Loss.PROCESS))
    assert d.worker_of(d.offer) == "b"
    d.reply()
    d.feed(rx.RouteDropped(d.offer.assignment, "b", 1, "tunnel lost"))
    third = d.offer
    assert third.candidate.worker == "c"
    effects = d.feed(rx.WorkerUnavailable("b", 1, rx.Loss.PROCESS))
    assert any(isinstance(e, fx.SendCancel) and e.cancel.assignment == third.assignment for e in effects)
    delivery = d.last(fx.Deliver).delivery
    assert isinstance(delivery, ErrorDelivery) and delivery.code is StatusCode.INTERNAL


def test_a_route_dropped_long_before_its_process_is_lost_or_by_one_that_retires_is_none() -> None:
    for loss, later_ms in ((rx.Loss.PROCESS, 60_000.0), (rx.Loss.RETIRED, 1.0)):
        d = Driver()
        d.submit(request("r", deadline_ms=600_000))
        d.plan(at("a"), at("b"), at("c"), at("d"))
        for worker in ("a", "b", "c"):
            d.reply()
            d.feed(rx.RouteDropped(d.offer.assignment, worker, 1, "tunnel lost"))
            d.now += later_ms
            d.feed(rx.WorkerUnavailable(worker, 1, loss))
        assert d.worker_of(d.offer) == "d"


def test_an_attempt_number_that_is_taken_is_offered_again_under_the_next() -> None:
    d = Driver()
    d.submit(request("r"))
    d.plan(at("a"), at("b"))
    d.reply(False, DeclineReason.DUPLICATE)
    assert (d.worker_of(d.offer), d.offer.assignment.attempt) == ("a", 2)
