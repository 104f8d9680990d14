"""The worker machine: every decline in its order, cancel in every phase, no page let go of under an operation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libs.controller import worker_effects as wfx
from libs.controller import worker_events as wx
from libs.controller.catalog_facts import Chunk, Node
from libs.controller.errors import ControllerBugError
from libs.controller.fences import WorkerFence
from libs.controller.knobs import WorkerKnobs
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    Candidate,
    DeclineReason,
    FinishReason,
    Offer,
    OfferReply,
    Pages,
    Result,
    ResultStatus,
    Tier,
    TierTokens,
    Timings,
    Usage,
)
from libs.controller.worker import WorkerMachine
from libs.controller.worker_table import Phase
from tests.controller.cluster import request

PAGES = Pages(10, 4, 1, 2, 3)
CHAIN = (Node(Chunk("c" * 64, "p" * 64, 0, 4)),)


class Driver:
    def __init__(self, knobs: WorkerKnobs | None = None) -> None:
        self.machine = WorkerMachine(7, {"f": 100}, knobs or WorkerKnobs())
        self.now = 0.0
        self.log: list[wfx.WorkerEffect] = []

    def feed(self, event: wx.WorkerEvent, after: float = 0.0) -> list[wfx.WorkerEffect]:
        self.now += after
        effects = self.machine.handle(event, self.now)
        self.log += effects
        return effects

    def offer(self, value: Offer, queue_ms: float = 0.0, tunnel: int = 1) -> list[wfx.WorkerEffect]:
        return self.feed(wx.OfferReceived(value, tunnel, queue_ms, PAGES))

    @property
    def result(self) -> Result:
        results = [e.result for e in self.log if isinstance(e, wfx.EmitResult)]
        assert len(results) == 1
        return results[0]


def an_offer(name: str = "r", attempt: int = 1, chain: tuple[Node, ...] = (), **changes: object) -> Offer:
    value = request(name, 5, 4, deadline_ms=1_000)
    candidate = Candidate("w", 7, "f", Tier.SSD if chain else Tier.NONE, 4 if chain else 0, queue_ms=100.0)
    offer = Offer(AssignmentId(name, attempt), 7, value, "f", candidate, chain)
    return replace(offer, **changes)  # type: ignore[arg-type]


A = AssignmentId("r", 1)


def declined(effects: list[wfx.WorkerEffect]) -> OfferReply:
    assert len(effects) == 1 and isinstance(effects[0], wfx.Reply) and not effects[0].reply.accepted
    return effects[0].reply


# Each spoils one check; a later one in the list is checked later.
SPOILERS = [
    (DeclineReason.WRONG_EPOCH, {"epoch": 6}),
    (DeclineReason.MODEL_NOT_LOADED, {"fingerprint": "g"}),
    (DeclineReason.CONTEXT_EXCEEDED, {"request": request("r", 50, 51, deadline_ms=1_000)}),
    (DeclineReason.DEADLINE_PASSED, {"request": request("r", 5, 4, deadline_ms=0)}),
]


@pytest.mark.parametrize("index", range(len(SPOILERS)))
def test_the_offer_itself_is_checked_in_order(index: int) -> None:
    d = Driver(WorkerKnobs(max_control_tasks=1))
    d.offer(an_offer())  # the worker is full, and the attempt known: later checks would fail too
    d.feed(wx.DrainRequested())
    changes: dict[str, object] = {}
    for _, spoiler in reversed(SPOILERS[index:]):
        changes.update(spoiler)
    reply = declined(d.offer(an_offer(**changes), queue_ms=1e6))
    assert reply.reason is SPOILERS[index][0] and reply.detail
    assert reply.load.pages == PAGES and reply.load.queue_ms == 1e6 and reply.load.active == 1


def test_the_worker_itself_is_checked_in_order() -> None:
    d = Driver(WorkerKnobs(max_control_tasks=1))
    d.offer(an_offer())
    d.feed(wx.DrainRequested())
    assert declined(d.offer(an_offer(), 1e6)).reason is DeclineReason.DUPLICATE
    assert declined(d.offer(an_offer("s"), 1e6)).reason is DeclineReason.DRAINING
    full = Driver(WorkerKnobs(max_control_tasks=1))
    full.offer(an_offer())
    assert declined(full.offer(an_offer("s"), 1e6)).reason is DeclineReason.QUEUE_FULL
    # Predicted 100 ms: the margin is the larger of 50 % and 200 ms.
    assert declined(Driver().offer(an_offer(), 300.5)).reason is DeclineReason.QUEUE_LONGER
    assert isinstance(Driver().offer(an_offer(), 300.0)[0], wfx.Reserve)
    long = replace(an_offer().candidate, queue_ms=1_000.0)
    assert isinstance(Driver().offer(an_offer(candidate=long), 1_500.0)[0], wfx.Reserve)
    assert declined(Driver().offer(an_offer(candidate=long), 1_501.0)).reason is DeclineReason.QUEUE_LONGER


@pytest.mark.parametrize("reason", [DeclineReason.INSUFFICIENT_PAGES, DeclineReason.PREFIX_GONE])
def test_the_reservation_is_the_last_check(reason: DeclineReason) -> None:
    d = Driver()
    d.offer(an_offer())
    reply = declined(d.feed(wx.ReservationRefused(A, reason, "3 of 9 pages", 5.0, PAGES)))
    assert (reply.reason, reply.detail) == (reason, "3 of 9 pages")
    assert len(d.machine) == 0 and not any(isinstance(e, wfx.Release) for e in d.log)
    # A copy of the declined offer, arriving late, is known.
    assert declined(d.offer(an_offer())).reason is DeclineReason.DUPLICATE


def test_every_decline_reason_is_counted_once_somewhere() -> None:
    covered = {reason for reason, _ in SPOILERS} | {
        DeclineReason.DUPLICATE,
        DeclineReason.DRAINING,
        DeclineReason.QUEUE_FULL,
        DeclineReason.QUEUE_LONGER,
        DeclineReason.INSUFFICIENT_PAGES,
        DeclineReason.PREFIX_GONE,
    }
    assert covered == set(DeclineReason) - {DeclineReason.UNSPECIFIED}


def test_restore_prefill_decode_with_usage_and_times() -> None:
    d = Driver()
    d.offer(an_offer(chain=CHAIN))
    effects = d.feed(wx.ReservationMade(A, 0, 20.0, PAGES))
    assert isinstance(effects[0], wfx.Reply) and effects[0].reply.accepted and effects[0].reply.load.active == 1
    assert effects[1] == wfx.StartRestore(an_offer(chain=CHAIN), 0)
    d.feed(wx.FetchStarted(A), after=3)
    effects = d.feed(wx.RestoreDone(A, 4, (TierTokens(Tier.SSD, 4, 400),)), after=10)
    assert effects == [wfx.StartRun(A, an_offer().request, 4)]
    d.feed(wx.LaneGranted(A), after=2)
    d.feed(wx.PrefillDone(A, 1), after=7)
    delta = d.feed(wx.TokensDrawn(A, (11, 12)), after=4)[0]
    assert isinstance(delta, wfx.EmitDelta)
    assert (delta.delta.index, delta.delta.tokens) == (0, (11, 12))
    assert delta.delta.usage == Usage(5, 4, 4, 1, 2, (TierTokens(Tier.SSD, 4, 400),))
    first = delta.delta.timings
    delta = d.feed(wx.TokensDrawn(A, (13,)))[0]
    assert isinstance(delta, wfx.EmitDelta) and delta.delta.index == 2 and delta.delta.usage.generated_tokens == 3
    assert delta.delta.timings == Timings()  # said once
    d.feed(wx.Finished(A, FinishReason.STOP))
    timings = d.result.timings
    assert timings == first
    assert (timings.queue_ms, timings.restore_ms, timings.prefill_ms, timings.first_token_ms) == (5, 10, 7, 4)
    assert timings.ttft_ms == 26
    assert not any(isinstance(e, wfx.Release) for e in d.log)  # the last iteration still touches pages
    assert d.feed(wx.Quiesced(A)) == [wfx.Release(A)]
    assert len(d.machine) == 0


@pytest.mark.parametrize(("drawing", "times"), [(0.0, (9, 0)), (4.0, (5, 4)), (30.0, (0, 9))])
def test_the_step_that_ends_a_prefill_and_draws_is_shared_out(drawing: float, times: tuple[float, float]) -> None:
    d = Driver()
    d.offer(an_offer())
    d.feed(wx.ReservationMade(A, 0))
    d.feed(wx.LaneGranted(A), after=3)
    d.feed(wx.PrefillDone(A, 5, drawing), after=9)
    delta = d.feed(wx.TokensDrawn(A, (11,)))[0]
    assert isinstance(delta, wfx.EmitDelta)
    timings = delta.delta.timings
    assert (timings.prefill_ms, timings.first_token_ms) == times
    assert (timings.queue_ms, timings.ttft_ms) == (3, 12), "what it is counted as changes nothing else"


@pytest.mark.parametrize(("behind", "times"), [(0.0, (3, 5, 4)), (2.0, (5, 3, 4)), (30.0, (8, 0, 4))])
def test_rows_of_others_in_the_step_with_its_first_are_a_wait(behind: float, times: tuple[float, ...]) -> None:
    d = Driver()
    d.offer(an_offer())
    d.feed(wx.ReservationMade(A, 0))
    d.feed(wx.LaneGranted(A), after=3)
    d.feed(wx.PrefillDone(A, 5, 4.0, behind), after=9)
    delta = d.feed(wx.TokensDrawn(A, (11,)))[0]
    assert isinstance(delta, wfx.EmitDelta)
    timings = delta.delta.timings
    assert (timings.queue_ms, timings.prefill_ms, timings.first_token_ms) == times and timings.ttft_ms == 12


def test_a_failed_restore_is_prefilled_instead() -> None:
    d = Driver()
    d.offer(an_offer(chain=CHAIN))
    d.feed(wx.ReservationMade(A, 0))
    assert d.feed(wx.RestoreFailed(A, 2, (TierTokens(Tier.SSD, 2),), "gone")) == [
        wfx.StartRun(A, an_offer().request, 2)
    ]
    d.feed(wx.PrefillDone(A, 3))
    delta = d.feed(wx.TokensDrawn(A, (1,)))[0]
    assert isinstance(delta, wfx.EmitDelta) and delta.delta.usage.cached_tokens == 2


def test_a_chain_that_became_resident_meanwhile_is_not_restored() -> None:
    d = Driver()
    d.offer(an_offer(chain=CHAIN))
    effects = d.feed(wx.ReservationMade(A, 4))
    assert isinstance(effects[1], wfx.StartRun) and effects[1].cached_tokens == 4


def test_a_resumed_attempt_counts_its_indices_on() -> None:
    d = Driver()
    value = replace(request("r", 3, 4, deadline_ms=9), tokens=(1, 2, 3, 80, 81))
    d.offer(an_offer(attempt=2, request=value))
    two = AssignmentId("r", 2)
    d.feed(wx.ReservationMade(two, 0))
    d.feed(wx.PrefillDone(two, 5))
    delta = d.feed(wx.TokensDrawn(two, (82,)))[0]
    assert isinstance(delta, wfx.EmitDelta)
    assert delta.delta.index == 2 and delta.delta.usage == Usage(3, 0, 0, 5, 1)


STAGES = ["reserving", "restoring", "queued", "prefilling", "decoding"]


def brought_to(stage: str) -> Driver:
    d = Driver()
    d.offer(an_offer(chain=CHAIN))
    steps: list[wx.WorkerEvent] = [
        wx.ReservationMade(A, 0),
        wx.RestoreDone(A, 4),
        wx.LaneGranted(A),
        wx.PrefillDone(A, 1),
    ]
    for step in steps[: STAGES.index(stage)]:
        d.feed(step)
    assert d.machine.phase(A).value == stage
    d.log.clear()
    return d


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancel", "tunnel", "drain", "superseded"])
def test_cancel_fences_at_once_and_releases_after_the_boundary(stage: str, how: str) -> None:
    d = brought_to(stage)
    match how:
        case "cancel":
            d.feed(wx.CancelReceived(Cancel(A, 7)))
        case "tunnel":
            d.feed(wx.TunnelLost(1))
        case "drain":
            d.feed(wx.DrainRequested())
            d.feed(wx.DrainExpired())
        case "superseded":
            d.offer(an_offer(attempt=2))
            d.feed(wx.ReservationRefused(AssignmentId("r", 2), DeclineReason.INSUFFICIENT_PAGES))
    said = [e for e in d.log if isinstance(e, (wfx.EmitResult, wfx.EmitDelta))]
    assert len(said) == (0 if how == "tunnel" else 1)
    if how != "tunnel":
        assert d.result.status is ResultStatus.CANCELLED
    assert not any(isinstance(e, wfx.Release) for e in d.log)
    # Late local events say nothing more.
    before = len(d.log)
    if stage == "reserving":
        assert d.machine.phase(A) is Phase.VOIDED
        d.feed(wx.ReservationMade(A, 0))
    else:
        assert any(isinstance(e, wfx.Stop) for e in d.log) and d.machine.phase(A) is Phase.FENCED
        for late in (wx.RestoreDone(A, 4), wx.TokensDrawn(A, (1,)), wx.Finished(A, FinishReason.LENGTH)):
            assert d.feed(late) == []
        d.feed(wx.CancelReceived(Cancel(A, 7)))
        assert len(d.log) == before
        d.feed(wx.Quiesced(A))
    assert [type(e) for e in d.log[before:]] in ([wfx.Release], [wfx.Release, wfx.Drained])
    assert d.machine.phase(A) is Phase.GONE
    assert d.feed(wx.Quiesced(A)) == []


def test_a_cancel_that_overtakes_its_offer_voids_it() -> None:
    d = Driver()
    assert d.feed(wx.CancelReceived(Cancel(A, 7))) == []
    assert declined(d.offer(an_offer())).reason is DeclineReason.DUPLICATE
    assert isinstance(d.offer(an_offer(attempt=2))[0], wfx.Reserve)


def test_a_cancel_of_an_earlier_attempt_leaves_the_later_alone() -> None:
    d = Driver()
    d.offer(an_offer(attempt=2))
    assert d.feed(wx.CancelReceived(Cancel(A, 7))) == []
    assert d.machine.phase(AssignmentId("r", 2)) is Phase.RESERVING
    assert d.machine.fence.counts["CancelReceived", WorkerFence.UNKNOWN_ASSIGNMENT] == 1


def test_drain_finishes_what_runs_and_says_so_once() -> None:
    d = brought_to("decoding")
    assert d.feed(wx.DrainRequested()) == []
    assert d.feed(wx.DrainRequested()) == []
    d.feed(wx.Finished(A, FinishReason.LENGTH))
    assert d.feed(wx.Quiesced(A)) == [wfx.Release(A), wfx.Drained(0)]
    assert d.feed(wx.DrainExpired()) == []


def test_a_failed_run_says_why_and_waits_for_its_boundary() -> None:
    d = brought_to("prefilling")
    d.feed(wx.RunFailed(A, "out of memory"))
    assert d.result.status is ResultStatus.FAILED and d.result.error == "out of memory"
    assert d.feed(wx.Quiesced(A)) == [wfx.Release(A)]


@pytest.mark.parametrize(
    ("stage", "event"),
    [
        ("reserving", wx.TokensDrawn(A, (1,))),
        ("restoring", wx.PrefillDone(A, 1)),
        ("queued", wx.TokensDrawn(A, (1,))),
        ("queued", wx.Quiesced(A)),
        ("prefilling", wx.PrefillDone(A, 0)),
        ("prefilling", wx.PrefillDone(A, 6)),
        ("decoding", wx.RestoreDone(A, 4)),
        ("decoding", wx.TokensDrawn(A, ())),
        ("decoding", wx.TokensDrawn(A, (1, 2, 3, 4, 5))),
    ],
)
def test_an_impossible_local_event_is_our_own_bug(stage: str, event: wx.WorkerEvent) -> None:
    with pytest.raises(ControllerBugError):
        brought_to(stage).feed(event)


def test_a_restart_forgets_and_declines_the_old_epoch() -> None:
    d = brought_to("decoding")
    assert d.feed(wx.Restarted(8)) == []
    assert len(d.machine) == 0
    assert declined(d.offer(an_offer())).reason is DeclineReason.WRONG_EPOCH
    assert isinstance(d.offer(an_offer(epoch=8))[0], wfx.Reserve)


def test_the_memory_of_attempts_is_bounded() -> None:
    d = Driver(WorkerKnobs(attempts_remembered=10, max_control_tasks=1_000))
    for number in range(50):
        d.feed(wx.CancelReceived(Cancel(AssignmentId(f"x{number}", 1), 7)))
    assert len(d.machine._attempts) == 10


def test_another_routers_first_attempt_is_no_duplicate_once_the_old_one_has_quiesced() -> None:
    d = Driver()
    d.offer(an_offer())
    d.feed(wx.ReservationMade(A, 0))
    d.feed(wx.TunnelLost(1))
    assert declined(d.offer(an_offer(), tunnel=2)).reason is DeclineReason.DUPLICATE
    d.feed(wx.Quiesced(A))
    assert [type(e) for e in d.offer(an_offer(), tunnel=3)] == [wfx.Reserve]
