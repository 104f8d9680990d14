"""The worker machine: says yes only to what it has pages for, runs it, and never lets go of pages in use.

Decides without I/O: an event and the time (ms, any monotonic origin) go in, effects come out, in order. `worker_table`
holds the life of one assignment; this module holds the checks before acceptance, the fences and the actions.

What it guarantees, whatever routers and tunnels do:
- every offer gets one reply and, if accepted, one result; a lost tunnel or a cancel before the reply cuts that short;
- every reservation is released exactly once, after the local operation on its pages has quiesced;
- after a cancel is handled nothing more is emitted for the assignment but its CANCELLED result;
- a restore that fails costs time, never the request.
"""

from __future__ import annotations

from collections import Counter

from libs.controller.errors import ControllerBugError
from libs.controller.fences import Fence, WorkerFence
from libs.controller.knobs import WORKER_KNOBS, WorkerKnobs
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    DeclineReason,
    Delta,
    FinishReason,
    Load,
    Offer,
    OfferReply,
    Pages,
    Result,
    ResultStatus,
    Timings,
)
from libs.controller.worker_effects import (
    Drained,
    EmitDelta,
    EmitResult,
    Release,
    Reply,
    Reserve,
    StartRestore,
    StartRun,
    Stop,
    WorkerEffect,
)
from libs.controller.worker_events import (
    CancelReceived,
    DrainExpired,
    DrainRequested,
    FetchStarted,
    Finished,
    LaneGranted,
    OfferReceived,
    PrefillDone,
    Quiesced,
    ReservationMade,
    ReservationRefused,
    Restarted,
    RestoreDone,
    RestoreFailed,
    RunFailed,
    TokensDrawn,
    TunnelLost,
    WorkerEvent,
)
from libs.controller.worker_state import AssignmentState
from libs.controller.worker_table import RUNNING, TABLE, Phase, Trigger

# The tunnel of what came on one that is not known.
_ANY = -1

# Phases in which the assignment no longer says anything, so that late local events are normal.
_WAITING = frozenset({Phase.RESERVING, Phase.RESTORING, Phase.QUEUED})
_SILENT = frozenset({Phase.VOIDED, Phase.ENDING, Phase.FENCED})


class WorkerMachine:
    """See the module. Not reentrant; one per worker process.

    `contexts`: the loaded fingerprints and the longest sequence (tokens) each takes.
    """

    def __init__(
        self, epoch: int, contexts: dict[str, int], knobs: WorkerKnobs = WORKER_KNOBS, fence: Fence | None = None
    ) -> None:
        self.epoch = epoch
        self.knobs = knobs
        self.fence = fence if fence is not None else Fence()
        self.draining = False
        self.reached: Counter[tuple[Phase, Trigger, Phase]] = Counter()  # transitions taken, for coverage
        self.declines: Counter[DeclineReason] = Counter()
        self._contexts = dict(contexts)
        self._assignments: dict[AssignmentId, AssignmentState] = {}
        # Highest attempt heard of, by request and tunnel; oldest first. A repeated offer comes on its own tunnel:
        # another router's first attempt is none. Of a cancel the tunnel is not known (_ANY).
        self._attempts: dict[tuple[str, int], int] = {}
        self._cut = 0  # assignments the end of the grace period cancelled
        self._drained_said = False
        self._out: list[WorkerEffect] = []
        self._now = 0.0

    # --- what a shell may read ---

    def __len__(self) -> int:
        """Assignments that hold or may come to hold pages."""
        return len(self._assignments)

    def phase(self, assignment: AssignmentId) -> Phase:
        """Where an assignment is; GONE also if it never was here."""
        state = self._assignments.get(assignment)
        return state.phase if state else Phase.GONE

    def assignments(self) -> tuple[AssignmentId, ...]:
        """Those under way, oldest first."""
        return tuple(self._assignments)

    def load(self, queue_ms: float, pages: Pages) -> Load:
        """Fresh counts around what the pool and the runtime measured."""
        phases = [state.phase for state in self._assignments.values()]
        waiting = sum(phase in _WAITING for phase in phases)
        return Load(queue_ms, len(phases), phases.count(Phase.DECODING), waiting, pages)

    # --- events ---

    def handle(self, event: WorkerEvent, now_ms: float) -> list[WorkerEffect]:
        """Applies one event; returns the effects in order. Raises ControllerBugError if our own side erred."""
        self._now, self._out = now_ms, []
        match event:
            case OfferReceived():
                self._offer(event)
            case CancelReceived():
                self._cancelled(event, event.cancel)
            case TunnelLost():
                hit = [state for state in self._assignments.values() if state.tunnel == event.tunnel]
                self.fence.stops(WorkerFence.NO_TUNNEL, not hit, event)
                for state in hit:
                    self._end_early(state, Trigger.TUNNEL_LOST, event)
            case DrainRequested():
                if not self.fence.stops(WorkerFence.ALREADY_DRAINING, self.draining, event):
                    self.draining = True
            case DrainExpired():
                if not self.fence.stops(WorkerFence.NOT_DRAINING, not self.draining, event):
                    for state in tuple(self._assignments.values()):
                        self._cut += self._end_early(state, Trigger.CANCEL, event, "the worker's grace period is over")
            case Restarted():
                # The old process's pages, tunnels and operations are gone with it: nothing to release, nobody to tell.
                self.epoch, self.draining = event.epoch, False
                self._cut, self._drained_said = 0, False
                self._assignments.clear()
                self._attempts.clear()
            case _:
                self._local(event)
        if self.draining and not self._assignments and not self._drained_said:
            self._drained_said = True
            self._out.append(Drained(self._cut))
        return self._out

    def _local(self, event: WorkerEvent) -> None:
        """An event of our own pool, restore or runtime."""
        match event:
            case ReservationMade():
                if state := self._enter(event.assignment, Trigger.RESERVED, event):
                    self._reserved(state, event)
            case ReservationRefused():
                if state := self._enter(event.assignment, Trigger.REFUSED, event):
                    if state.phase is Phase.RESERVING:
                        self._decline(
                            state.offer, state.tunnel, event.reason, event.detail, event.queue_ms, event.pages
                        )
                    self._gone(state, release=False, trigger=Trigger.REFUSED)
            case FetchStarted():
                if state := self._enter(event.assignment, Trigger.FETCH_STARTED, event):
                    state.fetch_ms = self._now
                    self._move(state, Trigger.FETCH_STARTED, Phase.RESTORING)
            case RestoreDone():
                if state := self._enter(event.assignment, Trigger.RESTORED, event):
                    self._restored(state, event, Trigger.RESTORED)
            case RestoreFailed():
                if state := self._enter(event.assignment, Trigger.RESTORE_FAILED, event):
                    self._restored(state, event, Trigger.RESTORE_FAILED)
            case LaneGranted():
                if state := self._enter(event.assignment, Trigger.LANE_GRANTED, event):
                    state.lane_ms = self._now
                    self._move(state, Trigger.LANE_GRANTED, Phase.PREFILLING)
            case PrefillDone():
                if state := self._enter(event.assignment, Trigger.PREFILLED, event):
                    length = len(state.offer.request.tokens)
                    if not 1 <= event.computed_tokens <= length:
                        detail = f"{event.computed_tokens} tokens computed of {length}"
                        raise ControllerBugError(state.phase.value, "PrefillDone", detail)
                    # What the runtime says is what was done: it may have found more resident than the pool did.
                    state.computed = event.computed_tokens
                    state.cached = length - event.computed_tokens
                    began = state.lane_ms if state.lane_ms is not None else self._now
                    state.prefilled_ms = max(began, self._now - event.drawing_ms)
                    if state.lane_ms is not None:
                        state.lane_ms = min(began + event.behind_ms, state.prefilled_ms)
                    self._move(state, Trigger.PREFILLED, Phase.DECODING)
            case TokensDrawn():
                if state := self._enter(event.assignment, Trigger.TOKENS, event):
                    self._tokens(state, event)
            case Finished():
                if state := self._enter(event.assignment, Trigger.FINISHED, event):
                    self._result(state, ResultStatus.COMPLETED, event.finish_reason)
                    self._move(state, Trigger.FINISHED, Phase.ENDING)
            case RunFailed():
                if state := self._enter(event.assignment, Trigger.RUN_FAILED, event):
                    self._result(state, ResultStatus.FAILED, error=event.error)
                    self._move(state, Trigger.RUN_FAILED, Phase.ENDING)
            case Quiesced():
                if state := self._enter(event.assignment, Trigger.QUIESCED, event):
                    self._gone(state, release=True, trigger=Trigger.QUIESCED)
            case _:
                raise ControllerBugError("any", type(event).__name__, "not a worker event")

    # --- before acceptance ---

    def _offer(self, event: OfferReceived) -> None:
        offer = event.offer
        refusal = self._refusal(event)
        if offer.epoch == self.epoch:
            self._supersede(offer.assignment, event)
            self._remember(offer.assignment, event.tunnel)
        if refusal is not None:
            reason, detail = refusal
            self._decline(offer, event.tunnel, reason, detail, event.queue_ms, event.pages)
            return
        self._assignments[offer.assignment] = AssignmentState(offer, event.tunnel)
        self._out.append(Reserve(offer))

    def _refusal(self, event: OfferReceived) -> tuple[DeclineReason, str] | None:
        """The first check that fails, in the order of controller.md; the reservation itself is the last one."""
        offer = event.offer
        request = offer.request
        context = self._contexts.get(offer.fingerprint)
        if offer.epoch != self.epoch:
            return DeclineReason.WRONG_EPOCH, f"offered to epoch {offer.epoch}, this is {self.epoch}"
        if context is None:
            return DeclineReason.MODEL_NOT_LOADED, f"{offer.fingerprint[:16]} is not loaded"
        wanted = len(request.tokens) + request.max_new_tokens
        if wanted > context:
            return DeclineReason.CONTEXT_EXCEEDED, f"{wanted} tokens, the context takes {context}"
        if request.deadline_ms <= 0:
            return DeclineReason.DEADLINE_PASSED, "no time is left"
        known = max(self._attempts.get((request.request_id, tunnel), 0) for tunnel in (event.tunnel, _ANY))
        if offer.assignment.attempt <= known or offer.assignment in self._assignments:
            return DeclineReason.DUPLICATE, f"attempt {max(known, offer.assignment.attempt)} is known already"
        if self.draining:
            return DeclineReason.DRAINING, "the worker is draining"
        if len(self._assignments) >= self.knobs.max_control_tasks:
            return DeclineReason.QUEUE_FULL, f"{len(self._assignments)} assignments are under way"
        predicted = offer.candidate.queue_ms
        margin = max(self.knobs.queue_margin_ratio * predicted, self.knobs.queue_margin_ms)
        if event.queue_ms > predicted + margin:
            return DeclineReason.QUEUE_LONGER, f"the queue is {event.queue_ms:.0f} ms, predicted {predicted:.0f}"
        return None

    def _supersede(self, assignment: AssignmentId, event: OfferReceived) -> None:
        """A later attempt proves that the router gave up the earlier ones, even if their cancel was lost."""
        earlier = [
            state
            for known, state in self._assignments.items()
            if known.request_id == assignment.request_id and known.attempt < assignment.attempt
        ]
        for state in earlier:
            if (state.phase, Trigger.CANCEL) in TABLE:
                self._end_early(state, Trigger.CANCEL, event, "superseded by a later attempt")

    def _remember(self, assignment: AssignmentId, tunnel: int) -> None:
        key = (assignment.request_id, tunnel)
        self._attempts[key] = max(self._attempts.pop(key, 0), assignment.attempt)
        while len(self._attempts) > self.knobs.attempts_remembered:
            del self._attempts[next(iter(self._attempts))]

    def _decline(
        self, offer: Offer, tunnel: int, reason: DeclineReason, detail: str, queue_ms: float, pages: Pages
    ) -> None:
        self.declines[reason] += 1
        load = self.load(queue_ms, pages)
        self._out.append(Reply(tunnel, OfferReply(offer.assignment, self.epoch, False, reason, detail, load)))

    # --- fences ---

    def _enter(self, assignment: AssignmentId, trigger: Trigger, event: WorkerEvent) -> AssignmentState | None:
        """The assignment, if the table has this transition. No row: fenced where it is silent, else a bug of ours."""
        state = self._assignments.get(assignment)
        if state is None:
            self.fence.count(WorkerFence.FENCED, event)
            return None
        if (state.phase, trigger) in TABLE:
            return state
        if self.fence.stops(WorkerFence.FENCED, state.phase in _SILENT, event):
            return None
        raise ControllerBugError(state.phase.value, type(event).__name__, str(assignment))

    def _cancelled(self, event: CancelReceived, cancel: Cancel) -> None:
        stops = self.fence.stops
        if stops(WorkerFence.WRONG_EPOCH, cancel.epoch != self.epoch, event):
            return
        state = self._assignments.get(cancel.assignment)
        if state is None:
            # It may have overtaken its offer, which must then find that it is no longer wanted.
            self._remember(cancel.assignment, _ANY)
            self.fence.count(WorkerFence.UNKNOWN_ASSIGNMENT, event)
            return
        self._end_early(state, Trigger.CANCEL, event)

    # --- actions ---

    def _end_early(self, state: AssignmentState, trigger: Trigger, event: WorkerEvent, error: str = "") -> bool:
        """Fences the assignment; True if it was not silent already."""
        if self.fence.stops(WorkerFence.FENCED, (state.phase, trigger) not in TABLE, event):
            return False
        running = state.phase in RUNNING
        if trigger is Trigger.CANCEL:
            self._result(state, ResultStatus.CANCELLED, error=error)
        if running:
            self._out.append(Stop(state.offer.assignment))
        self._move(state, trigger, Phase.FENCED if running else Phase.VOIDED)
        return True

    def _reserved(self, state: AssignmentState, event: ReservationMade) -> None:
        if state.phase is Phase.VOIDED:
            self._gone(state, release=True, trigger=Trigger.RESERVED)
            return
        state.accepted_ms = self._now
        state.cached = event.resident_tokens
        offer = state.offer
        # A chain whose end is resident already (it came meanwhile) needs no restore.
        restore = bool(offer.chain) and offer.chain[-1].chunk.end > event.resident_tokens
        self._move(state, Trigger.RESERVED, Phase.RESTORING if restore else Phase.QUEUED)
        load = self.load(event.queue_ms, event.pages)
        self._out.append(Reply(state.tunnel, OfferReply(offer.assignment, self.epoch, True, load=load)))
        if restore:
            self._out.append(StartRestore(offer, event.resident_tokens))
        else:
            self._out.append(StartRun(offer.assignment, offer.request, state.cached))

    def _restored(self, state: AssignmentState, event: RestoreDone | RestoreFailed, trigger: Trigger) -> None:
        state.restored_ms = self._now
        state.cached = max(state.cached, event.cached_tokens)
        state.restored = event.restored
        self._move(state, trigger, Phase.QUEUED)
        self._out.append(StartRun(state.offer.assignment, state.offer.request, state.cached))

    def _tokens(self, state: AssignmentState, event: TokensDrawn) -> None:
        if not event.tokens:
            raise ControllerBugError(state.phase.value, "TokensDrawn", "an iteration that drew nothing says nothing")
        left = state.offer.request.max_new_tokens - state.generated
        if len(event.tokens) > left:
            raise ControllerBugError(state.phase.value, "TokensDrawn", f"{len(event.tokens)} tokens, {left} are left")
        timings = Timings()
        if state.first_ms is None:
            state.first_ms = self._now
            timings = state.timings()
        index = state.next_index
        state.generated += len(event.tokens)
        delta = Delta(state.offer.assignment, self.epoch, index, event.tokens, event.logprobs, state.usage(), timings)
        self._out.append(EmitDelta(state.tunnel, delta))
        self._move(state, Trigger.TOKENS, Phase.DECODING)

    def _result(
        self,
        state: AssignmentState,
        status: ResultStatus,
        finish_reason: FinishReason = FinishReason.UNSPECIFIED,
        error: str = "",
    ) -> None:
        result = Result(
            state.offer.assignment, self.epoch, status, finish_reason, error, state.usage(), state.timings()
        )
        self._out.append(EmitResult(state.tunnel, result))

    def _move(self, state: AssignmentState, trigger: Trigger, phase: Phase) -> None:
        if phase not in TABLE[state.phase, trigger]:
            raise ControllerBugError(state.phase.value, trigger.value, f"the action leads to {phase.value}")
        self.reached[state.phase, trigger, phase] += 1
        state.phase = phase

    def _gone(self, state: AssignmentState, release: bool, trigger: Trigger) -> None:
        self._move(state, trigger, Phase.GONE)
        del self._assignments[state.offer.assignment]
        if release:
            self._out.append(Release(state.offer.assignment))
