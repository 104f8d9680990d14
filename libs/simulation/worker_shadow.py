"""What a worker process's effects have said so far: an account beside the machine, kept by other rules than its own.

Invariant 3 on the worker's side: an assignment that was cancelled, ended or lost its tunnel says nothing more and
starts nothing more; what it was told is not ignored; every offer has one answer and every acceptance one end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.controller import worker_events as wx
from libs.controller.protocol import AssignmentId, DeclineReason, Offer, ResultStatus
from libs.controller.worker_effects import (
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
from libs.simulation import declared
from libs.simulation.invariants import Invariant
from libs.simulation.schedule import WorkerSpec

QUEUE_MARGIN_RATIO = 0.5  # of its predicted queue, by which the real one may exceed it

_NEVER_FOR_SILENT = (Reply, EmitDelta, EmitResult, StartRestore, StartRun)


@dataclass(slots=True)
class _Known:
    offer: Offer
    tunnel: int
    silent: bool = False
    runs: bool = False
    replied: bool = False


@dataclass(slots=True)
class WorkerShadow(Invariant):
    """Of one worker process."""

    name = "3 only the active attempt"
    spec: WorkerSpec
    epoch: int = 0
    known: dict[AssignmentId, _Known] = field(default_factory=dict)
    draining: bool = False

    def handled(self, worker: str, event: wx.WorkerEvent, effects: list[WorkerEffect]) -> None:
        """An event had these effects."""
        must_end: list[AssignmentId] = []
        tell = True
        match event:
            case wx.OfferReceived():
                key = event.offer.assignment
                answers = [e for e in effects if isinstance(e, Reserve | Reply) and _key(e) == key]
                if len(answers) != 1:
                    raise self.broken(f"{worker}: {event} has {len(answers)} answers: {effects}")
                self._answered(worker, event, answers[0])
                if event.offer.epoch == self.epoch:
                    must_end = [
                        other
                        for other, known in self.known.items()
                        if other.request_id == key.request_id and other.attempt < key.attempt and not known.silent
                    ]
            case wx.CancelReceived():
                known = self.known.get(event.cancel.assignment)
                if known is not None and event.cancel.epoch == self.epoch and not known.silent:
                    must_end = [event.cancel.assignment]
                elif effects:
                    raise self.broken(f"{worker}: {event} is about nothing and caused {effects}")
            case wx.TunnelLost():
                must_end = [
                    key for key, known in self.known.items() if known.tunnel == event.tunnel and not known.silent
                ]
                tell = False
            case wx.DrainExpired():
                if not self.draining and effects:
                    raise self.broken(f"{worker} does not drain, and {event} caused {effects}")
                must_end = [key for key, known in self.known.items() if not known.silent] if self.draining else []
            case wx.ReservationRefused():
                known = self.known.get(event.assignment)
                if known is not None and known.silent:
                    del self.known[event.assignment]  # given up meanwhile: nobody is told
            case wx.DrainRequested():
                self.draining = True
            case wx.Restarted():
                self.epoch, self.draining = event.epoch, False
                self.known.clear()
            case _:
                pass
        running = {key for key in must_end if self.known[key].runs}
        results: list[AssignmentId] = []
        for effect in effects:
            about = _key(effect)
            if about is None:
                continue
            key = about
            known = self.known.get(key)
            answer = isinstance(event, wx.OfferReceived) and isinstance(effect, Reply)
            if known is not None and known.silent and isinstance(effect, _NEVER_FOR_SILENT) and not answer:
                raise self.broken(f"{worker}: {key} is silent; {event} made it say {effect}")
            if not answer:
                self._apply(worker, key, known, effect, results)
        for key in must_end:
            known = self.known[key]
            if tell and key not in results:
                raise self.broken(f"{worker}: {event} did not end {key}")
            if not tell and key in results:
                raise self.broken(f"{worker}: {key} has lost its tunnel and says its end on it")
            if key in running and not any(isinstance(e, Stop) and e.assignment == key for e in effects):
                raise self.broken(f"{worker}: {event} did not stop {key}")
            known.silent = True

    def _reasons(self, event: wx.OfferReceived) -> dict[DeclineReason, bool]:
        """Which of the reasons to decline an offer before anything is reserved hold."""
        offer, spec = event.offer, self.spec
        predicted_ms = offer.candidate.queue_ms
        margin_ms = max(QUEUE_MARGIN_RATIO * predicted_ms, spec.queue_margin_ms)
        return {
            DeclineReason.WRONG_EPOCH: offer.epoch != self.epoch,
            DeclineReason.MODEL_NOT_LOADED: offer.fingerprint != declared.FINGERPRINT,
            DeclineReason.CONTEXT_EXCEEDED: len(offer.request.tokens) + offer.request.max_new_tokens > spec.context,
            DeclineReason.DEADLINE_PASSED: offer.request.deadline_ms < 1,
            DeclineReason.DUPLICATE: offer.assignment in self.known,
            DeclineReason.DRAINING: self.draining,
            DeclineReason.QUEUE_FULL: len(self.known) >= spec.control_tasks,
            DeclineReason.QUEUE_LONGER: event.queue_ms > predicted_ms + margin_ms,
        }

    def _answered(self, worker: str, event: wx.OfferReceived, answer: WorkerEffect) -> None:
        """It must take what no reason speaks against, and may name only a reason that holds."""
        reasons = self._reasons(event)
        if isinstance(answer, Reserve):
            against = [reason.name for reason, holds in reasons.items() if holds]
            if against:
                raise self.broken(f"{worker} takes {event} in spite of {', '.join(against)}")
            self.known[event.offer.assignment] = _Known(event.offer, event.tunnel)
        elif isinstance(answer, Reply):
            reason = answer.reply.reason
            # An attempt that ended here is a duplicate too: of that there is no account here.
            if answer.reply.accepted or not (reasons.get(reason) or reason is DeclineReason.DUPLICATE):
                raise self.broken(f"{worker} answers {event} with {answer}")

    def _apply(
        self, worker: str, key: AssignmentId, known: _Known | None, effect: WorkerEffect, results: list[AssignmentId]
    ) -> None:
        match effect:
            case Reply():
                if effect.reply.accepted:
                    if known is None or known.replied:
                        raise self.broken(f"{worker} accepts {key} unasked or twice")
                    known.replied = True
                elif known is not None and not known.silent and not known.replied:
                    del self.known[key]  # refused by the pool
            case StartRun() | StartRestore():
                if known is None:
                    raise self.broken(f"{worker} starts {key}, which it does not have")
                known.runs = True
            case EmitDelta():
                if known is None or not known.replied:
                    raise self.broken(f"{worker}: tokens of {key}, which was not accepted")
            case EmitResult():
                if known is None:
                    raise self.broken(f"{worker}: an end of {key}, which it does not have")
                if not known.replied and effect.result.status is not ResultStatus.CANCELLED:
                    raise self.broken(f"{worker}: an end of {key}, which was not accepted")
                results.append(key)
                known.silent = True
            case Release():
                if known is None:
                    raise self.broken(f"{worker} releases {key}, which it does not have")
                if not known.silent:
                    raise self.broken(f"{worker} releases {key}, which has not ended")
                del self.known[key]
            case _:
                pass


def _key(effect: WorkerEffect) -> AssignmentId | None:
    match effect:
        case Reply():
            return effect.reply.assignment
        case EmitDelta():
            return effect.delta.assignment
        case EmitResult():
            return effect.result.assignment
        case Reserve() | StartRestore():
            return effect.offer.assignment
        case StartRun() | Stop() | Release():
            return effect.assignment
        case _:
            return None
