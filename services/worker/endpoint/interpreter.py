"""Live interpreter of the worker machine: turns its effects into work, and what comes of the work into events.

Everything here runs on the event loop and is short. The machine's own events are handled one at a time; an effect that
has its answer at once (a reservation) puts it behind the effects still to be done, so that order is the machine's. What
takes long runs elsewhere: the device loop in its thread, whose news arrive once per iteration by
`call_soon_threadsafe`, and restores in tasks owned here. A completed page range is offered to the checkpointer the
moment its news arrive.

The invariant that everything leans on: pages are released only after `Quiesced`, and `Quiesced` is fed exactly once per
started run (its `JobEnded`) or stopped restore (its task's end).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from types import TracebackType
from typing import Self

from libs.continuation.chain import root
from libs.continuation.tenancy import owner
from libs.controller.fences import Fence
from libs.controller.knobs import WorkerKnobs
from libs.controller.protocol import AssignmentId, Cancel, DeclineReason, Load, Offer, OfferReply, Pages, Result, Tier
from libs.controller.worker import WorkerMachine
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
    Finished,
    LaneGranted,
    OfferReceived,
    PrefillDone,
    Quiesced,
    ReservationMade,
    ReservationRefused,
    Restarted,
    RunFailed,
    TokensDrawn,
    TunnelLost,
    WorkerEvent,
)
from libs.controller.worker_table import Phase
from libs.service.logs import get_logger
from services.worker.endpoint.outlets import Outlet
from services.worker.endpoint.parking import Parking
from services.worker.endpoint.restoring import Restoring
from services.worker.endpoint.spans import Spans
from services.worker.handlers import (
    Checkpointer,
    CheckpointRange,
    Job,
    JobAdvanced,
    JobEnded,
    JobEvent,
    JobPrefilled,
    JobStarted,
    JobTokens,
    Restorer,
    Runtime,
)
from services.worker.pages.admission import Wanted
from services.worker.pages.errors import PrefixGoneError, ReservationError
from services.worker.pages.pool import PagePool
from services.worker.pages.route import Continuation

log = get_logger(__name__)


class Interpreter(AbstractAsyncContextManager["Interpreter"]):
    """See the module. An async context manager: it owns the restores under way."""

    def __init__(
        self,
        *,
        epoch: int,
        contexts: dict[str, int],
        knobs: WorkerKnobs,
        pool: PagePool,
        runtime: Runtime,
        restorer: Restorer,
        checkpointer: Checkpointer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fence = Fence()
        self.machine = WorkerMachine(epoch, contexts, knobs, self.fence)
        self.pool = pool
        self.runtime = runtime
        self.checkpointer = checkpointer
        self.accepted = 0
        self.results: Counter[str] = Counter()
        self.on_change: Callable[[], None] = lambda: None
        """Called where a router should hear soon what this worker is like now: draining, an assignment's end."""
        self.before_results: Callable[[], None] = lambda: None
        """Called before results leave: routers must know what stays resident before a client can send its next turn."""
        self._results: list[tuple[Outlet, Result]] | None = None
        self.drained = asyncio.Event()
        self.cut = 0
        """Assignments that the end of the grace period cancelled."""
        self._clock = clock
        self._spans = Spans()
        self._restoring = Restoring(pool, restorer, self._restored)
        self.parking = Parking(pool, runtime, self._submit, lambda: self._restoring.running)
        self._outlets: dict[AssignmentId, Outlet] = {}
        self._offering: Outlet | None = None
        self._events: deque[WorkerEvent] = deque()
        self._busy = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.runtime.start(self._on_thread)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Every assignment still here is cancelled; returns when the restores have ended. The runtime closes after
        this.
        """
        for assignment in self.machine.assignments():
            self.cancel(assignment)
        self.parking.close()
        await self._restoring.aclose()

    # --- what comes in ---

    def begin(self, epoch: int) -> None:
        """The process has its epoch: offers that name it are considered from now on."""
        self._feed(Restarted(epoch))

    def offer(self, offer: Offer, tunnel: int, outlet: Outlet) -> None:
        """An offer; its reply is sent before this returns."""
        self._offering = outlet
        try:
            self._feed(OfferReceived(offer, tunnel, *self._now()))
        finally:
            self._offering = None

    def cancel(self, assignment: AssignmentId, epoch: int | None = None) -> None:
        """Gives an assignment up; `epoch` as the canceller believes it (None: this process's)."""
        believed = self.machine.epoch if epoch is None else epoch
        self._feed(CancelReceived(Cancel(assignment, believed)))

    def abandoned(self, assignment: AssignmentId, outlet: Outlet) -> None:
        """Whoever listened at this outlet has gone. Not for an offer that was declined: the assignment may be
        another's.
        """
        if self._outlets.get(assignment) is outlet:
            self.cancel(assignment)

    def tunnel_lost(self, tunnel: int) -> None:
        """Cancels what runs for a tunnel."""
        self._feed(TunnelLost(tunnel))

    def drain(self) -> None:
        """Declines offers from now on; `drained` is set when nothing is under way."""
        self._feed(DrainRequested())
        self.on_change()

    def expire_drain(self) -> None:
        """The grace period is over: cancels what still runs."""
        self._feed(DrainExpired())

    def load(self) -> Load:
        """Fresh counts."""
        return self.machine.load(*self._now())

    @property
    def outlets(self) -> int:
        """Accepted assignments whose result is still to be sent."""
        return len(self._outlets)

    # --- the machine ---

    def _feed(self, event: WorkerEvent) -> None:
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                for effect in self.machine.handle(self._events.popleft(), self._clock() * 1e3):
                    self._do(effect)
        finally:
            self._busy = False

    def _do(self, effect: WorkerEffect) -> None:
        match effect:
            case Reserve():
                self._events.append(self._reserve(effect.offer))
            case Reply():
                self._reply(effect.reply)
            case StartRestore():
                self._restoring.start(effect.offer, effect.resident_tokens)
            case StartRun():
                self._run(effect)
            case Stop():
                self._stop(effect.assignment)
            case EmitDelta():
                if outlet := self._outlets.get(effect.delta.assignment):
                    outlet.send(effect.delta)
            case EmitResult():
                self.results[effect.result.status.name.lower()] += 1
                self._spans.ended(effect.result)
                if outlet := self._outlets.pop(effect.result.assignment, None):
                    if self._results is not None:
                        self._results.append((outlet, effect.result))
                    else:
                        outlet.send(effect.result)
                        outlet.done()
            case Release():
                self._release(effect.assignment)
            case Drained():
                self.cut = effect.cancelled
                self.drained.set()

    def _reserve(self, offer: Offer) -> ReservationMade | ReservationRefused:
        request, assignment = offer.request, offer.assignment
        of = Continuation(offer.fingerprint, root(offer.fingerprint, request.tenant_salt), owner(request.tenant_salt))
        chain = offer.chain
        resident = 0
        if offer.candidate.tier in (Tier.GPU, Tier.INFLIGHT):
            resident = min(offer.candidate.cached_tokens, request.processed)
        elif chain:
            # A chain that begins behind what is resident here connects to nothing.
            resident = min(chain[0].chunk.start, request.processed)
        wanted = Wanted(of, request.tokens, request.max_new_tokens, resident, chain)
        try:
            with self._spans.reserving(offer):
                made = self.pool.reserve(assignment, wanted, self._clock())
        except ReservationError as error:
            gone = isinstance(error, PrefixGoneError)
            reason = DeclineReason.PREFIX_GONE if gone else DeclineReason.INSUFFICIENT_PAGES
            return ReservationRefused(assignment, reason, str(error), *self._now())
        self._restoring.reserved(assignment, made.restore)
        return ReservationMade(assignment, made.resident, *self._now())

    def _now(self) -> tuple[float, Pages]:
        """Queue and pages: what is accepted counts, whether the device loop has it already or not."""
        return self.runtime.queue((*self.parking.tokens, *self._restoring.tokens)).ms, self.pool.largest()

    def _reply(self, reply: OfferReply) -> None:
        # A reply always comes while its offer is being handled: reservations are made at once.
        outlet = self._offering
        if outlet is None:
            return
        if reply.accepted:
            self.accepted += 1
            self._outlets[reply.assignment] = outlet
        outlet.send(reply)
        if not reply.accepted:
            outlet.done()

    def _stop(self, assignment: AssignmentId) -> None:
        if self.parking.forget(assignment):
            self._events.append(Quiesced(assignment))
        elif not self._restoring.stop(assignment):
            self.runtime.cancel(assignment)

    def _run(self, effect: StartRun) -> None:
        assignment = effect.assignment
        job = Job(assignment, effect.request, self.pool.job_pages(assignment), effect.cached_tokens)
        if not self.parking.park(job):
            self._submit(job)

    def _submit(self, job: Job) -> None:
        try:
            self.runtime.submit(job)
        except Exception as error:
            # Whatever keeps a runtime from taking a job (a closed loop, a malformed grammar) is this request's end.
            log.warning("the runtime refused a job", request=job.assignment.request_id, error=str(error))
            self._feed(RunFailed(job.assignment, str(error)))
            self._feed(Quiesced(job.assignment))

    def _restored(self, event: WorkerEvent) -> None:
        self._feed(event)
        self.parking.look()

    def _release(self, assignment: AssignmentId) -> None:
        self._restoring.forget(assignment)
        self._offer_ranges(assignment, self.pool.release(assignment, self._clock()))
        self._spans.forget(assignment)
        # A lost tunnel ends an assignment without a result.
        if outlet := self._outlets.pop(assignment, None):
            outlet.done()
        self.parking.look()
        self.on_change()

    def _offer_ranges(self, assignment: AssignmentId, ranges: Sequence[CheckpointRange]) -> None:
        traceparent = self._spans.traceparent(assignment)
        for found in ranges:
            self.checkpointer.offer(replace(found, traceparent=traceparent) if traceparent else found)

    # --- the device loop's news ---

    def _on_thread(self, events: Sequence[JobEvent]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        loop.call_soon_threadsafe(self._on_job_events, events)

    def _on_job_events(self, events: Sequence[JobEvent]) -> None:
        """Results are kept back until all that ended has released its pages: see `before_results`."""
        self._results = []
        try:
            self._handle(events)
        finally:
            results, self._results = self._results, None
            if results:
                self.before_results()
            for outlet, result in results:
                outlet.send(result)
                outlet.done()
        self.parking.look()

    def _handle(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            assignment = event.assignment
            match event:
                case JobStarted():
                    self._spans.lane(assignment)
                    self._feed(LaneGranted(assignment))
                case JobAdvanced():
                    self._offer_ranges(assignment, self.pool.progress(assignment))
                case JobPrefilled():
                    self._offer_ranges(assignment, self.pool.progress(assignment))
                    self._spans.prefilled(assignment)
                    self._feed(PrefillDone(assignment, event.computed, event.drawing_ms, event.behind_ms))
                case JobTokens():
                    self._offer_ranges(assignment, self.pool.progress(assignment, event.tokens))
                    self._feed(TokensDrawn(assignment, event.tokens, event.logprobs))
                case JobEnded():
                    self._ended(event)

    def _ended(self, event: JobEnded) -> None:
        assignment = event.assignment
        if event.error:
            self._feed(RunFailed(assignment, event.error))
        elif not event.cancelled:
            self._feed(Finished(assignment, event.finish))
        elif self.machine.phase(assignment) is not Phase.FENCED:
            self._feed(RunFailed(assignment, "the device loop was closed"))
        self._feed(Quiesced(assignment))
