"""What a worker process's effects have said so far: an account beside the machine, kept by other rules than its own.

Invariant 3 on the worker's side: an assignment that was cancelled, ended or lost its tunnel says nothing more and
starts nothing more; what it was told is not ignored; every offer has one answer and every acceptance one end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.controller import worker_events as wx
from libs.controller.protocol import AssignmentId, Offer, ResultStatus
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
from libs.simulation.invariants import Invariant

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
                if isinstance(answers[0], Reserve):
                    if key in self.known or event.offer.epoch != self.epoch or self.draining:
                        raise self.broken(f"{worker} takes {key} in spite of all")
                    self.known[key] = _Known(event.offer, event.tunnel)
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
