"""The router machine's actions: what a transition does to its request, and to those that wait.

`router.RouterMachine` decides which transition an event is; the methods here carry it out. The order of effects is the
order in which a shell must obey: a worker is booked before its offer is sent, an attempt's cancel precedes the next
offer, the terminal delivery is last but for what it frees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from libs.controller.errors import ControllerBugError
from libs.controller.fair_queue import FairQueue, Refusal, Waiter
from libs.controller.fences import Fence
from libs.controller.knobs import ROUTER_KNOBS, RouterKnobs
from libs.controller.offer_windows import OfferWindows, Process
from libs.controller.prefix_holds import PrefixHolds
from libs.controller.prompt_guard import PromptGuard, prompt_hash
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    CancelledDelivery,
    CompletedDelivery,
    DeclineReason,
    ErrorDelivery,
    FinishReason,
    GenerationRequest,
    Offer,
    Result,
    StatusCode,
)
from libs.controller.router_effects import (
    Accepted,
    AttemptRecord,
    Booked,
    CancelTimer,
    CloseRoute,
    Deliver,
    Outcome,
    PlanRequested,
    RecordDecision,
    RouterEffect,
    SendCancel,
    SendOffer,
    SetTimer,
    TimerId,
    TimerKind,
    Unbooked,
)
from libs.controller.router_events import Herd, Hold, Submitted
from libs.controller.router_state import Attempt, RequestState
from libs.controller.router_table import TABLE, Phase, Trigger


class RouterActions:
    """State of all requests, and the actions on them."""

    def __init__(
        self,
        knobs: RouterKnobs = ROUTER_KNOBS,
        hash_prompt: Callable[[GenerationRequest], str] = prompt_hash,
        fence: Fence | None = None,
    ) -> None:
        self.knobs = knobs
        self.fence = fence if fence is not None else Fence()
        self._hash_prompt = hash_prompt
        self._guard = PromptGuard(knobs.prompt_crashes, knobs.prompt_rest_ms, knobs.prompts_remembered)
        self._queue = FairQueue(knobs.queue, knobs.queue_per_tenant, dict(knobs.tenant_weights))
        self._holds = PrefixHolds()
        self._stirred: list[Process] = []  # whose leading attempts ended in this step, or which are gone
        self._windows = OfferWindows(knobs.offers_unanswered, knobs.queue, dict(knobs.tenant_weights))
        self._requests: dict[str, RequestState] = {}
        self._by_process: dict[tuple[str, int], dict[str, None]] = {}  # (worker, epoch) -> requests active there
        # (worker, epoch) -> routes dropped there of late: (time, request, what a loss would say against it)
        self._dropped: dict[tuple[str, int], list[tuple[float, RequestState, float]]] = {}
        self._arrivals = 0
        self._plans = 0
        self._visited: set[str] = set()  # waiters this wave has tried
        self._out: list[RouterEffect] = []
        self._entered: list[tuple[RequestState, Phase, Trigger]] = []
        self._now = 0.0
        self.reached: Counter[tuple[Phase, Trigger, Phase]] = Counter()  # transitions taken, for coverage

    def _begin(self, now_ms: float) -> None:
        self._now, self._out, self._entered, self._stirred = now_ms, [], [], []

    def _finish(self) -> list[RouterEffect]:
        """Every action must have left its request where the table says it may."""
        self._look_at_held()
        for state, before, trigger in self._entered:
            self.reached[before, trigger, state.phase] += 1
            if state.phase not in TABLE[before, trigger]:
                raise ControllerBugError(before.value, trigger.value, f"the action led to {state.phase.value}")
        return self._out

    def _enter(self, state: RequestState, trigger: Trigger) -> bool:
        """Whether the table has a row for this; notes that it is taken."""
        if (state.phase, trigger) not in TABLE:
            return False
        self._entered.append((state, state.phase, trigger))
        return True

    def _plan(self, state: RequestState, fresh: bool, *, whole: bool = False) -> None:
        """Asks for candidates, unless what is known already ends the request."""
        rests_ms = self._guard.rests_ms(state.prompt, self._now)
        early = state.finished_early()
        if early is not None:
            self._complete(state, early)
        elif state.blame >= self.knobs.worker_losses:
            self._fail(state, StatusCode.INTERNAL, f"{state.losses} workers were lost while they ran it")
        elif rests_ms > 0:
            self._fail(state, StatusCode.INTERNAL, resting(rests_ms))
        elif state.spent >= self.knobs.attempts:
            text = f"{state.spent} attempts failed, the last one: {state.last_failure}; try again later"
            self._fail(state, StatusCode.UNAVAILABLE, text)
        else:
            self._plans += 1
            state.plan_id = self._plans
            state.phase = Phase.PLANNING
            request = state.attempt_request(self._now)
            herd = state.herd
            if herd is not None:
                herd = replace(herd, patience_ms=max(0.0, state.held_at_ms + herd.patience_ms - self._now))
            wanted = PlanRequested(request.request_id, state.plan_id, request, state.fingerprint, state.avoid, fresh)
            self._out.append(replace(wanted, whole=whole, herd=herd))

    def _offer_next(self, state: RequestState) -> None:
        """Offers to the best candidate left, or goes on without one."""
        exhausted = not state.remaining
        ended = (
            state.blame >= self.knobs.worker_losses
            or state.spent >= self.knobs.attempts
            or self._guard.rests_ms(state.prompt, self._now) > 0
        )
        if exhausted or ended:
            self._record(state)
            partial = state.plan.partial
            if exhausted and state.starved and not ended and not partial:
                self._wait(state)
            else:
                self._plan(state, fresh=True, whole=partial)
            return
        option = state.ranked[state.remaining[0]]
        candidate = option.candidate
        process = (candidate.worker, candidate.epoch)
        if not self._windows.open(state.request.request_id, process):
            self._hold(state, process)
            return
        choice = state.remaining.pop(0)
        state.attempt_number += 1
        state.admitted = True
        request = state.attempt_request(self._now)
        assignment = AssignmentId(request.request_id, state.attempt_number)
        state.active = state.last = Attempt(assignment, choice, candidate, self._now)
        state.phase = Phase.OFFERED
        self._by_process.setdefault(process, {})[request.request_id] = None
        self._windows.settled(request.request_id)
        self._windows.sent(process)
        # The worker holds the queue it counts itself against this one: corrected, a worker that overestimates its queue
        # would decline every offer.
        offered = replace(candidate, queue_ms=option.uncorrected_queue_ms)
        offer = Offer(assignment, candidate.epoch, request, candidate.fingerprint, offered, option.chain)
        timer = TimerId(TimerKind.OFFER, request.request_id, assignment.attempt)
        self._out += [
            Booked(assignment, candidate),
            SetTimer(timer, self.knobs.offer_timeout_ms),
            SendOffer(candidate.worker, offer),
        ]

    def _hold(self, state: RequestState, process: Process) -> None:
        """Until the worker it would go to has answered another offer; then it is planned anew."""
        self._windows.settled(state.request.request_id)
        if self._windows.hold(_waiter(state), process) is None:
            state.phase = Phase.HELD
            return
        text = f"{self.knobs.queue} requests wait for an answer of its worker already; try again later"
        self._record(state)
        self._fail(state, StatusCode.RESOURCE_EXHAUSTED, text)

    def _hold_for_prefix(self, state: RequestState, hold: Hold) -> bool:
        """Until others have computed what it would compute; False if too many are held already."""
        if len(self._holds) >= self.knobs.queue:
            return False
        request_id = state.request.request_id
        self._windows.settled(request_id)
        if state.herd is None:
            state.herd = Herd(hold.prefix, hold.tokens, self._holds.seat(hold), hold.alone_ms)
            state.held_at_ms = self._now
        else:
            state.herd = replace(state.herd, prefix=hold.prefix, tokens=hold.tokens)
        self._holds.add(request_id, hold)
        state.phase = Phase.HELD
        self._out.append(SetTimer(TimerId(TimerKind.HOLD, request_id, state.plan_id), hold.wait_ms))
        if state.waiter is not None:  # it was trying a slot: the next one may
            state.waiter = None
            self._pass_slot(state.passes)
        return True

    def _release(self, state: RequestState, *, expired: bool = False) -> None:
        """What it was held for is there, late or lost: it is planned anew, and may be held again."""
        self._unhold(state, expired=expired)
        state.held_ms = self._now - state.held_at_ms
        self._plan(state, fresh=False)

    def _unhold(self, state: RequestState, *, expired: bool = False) -> None:
        request_id = state.request.request_id
        if self._holds.remove(request_id) and not expired:
            self._out.append(CancelTimer(TimerId(TimerKind.HOLD, request_id, state.plan_id)))

    def _look_at_held(self) -> None:
        """Whoever is held for a window that is open now may use it; whose leaders have failed looks for others."""
        for process in self._stirred:
            for held in self._holds.led_by(process):
                state = self._requests[held]
                if self._enter(state, Trigger.PREFIX_NEWS):
                    self._release(state)
        while (request_id := self._windows.next()) is not None:
            state = self._requests[request_id]
            if not self._enter(state, Trigger.WINDOW_OPEN):
                raise ControllerBugError(state.phase.value, Trigger.WINDOW_OPEN.value, "it is not held")
            self._record(state)
            self._plan(state, fresh=state.plan.partial)

    def _accept(self, state: RequestState) -> None:
        attempt = must_have(state)
        self._windows.answered((attempt.candidate.worker, attempt.candidate.epoch))
        state.phase = Phase.ACCEPTED
        state.waiter = None  # its slot is used
        timer = TimerId(TimerKind.OFFER, attempt.assignment.request_id, attempt.assignment.attempt)
        self._out += [CancelTimer(timer), Accepted(attempt.assignment)]

    def _over(
        self,
        state: RequestState,
        outcome: Outcome,
        detail: str,
        *,
        decline: DeclineReason = DeclineReason.UNSPECIFIED,
        cancel: bool = False,
        spent: bool = True,
        starved: bool = False,
        drop_worker: bool = True,
        avoid: bool = False,
    ) -> None:
        """The active attempt is over: fenced from here on, written down, its worker told where that may help."""
        attempt = must_have(state)
        assignment, candidate = attempt.assignment, attempt.candidate
        state.active = None
        state.last_failure = detail
        state.spent += spent
        state.starved = state.starved and starved
        if drop_worker:
            state.remaining = [i for i in state.remaining if state.ranked[i].candidate.worker != candidate.worker]
        if avoid and candidate.worker not in state.avoid:
            state.avoid += (candidate.worker,)
        process = self._by_process[candidate.worker, candidate.epoch]
        process.pop(assignment.request_id)
        if not process:
            del self._by_process[candidate.worker, candidate.epoch]
        state.records.append(
            AttemptRecord(
                assignment.attempt,
                attempt.choice,
                outcome,
                decline,
                detail,
                candidate.ttft_ms,
                attempt.first_delta_ms,
                attempt.usage,
                attempt.timings,
            )
        )
        if state.plan.leads and not attempt.delivered:
            self._stirred.append((candidate.worker, candidate.epoch))
        if state.phase is Phase.OFFERED:
            self._windows.answered((candidate.worker, candidate.epoch))
            self._out.append(CancelTimer(TimerId(TimerKind.OFFER, assignment.request_id, assignment.attempt)))
        if cancel:
            self._out.append(SendCancel(candidate.worker, Cancel(assignment, candidate.epoch)))
        self._out += [CloseRoute(candidate.worker, assignment), Unbooked(assignment)]
        if attempt.delivered:
            # The plan was made for fewer tokens: a resume is planned anew.
            state.remaining = []
            state.starved = False

    def _wait(self, state: RequestState) -> bool:
        """Puts the request into the queue; False if a bound forbids it, which ends the request."""
        waiter, state.waiter = state.waiter, None
        self._windows.settled(state.request.request_id)
        if waiter is not None:
            state.phase = Phase.WAITING
            self._queue.restore(waiter)
            self._visited.add(waiter.key)
            self._pass_slot(state.passes)
            return True
        refusal = self._queue.add(_waiter(state))
        if refusal is None:
            state.phase = Phase.WAITING
            return True
        bound = self.knobs.queue if refusal is Refusal.QUEUE else self.knobs.queue_per_tenant
        whose = "requests" if refusal is Refusal.QUEUE else "requests of this tenant"
        self._fail(state, StatusCode.RESOURCE_EXHAUSTED, f"{bound} {whose} wait for capacity already; try again later")
        return False

    def _pass_slot(self, passes: int) -> None:
        """Lets the next waiter try to use a free slot."""
        waiter = self._queue.take(self._visited) if passes > 0 else None
        if waiter is None:
            return
        self._visited.add(waiter.key)
        state = self._requests[waiter.key]
        if not self._enter(state, Trigger.WOKEN):
            raise ControllerBugError(state.phase.value, Trigger.WOKEN.value, "a queued request that does not wait")
        state.waiter, state.passes = waiter, passes - 1
        self._plan(state, fresh=state.plan.partial)

    def _note_drop(self, state: RequestState, weight: float) -> None:
        """A process that dies loses its tunnels one by one: only the last says that it is lost."""
        candidate = must_have(state).candidate
        earliest = self._now - self.knobs.drop_window_ms
        for process in [process for process, drops in self._dropped.items() if drops[-1][0] < earliest]:
            del self._dropped[process]
        drops = self._dropped.setdefault((candidate.worker, candidate.epoch), [])
        drops[:] = [drop for drop in drops if drop[0] >= earliest]
        drops.append((self._now, state, weight))

    def _settle(self, attempt: Attempt, result: Result) -> None:
        attempt.usage, attempt.timings = result.usage, result.timings

    def _abandon(self, state: RequestState, outcome: Outcome, detail: str) -> None:
        """Ends whatever is under way because the request itself ends."""
        if state.active is not None:
            self._over(state, outcome, detail, cancel=True)
        self._queue.discard(state.request.request_id)

    def _complete(self, state: RequestState, reason: FinishReason) -> None:
        if state.active is not None:
            self._over(state, Outcome.COMPLETED, "", spent=False)
        self._end(state, CompletedDelivery(state.request.request_id, reason, state.usage(), state.served()))

    def _fail(self, state: RequestState, code: StatusCode, detail: str) -> None:
        self._end(state, self._error(state.request.request_id, code, detail, state))

    def _error(self, request_id: str, code: StatusCode, detail: str, state: RequestState | None) -> ErrorDelivery:
        retriable = code in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
        retry_after = self.knobs.retry_after_ms if retriable else 0
        text = f"request {request_id}: {detail}"
        if state is None:
            return ErrorDelivery(request_id, code, text, retry_after)
        return ErrorDelivery(request_id, code, text, retry_after, state.usage(), state.served())

    def _refuse(self, event: Submitted, code: StatusCode, detail: str) -> None:
        """A terminal delivery for a submission that never became a request."""
        request_id = event.submission.request.request_id
        self._out.append(Deliver(event.origin, self._error(request_id, code, detail, None)))

    def _end(
        self,
        state: RequestState,
        delivery: CompletedDelivery | ErrorDelivery | CancelledDelivery,
    ) -> None:
        """The one place where a request ends."""
        request_id = state.request.request_id
        self._record(state)
        self._windows.discard(request_id)
        self._unhold(state)
        state.phase = Phase.DONE
        del self._requests[request_id]
        self._out += [
            CancelTimer(TimerId(TimerKind.DEADLINE, request_id, state.origin)),
            Deliver(state.origin, delivery),
        ]
        if state.waiter is not None:  # it was trying a slot: the next one may
            self._pass_slot(state.passes)
        elif state.admitted and len(self._queue):  # it may have left room behind
            self._visited.clear()
            self._pass_slot(self.knobs.wake_passes)

    def _record(self, state: RequestState) -> None:
        """Writes the current plan down, once, if an attempt came of it."""
        if state.records:
            self._out.append(RecordDecision(state.decision()))
        state.records = []


def _waiter(state: RequestState) -> Waiter:
    """Its place in a queue."""
    request = state.request
    cost = float(len(request.tokens) + request.max_new_tokens)
    return Waiter(-request.priority, state.arrival, request.request_id, request.tenant, cost, bool(state.generated))


def must_have(state: RequestState) -> Attempt:
    if state.active is None:
        raise ControllerBugError(state.phase.value, "an attempt's event", "no attempt is active")
    return state.active


def resting(rests_ms: float) -> str:
    return (
        "its prompt was outstanding when two workers were lost and rests; "
        f"it may be tried again in {max(1, round(rests_ms / 1000))} s"
    )
