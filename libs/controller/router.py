"""The router machine: assigns each request to one worker at a time, and delivers each token once.

Decides without I/O: an event and the time (ms, any monotonic origin) go in, effects come out, in the order they must
happen in. `router_table` holds the automaton; this module holds its guards (`fences`) and actions.

What it guarantees for every `Submitted`, whatever workers and networks do, as long as time passes:
- exactly one terminal delivery, at the latest when the deadline timer fires;
- tokens with the indices base, base + 1, ... without gap or repetition, from one attempt at a time;
- after the first token only the variant that drew it goes on;
- whatever does not come from the active assignment changes nothing.

Overload: a request that no worker can take now waits in the fair queue; `CapacityFreed` opens a *wave* that wakes
waiters in fair order. A slot that a waiter cannot use passes on to the next one, each waiter at most once per wave.
A newcomer is planned at once (an impossible request must fail at once) but takes its place behind those who wait.

Of one worker only so many offers are unanswered at a time; whoever else would go there is held until it answers and
then planned anew (`offer_windows`). A request that would compute what others compute already is held until it can be
fetched (`holding`, `prefix_holds`). An offer that nobody answers in time speaks against nobody: like a decline for want
of room it spends no attempt, and a request that finds nobody else waits; its deadline bounds that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from libs.controller.errors import ControllerBugError
from libs.controller.fences import RouterFence
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    CancelledDelivery,
    DeclineReason,
    Delta,
    OfferReply,
    Result,
    ResultStatus,
    StatusCode,
    Submission,
    TokensDelivery,
)
from libs.controller.router_actions import RouterActions, must_have, resting
from libs.controller.router_effects import (
    Deliver,
    Measured,
    Outcome,
    RouterEffect,
    SendCancel,
    SetTimer,
    TimerId,
    TimerKind,
)
from libs.controller.router_events import (
    CapacityFreed,
    DeadlineReached,
    DeltaReceived,
    HoldExpired,
    Loss,
    OfferTimedOut,
    Planned,
    PrefixesReported,
    ReplyReceived,
    RequestCancelled,
    ResultReceived,
    RouteDropped,
    RouterEvent,
    Submitted,
    WorkerUnavailable,
)
from libs.controller.router_state import Attempt, RequestState
from libs.controller.router_table import Phase, Trigger

# Declines that say nothing against the plan but that there is no room now: they spend no attempt.
CAPACITY_DECLINES = frozenset({DeclineReason.INSUFFICIENT_PAGES, DeclineReason.QUEUE_FULL, DeclineReason.DRAINING})

# Of a loss before the offer was answered, against 1 for one after it.
UNANSWERED_BLAME = 0.5


class RouterMachine(RouterActions):
    """See the module. Not reentrant; one per router process."""

    # --- what a shell may read ---

    def __len__(self) -> int:
        """Live requests."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Requests in the fair queue."""
        return len(self._queue)

    @property
    def held(self) -> int:
        """Requests that have a plan and are not offered yet."""
        return len(self._windows) + len(self._holds)

    @property
    def awaited(self) -> Collection[str]:
        """The prefixes that requests are held for: news of them in a heartbeat is to be fed as `PrefixesReported`."""
        return self._holds.prefixes

    def phase(self, request_id: str) -> Phase:
        """Where a request is; DONE also if it never was here."""
        state = self._requests.get(request_id)
        return state.phase if state else Phase.DONE

    def phases(self) -> dict[Phase, int]:
        """How many requests are in each phase."""
        counts = dict.fromkeys(Phase, 0)
        for state in self._requests.values():
            counts[state.phase] += 1
        return counts

    # --- events ---

    def handle(self, event: RouterEvent, now_ms: float) -> list[RouterEffect]:
        """Applies one event; returns the effects in order. Raises ControllerBugError if our own side erred."""
        self._begin(now_ms)
        match event:
            case Submitted():
                self._submitted(event)
            case Planned():
                self._planned(event)
            case ReplyReceived():
                self._reply(event)
            case DeltaReceived():
                self._delta(event)
            case ResultReceived():
                self._result(event)
            case OfferTimedOut():
                state = self._active(event, event.assignment)
                if state is not None and self._step(state, Trigger.OFFER_TIMEOUT, event):
                    # Nobody refused: its worker has more to do than to answer. As where there is no room.
                    detail = "offer not answered in time"
                    self._over(state, Outcome.TIMED_OUT, detail, cancel=True, spent=False, starved=True, avoid=True)
                    self._offer_next(state)
            case HoldExpired():
                state = self._live(event, event.request_id)
                stale = state is not None and event.plan_id != state.plan_id
                if (
                    state is not None
                    and not self.fence.stops(RouterFence.STALE_PLAN, stale, event)
                    and self._step(state, Trigger.HOLD_OVER, event)
                ):
                    self._release(state, expired=True)
            case PrefixesReported():
                for request_id in self._holds.told((event.worker, event.epoch), event.prefixes):
                    state = self._requests[request_id]
                    if self._step(state, Trigger.PREFIX_NEWS, event):
                        self._release(state)
            case WorkerUnavailable():
                self._stirred.append((event.worker, event.epoch))
                self._unavailable(event)
            case RouteDropped():
                state = self._active(event, event.assignment, event.worker, event.epoch)
                if state is not None and self._step(state, Trigger.ROUTE_DROPPED, event):
                    # An offer that could not even be sent says something about the worker; a broken stream does not:
                    # its resume is best served where the state is.
                    unsent = state.phase is Phase.OFFERED
                    self._note_drop(state, _blame(state))
                    self._over(state, Outcome.ROUTE_DROPPED, event.reason, cancel=True, avoid=unsent)
                    self._offer_next(state)
            case RequestCancelled():
                state = self._live(event, event.request_id)
                other = state is not None and event.origin is not None and event.origin != state.origin
                if (
                    state is not None
                    and not self.fence.stops(RouterFence.OTHER_ORIGIN, other, event)
                    and self._step(state, Trigger.CANCELLED, event)
                ):
                    self._abandon(state, Outcome.CANCELLED, "cancelled by the requester")
                    delivery = CancelledDelivery(state.request.request_id, state.usage(), state.served())
                    self._end(state, delivery)
            case DeadlineReached():
                state = self._live(event, event.request_id)
                if (
                    state is not None
                    and not self.fence.stops(RouterFence.OTHER_ORIGIN, event.origin != state.origin, event)
                    and self._step(state, Trigger.DEADLINE, event)
                ):
                    waited = f" while it waited: {state.obstacle.detail}" if state.obstacle else ""
                    self._abandon(state, Outcome.DEADLINE, "deadline reached")
                    self._fail(state, StatusCode.DEADLINE_EXCEEDED, f"its deadline passed{waited}")
            case CapacityFreed():
                self._visited.clear()
                for _ in range(min(event.slots, len(self._queue))):
                    self._pass_slot(self.knobs.wake_passes)
        return self._finish()

    def _submitted(self, event: Submitted) -> None:
        request, base = event.submission.request, event.submission.delivered
        if self.fence.stops(RouterFence.DUPLICATE_SUBMISSION, request.request_id in self._requests, event):
            self._refuse(event, StatusCode.ALREADY_EXISTS, "is under way already: use a new request id")
            return
        problem = _problem(event.submission)
        if problem:
            self._refuse(event, StatusCode.INVALID_ARGUMENT, problem)
            return
        prompt = self._hash_prompt(request)
        rests_ms = self._guard.rests_ms(prompt, self._now)
        if rests_ms > 0:
            self._refuse(event, StatusCode.FAILED_PRECONDITION, resting(rests_ms))
            return
        self._arrivals += 1
        budget_ms = request.deadline_ms or self.knobs.default_deadline_ms
        state = RequestState(
            request=request,
            origin=event.origin,
            arrival=self._arrivals,
            deadline_at_ms=self._now + budget_ms,
            prompt=prompt,
            base=base,
            fingerprint=event.submission.fingerprint,
        )
        self._requests[request.request_id] = state
        self._out.append(SetTimer(TimerId(TimerKind.DEADLINE, request.request_id, event.origin), budget_ms))
        self._plan(state, fresh=True)

    def _planned(self, event: Planned) -> None:
        state = self._live(event, event.request_id)
        if state is None or self.fence.stops(RouterFence.STALE_PLAN, event.plan_id != state.plan_id, event):
            return
        plan = event.plan
        if plan.obstacle is None:
            if not plan.ranked:
                raise ControllerBugError(state.phase.value, "Planned", "neither candidates nor an obstacle")
            if not self._step(state, Trigger.PLAN_RANKED, event):
                return
            state.plan, state.obstacle = plan, None
            state.ranked = plan.ranked[: self.knobs.ranked_recorded]
            state.remaining = list(range(len(state.ranked)))
            state.planned_ms, state.planned_at_index, state.planned_avoid = self._now, state.delivered, state.avoid
            state.records, state.starved = [], True
            if plan.hold is not None and self._hold_for_prefix(state, plan.hold):
                state.ranked, state.remaining = (), []
                return
            newcomer = not state.admitted and state.waiter is None
            if newcomer and len(self._queue):
                state.ranked, state.remaining = (), []
                if self._wait(state):
                    self._visited.clear()
                    self._pass_slot(self.knobs.wake_passes)
            else:
                self._offer_next(state)
            return
        state.obstacle = plan.obstacle
        code = plan.obstacle.kind.code
        # A stream that has begun was feasible: it waits for its variant to come back, until its deadline.
        if code is not None and not state.generated:
            if self._step(state, Trigger.PLAN_IMPOSSIBLE, event):
                self._fail(state, code, plan.obstacle.detail)
        elif self._step(state, Trigger.PLAN_BLOCKED, event):
            self._wait(state)

    def _reply(self, event: ReplyReceived) -> None:
        reply = event.reply
        state = self._active(event, reply.assignment, event.worker, reply.epoch)
        if state is None:
            if reply.accepted and not self._is_active(reply.assignment):
                # It would run for nobody: the cancel sent with the timeout may have overtaken the offer.
                self._out.append(SendCancel(event.worker, Cancel(reply.assignment, reply.epoch)))
            return
        if reply.accepted:
            if self._step(state, Trigger.REPLY_ACCEPTED, event):
                self._accept(state)
        elif self._step(state, Trigger.REPLY_DECLINED, event):
            self._declined(state, reply)

    def _declined(self, state: RequestState, reply: OfferReply) -> None:
        roomless = reply.reason in CAPACITY_DECLINES
        # A stale prefix says nothing against this worker's other tiers and boundaries.
        stale_prefix = reply.reason is DeclineReason.PREFIX_GONE
        # Another router's attempt of this number still quiesces there (a resubmission): the next number is news to it.
        taken = reply.reason is DeclineReason.DUPLICATE
        choice = must_have(state).choice
        self._over(
            state,
            Outcome.DECLINED,
            f"declined {reply.reason.name}{': ' + reply.detail if reply.detail else ''}",
            decline=reply.reason,
            spent=not roomless,
            starved=roomless,
            drop_worker=not (stale_prefix or taken),
            avoid=not (stale_prefix or taken),
        )
        if taken:
            state.remaining.insert(0, choice)
        self._offer_next(state)

    def _delta(self, event: DeltaReceived) -> None:
        delta = event.delta
        state = self._active(event, delta.assignment, event.worker, delta.epoch)
        if state is None or self._bad_delta(state, delta, event) or not self._step(state, Trigger.DELTA, event):
            return
        attempt = must_have(state)
        if state.phase is Phase.OFFERED:
            self._accept(state)
        if attempt.first_delta_ms is None:
            attempt.first_delta_ms = self._now - attempt.offered_ms
            attempt.timings = delta.timings
            state.spent, state.avoid = 0, ()  # progress
        if state.usage_base is None:
            state.usage_base = delta.usage
            state.fingerprint = attempt.candidate.fingerprint
            state.tier = attempt.candidate.tier
        if not state.workers or state.workers[-1] != attempt.candidate.worker:
            state.workers += (attempt.candidate.worker,)
        attempt.usage = delta.usage
        attempt.delivered += len(delta.tokens)
        state.generated.extend(delta.tokens)
        state.phase = Phase.STREAMING
        self._out.append(
            Deliver(
                state.origin,
                TokensDelivery(
                    state.request.request_id,
                    delta.index,
                    delta.tokens,
                    delta.logprobs,
                    state.usage(),
                    attempt.candidate.fingerprint,
                ),
            )
        )

    def _bad_delta(self, state: RequestState, delta: Delta, event: DeltaReceived) -> bool:
        """Whether it is not exactly the next tokens."""
        count, due = len(delta.tokens), state.delivered
        malformed = count == 0 or (bool(delta.logprobs) and len(delta.logprobs) != count)
        stops = self.fence.stops
        return (
            stops(RouterFence.MALFORMED_DELTA, malformed, event)
            or stops(RouterFence.DUPLICATE_DELTA, delta.index < due and delta.index + count <= due, event)
            or stops(RouterFence.OVERLAPPING_DELTA, delta.index < due < delta.index + count, event)
            or stops(RouterFence.DELTA_GAP, delta.index > due, event)
            or stops(RouterFence.OVER_BUDGET, count > state.budget, event)
        )

    def _result(self, event: ResultReceived) -> None:
        result = event.result
        state = self._active(event, result.assignment, event.worker, result.epoch)
        if state is None:
            return
        attempt = must_have(state)
        claimed, delivered = result.usage.generated_tokens, attempt.delivered
        if result.status is not ResultStatus.COMPLETED:
            failed = result.status is ResultStatus.FAILED
            trigger = Trigger.RESULT_FAILED if failed else Trigger.RESULT_CANCELLED
            if self._step(state, trigger, event):
                self._settle(attempt, result)
                outcome = Outcome.FAILED if failed else Outcome.CANCELLED
                self._over(state, outcome, result.error or "cancelled by the worker", avoid=True)
                self._offer_next(state)
        elif claimed > delivered:
            if self._step(state, Trigger.RESULT_SHORT, event):
                self._over(state, Outcome.FAILED, f"{claimed - delivered} tokens never arrived", drop_worker=False)
                self._offer_next(state)
        elif self._step(state, Trigger.RESULT_COMPLETED, event):
            if claimed < delivered:
                self.fence.count(RouterFence.USAGE_MISMATCH, event)
            if state.usage_base is None:
                state.usage_base = result.usage
            self._settle(attempt, result)
            self._out.append(measured(attempt, result))
            self._complete(state, result.finish_reason)

    def _unavailable(self, event: WorkerUnavailable) -> None:
        lost = event.loss is not Loss.RETIRED
        process = (event.worker, event.epoch)
        hit = [self._requests[key] for key in self._by_process.get(process, {})]
        earliest = self._now - self.knobs.drop_window_ms
        dropped = [(state, weight) for at, state, weight in self._dropped.pop(process, ()) if at >= earliest]
        if lost:
            # However often its route was dropped there: one process is one loss.
            weights: dict[int, tuple[RequestState, float]] = {}
            for state, weight in (*dropped, *((state, _blame(state)) for state in hit)):
                weights[id(state)] = (state, max(weight, weights.get(id(state), (state, 0.0))[1]))
            blamed: dict[str, float] = {}
            for state, weight in weights.values():
                blamed[state.prompt] = max(blamed.get(state.prompt, 0.0), weight)
                state.losses += 1
                state.blame += weight
            for prompt, weight in blamed.items():
                self._guard.crashed(prompt, self._now, weight)
        trigger = Trigger.WORKER_LOST if lost else Trigger.WORKER_RETIRED
        for state in hit:
            if not self._step(state, trigger, event):
                continue
            outcome = Outcome.WORKER_LOST if lost else Outcome.WORKER_RETIRED
            # A worker that is only silent may still be computing: should the cancel reach it, the better.
            self._over(state, outcome, f"worker {event.worker} {event.loss.value}", cancel=True, avoid=True)
            self._offer_next(state)
        if lost:
            for state, _ in dropped:
                self._lost_before(state, event)

    def _lost_before(self, state: RequestState, event: WorkerUnavailable) -> None:
        """Its route was dropped a moment ago because its worker died: if that is one loss too many, it ends here."""
        live = self._requests.get(state.request.request_id) is state
        too_many = live and state.active is not None and state.blame >= self.knobs.worker_losses
        if too_many and self._step(state, Trigger.WORKER_LOST, event):
            self._over(state, Outcome.CANCELLED, f"worker {event.worker} {event.loss.value} before", cancel=True)
            self._offer_next(state)

    # --- guards ---

    def _live(self, event: RouterEvent, request_id: str) -> RequestState | None:
        state = self._requests.get(request_id)
        if state is None:
            self.fence.count(RouterFence.UNKNOWN_REQUEST, event)
        return state

    def _is_active(self, assignment: AssignmentId) -> bool:
        state = self._requests.get(assignment.request_id)
        return state is not None and state.active is not None and state.active.assignment == assignment

    def _active(
        self, event: RouterEvent, assignment: AssignmentId, worker: str | None = None, epoch: int = 0
    ) -> RequestState | None:
        """The request, if `assignment` is its active one and (where given) this worker process has it."""
        state = self._live(event, assignment.request_id)
        if state is None:
            return None
        active = state.active
        stops = self.fence.stops
        if active is None:
            self.fence.count(RouterFence.STALE_ATTEMPT, event)
            return None
        if stops(RouterFence.STALE_ATTEMPT, active.assignment != assignment, event):
            return None
        if worker is not None and (
            stops(RouterFence.WRONG_WORKER, active.candidate.worker != worker, event)
            or stops(RouterFence.WRONG_EPOCH, active.candidate.epoch != epoch, event)
        ):
            return None
        return state

    def _step(self, state: RequestState, trigger: Trigger, event: RouterEvent) -> bool:
        """Enters the table's row for this trigger; fenced if there is none."""
        return not self.fence.stops(RouterFence.WRONG_PHASE, not self._enter(state, trigger), event)


def _blame(state: RequestState) -> float:
    """How much the loss of its worker speaks against a request: less if the worker had not even answered the offer, as
    when workers die together and a resume is sent to one that is gone already. Not nothing: an offer too can kill."""
    return UNANSWERED_BLAME if state.phase is Phase.OFFERED else 1.0


def measured(attempt: Attempt, result: Result) -> Measured:
    """What a completed attempt teaches. Offer and first token take their way too: that is the first token's time."""
    told = result.timings
    way_ms = max(0.0, attempt.first_delta_ms - told.ttft_ms) if attempt.first_delta_ms is not None else 0.0
    timings = replace(told, first_token_ms=told.first_token_ms + way_ms)
    return Measured(attempt.candidate, result.usage, timings, way_ms, attempt.assignment)


def _problem(submission: Submission) -> str:
    """What is wrong with a submission; empty if nothing is."""
    request, delivered = submission.request, submission.delivered
    if not request.request_id:
        return "has no id: set request_id"
    if not request.tokens:
        return "has no tokens: at least one is needed"
    if not 1 <= request.output_start <= len(request.tokens):
        return f"output_start {request.output_start} is not within its {len(request.tokens)} tokens"
    if len(request.tokens) - request.output_start != delivered:
        return (
            f"has {len(request.tokens) - request.output_start} tokens after output_start but {delivered} delivered: "
            "they must be the same"
        )
    if request.max_new_tokens < (0 if delivered else 1):
        return f"max_new_tokens {request.max_new_tokens} leaves nothing to generate: at least 1"
    return ""
