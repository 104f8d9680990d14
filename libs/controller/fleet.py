"""What a router knows of its workers when it decides: their last heartbeats, residency, its own bookings, corrections.

Fed by discovery (`observe`, `forget`), by offer replies (fresh counts) and by the router machine's accounting effects
(`Booked`, `Accepted`, `Unbooked`, `Measured`). Pure; times in ms on the router's clock.

Between heartbeats the router adds what it has itself assigned, in predicted milliseconds. A booking stays until it
ends or until a heartbeat arrives that must contain it: one that came `settle_ms` after the acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libs.controller.discovery import Forgotten, Observed
from libs.controller.knobs import POLICY_KNOBS, PolicyKnobs
from libs.controller.policy import Corrections, work_ms
from libs.controller.protocol import AssignmentId, Candidate, Gone, Heartbeat, Load, OfferReply, Tier, TierCost
from libs.controller.residency import ResidencyIndex
from libs.controller.router_effects import Accepted, Booked, Measured, Unbooked


@dataclass(slots=True)
class Booking:
    """One assignment this router has made and the worker's heartbeats may not contain yet."""

    work_ms: float
    pages: int
    accepted_ms: float | None = None


@dataclass(slots=True)
class WorkerView:
    """One live worker process."""

    heartbeat: Heartbeat
    load: Load
    costs: dict[Tier, TierCost]
    bookings: dict[AssignmentId, Booking] = field(default_factory=dict)
    booked_ms: float = 0.0
    booked_pages: int = 0

    @property
    def worker(self) -> str:
        """Its id."""
        return self.heartbeat.worker

    @property
    def queue_ms(self) -> float:
        """Predicted wait of one more assignment."""
        return self.load.queue_ms + self.booked_ms


class Fleet:
    """See the module."""

    def __init__(self, knobs: PolicyKnobs = POLICY_KNOBS) -> None:
        self.knobs = knobs
        self.index = ResidencyIndex()
        self.corrections = Corrections(knobs)
        self._views: dict[str, WorkerView] = {}
        self._by_node: dict[str, str] = {}  # chunk directory -> worker that claims it
        self._booked: dict[AssignmentId, str] = {}

    def view(self, worker: str) -> WorkerView | None:
        """What is known of a worker now."""
        return self._views.get(worker)

    def views(self) -> dict[str, WorkerView]:
        """All, to read."""
        return self._views

    def worker_of(self, node: str) -> str | None:
        """The worker that claims a chunk directory."""
        return self._by_node.get(node)

    def observe(self, observed: Observed, now_ms: float) -> None:
        """An accepted heartbeat."""
        heartbeat = observed.heartbeat
        old = self._views.get(heartbeat.worker)
        if old is not None and old.heartbeat.epoch != heartbeat.epoch:
            self._drop(heartbeat.worker)
            old = None
        if observed.apply_resident:
            self.index.apply(heartbeat, now_ms, observed.reset)
        elif observed.reset:
            self.index.forget(heartbeat.worker)
        view = WorkerView(heartbeat, heartbeat.load, {cost.tier: cost for cost in heartbeat.tiers})
        if old is not None:
            view.bookings = old.bookings
            self._settle(view, now_ms)
            if old.heartbeat.node != heartbeat.node:
                self._by_node.pop(old.heartbeat.node, None)
        if heartbeat.node:
            self._by_node[heartbeat.node] = heartbeat.worker
        self._views[heartbeat.worker] = view

    def forget(self, forgotten: Forgotten) -> None:
        """A worker process is gone."""
        view = self._views.get(forgotten.worker)
        if view is not None and view.heartbeat.epoch == forgotten.epoch:
            self._drop(forgotten.worker)

    def replied(self, worker: str, reply: OfferReply, now_ms: float) -> None:
        """An offer reply's fresh counts: an acceptance's pages contain the assignment, its queue does not yet."""
        view = self._views.get(worker)
        if view is None or view.heartbeat.epoch != reply.epoch:
            return
        view.load = reply.load
        booking = view.bookings.get(reply.assignment)
        if booking is not None and reply.accepted:
            booking.pages = 0
        self._settle(view, now_ms)

    def missed(self, candidate: Candidate) -> None:
        """The worker does not hold what the candidate counted on; its next heartbeat says what else has changed."""
        self.index.drop(candidate.worker, Gone(candidate.prefix_hash, Tier.GPU))

    def account(self, effect: Booked | Accepted | Unbooked | Measured, now_ms: float) -> None:
        """An accounting effect of the router machine."""
        match effect:
            case Booked():
                view = self._views.get(effect.candidate.worker)
                if view is not None and view.heartbeat.epoch == effect.candidate.epoch:
                    booking = Booking(work_ms(effect.candidate), effect.candidate.needed_pages)
                    view.bookings[effect.assignment] = booking
                    self._sum(view)
                    self._booked[effect.assignment] = effect.candidate.worker
            case Accepted():
                booking_of = self._views.get(self._booked.get(effect.assignment, ""))
                if booking_of is not None and effect.assignment in booking_of.bookings:
                    booking_of.bookings[effect.assignment].accepted_ms = now_ms
            case Unbooked():
                self._unbook(effect.assignment)
            case Measured():
                self.corrections.learn(effect.candidate, effect.timings)

    def _unbook(self, assignment: AssignmentId) -> None:
        view = self._views.get(self._booked.pop(assignment, ""))
        if view is None:
            return
        view.bookings.pop(assignment, None)
        self._sum(view)

    def _settle(self, view: WorkerView, now_ms: float) -> None:
        """Drops the bookings that counts heard now must contain."""
        for assignment, booking in tuple(view.bookings.items()):
            if booking.accepted_ms is not None and now_ms >= booking.accepted_ms + self.knobs.settle_ms:
                del view.bookings[assignment]
                self._booked.pop(assignment, None)
        self._sum(view)

    def _sum(self, view: WorkerView) -> None:
        # Summed anew, not adjusted: floats must not drift.
        view.booked_ms = sum(booking.work_ms for booking in view.bookings.values())
        view.booked_pages = sum(booking.pages for booking in view.bookings.values())

    def _drop(self, worker: str) -> None:
        view = self._views.pop(worker)
        for assignment in view.bookings:
            self._booked.pop(assignment, None)
        if self._by_node.get(view.heartbeat.node) == worker:
            del self._by_node[view.heartbeat.node]
        self.index.forget(worker)
        self.corrections.forget(worker)
