"""What a router knows of its workers when it decides: their last heartbeats, residency, its own bookings, corrections.

Fed by discovery (`observe`, `forget`), by offer replies (fresh counts) and by the router machine's accounting effects
(`Booked`, `Accepted`, `Unbooked`, `Measured`). Pure; times in ms on the router's clock.

Between heartbeats the router adds what it has itself assigned, in predicted milliseconds, and takes the prefix that the
assignment computes for INFLIGHT there. A booking stays until it ends or until a heartbeat arrives that must contain it:
one that came `settle_ms` after the acceptance.

The lanes that will decode beside a first token are those that the worker has now: what it reads before this request,
it will be decoding by then. Of its own assignments a router knows at once when they begin and end; a heartbeat, which
comes too seldom for that, adds those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from libs.controller import smoothing
from libs.controller.corrections import Corrections, Said
from libs.controller.discovery import Forgotten, Observed
from libs.controller.fixed import Beyond, FixedCosts
from libs.controller.herds import Herds
from libs.controller.knobs import POLICY_KNOBS, PolicyKnobs
from libs.controller.policy import decode_cost, work_ms
from libs.controller.protocol import (
    AssignmentId,
    Candidate,
    DecodeCost,
    Gone,
    Heartbeat,
    Load,
    OfferReply,
    PrefillCost,
    Tier,
    TierCost,
)
from libs.controller.residency import ResidencyIndex
from libs.controller.router_effects import Accepted, Booked, Measured, Unbooked
from libs.controller.sources import Places
from libs.controller.table import Table

_CHAINS = 4_096  # planned requests whose chains are remembered until they are booked


Boundaries = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a chain's chunks: keys in the residency index, and ends."""


@dataclass(slots=True)
class Booking:
    """One assignment this router has made and the worker's heartbeats may not contain yet."""

    work_ms: float
    pages: int
    booked_ms: float
    accepted_ms: float | None = None
    assumed: tuple[tuple[int, float], ...] = ()  # boundaries it computes: key and arrival


@dataclass(slots=True)
class WorkerView:
    """One live worker process."""

    heartbeat: Heartbeat
    load: Load
    costs: dict[Tier, TierCost]  # smoothed, as the next two
    prefill: tuple[PrefillCost, ...] = ()
    decode: tuple[DecodeCost, ...] = ()
    prefill_noise: smoothing.Noise = smoothing.QUIET
    decode_noise: smoothing.Noise = smoothing.QUIET
    heard_ms: float = 0.0  # when `load` came
    reports: int = 1  # of its costs
    bookings: dict[AssignmentId, Booking] = field(default_factory=dict)
    idle_at_ms: float = 0.0  # when all that is known of will be worked off
    booked_pages: int = 0
    way_ms: float = 0.0  # from offer to first token, what is none of the worker's time, as far as believed
    own: dict[AssignmentId, Beyond] = field(default_factory=dict)  # this router's, from their offers to their ends
    others: int = 0  # assignments of other routers, when `load` came
    withheld: bool = False  # the router itself makes it no offers
    told: Said | None = None  # what `said` made of the costs as they are

    @property
    def draining(self) -> bool:
        """Whether it gets no new assignments, by its own word or by the router's."""
        return self.heartbeat.draining or self.withheld

    @property
    def worker(self) -> str:
        """Its id."""
        return self.heartbeat.worker

    def queue_ms(self, now_ms: float) -> float:
        """Predicted wait of one more assignment: the worker works while nothing is heard of it."""
        return max(0.0, self.idle_at_ms - now_ms)

    def said(self) -> Said:
        """Of its costs."""
        told = self.told
        if told is None:
            rates = [1 / cost.bytes_per_ms for cost in self.costs.values() if cost.bytes_per_ms > 0]
            told = self.told = Said(
                _mean([one.ms_per_token for one in self.prefill]),
                _mean([one.step_ms for one in self.decode]),
                _mean(rates),
                self.prefill_noise.smoothed,
                self.decode_noise.smoothed,
            )
        return told

    def report(self, heartbeat: Heartbeat, least_share: float) -> None:
        """One more heartbeat of the process: its costs are smoothed."""
        self.reports += 1
        share = max(least_share, 1 / self.reports)  # the mean of the first few
        was = self.said()
        self.prefill_noise = smoothing.noise(
            self.prefill_noise, was.prefill_ms, _mean([one.ms_per_token for one in heartbeat.prefill]), share
        )
        self.decode_noise = smoothing.noise(
            self.decode_noise, was.first_ms, _mean([one.step_ms for one in heartbeat.decode]), share
        )
        self.costs = smoothing.tiers(self.costs, heartbeat.tiers, share)
        self.prefill = smoothing.prefill(self.prefill, heartbeat.prefill, share)
        self.decode = smoothing.decode(self.decode, heartbeat.decode, share)
        self.heartbeat, self.told = heartbeat, None

    @property
    def lanes(self) -> int:
        """That decode, or will by the time a request that comes now draws its first token."""
        return self.others + len(self.own)

    def heard(self, load: Load, now_ms: float) -> None:
        """Counts of the worker. (They may contain an assignment whose acceptance is still on its way.)"""
        self.load, self.heard_ms, self.others = load, now_ms, max(0, load.active - len(self.own))

    @property
    def free_pages(self) -> int:
        """Predicted to be free now."""
        return max(0, self.load.pages.free - self.booked_pages)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class Fleet:
    """See the module."""

    def __init__(self, knobs: PolicyKnobs = POLICY_KNOBS) -> None:
        self.knobs = knobs
        self.index = ResidencyIndex()
        self.corrections = Corrections(knobs)
        self.fixed = FixedCosts(knobs)
        self.herds = Herds(knobs.herd_ms)
        self.places = Places(self._slot_of_node)
        self._views: dict[str, WorkerView] = {}
        self._by_node: dict[str, str] = {}  # chunk directory -> worker that claims it
        self._booked: dict[AssignmentId, str] = {}
        self._own: dict[AssignmentId, str] = {}
        self._table = Table(knobs)
        self._stale: set[str] = set()  # workers whose columns are
        self._moved: set[str] = set()  # and of which only queue and free pages are others
        self._chains: dict[tuple[str, str], Boundaries] = {}

    def view(self, worker: str) -> WorkerView | None:
        """What is known of a worker now."""
        return self._views.get(worker)

    def views(self) -> dict[str, WorkerView]:
        """All, to read."""
        return self._views

    def worker_of(self, node: str) -> str | None:
        """The worker that claims a chunk directory."""
        return self._by_node.get(node)

    def table(self) -> Table:
        """The columns, as of now."""
        if self.corrections.changed:
            self._stale |= self.corrections.changed
            self.corrections.changed.clear()
        for worker in self._stale:
            view = self._views.get(worker)
            if view is not None:
                self.corrections.reported(worker, view.said())
                self._table.write(self.index.slot(worker), view, self.corrections.of(worker))
        for worker in self._moved - self._stale:
            view = self._views.get(worker)
            if view is not None:
                self._table.moved(self.index.slot(worker), view)
        self._stale.clear()
        self._moved.clear()
        return self._table

    def planned(self, request_id: str, fingerprint: str, boundaries: Boundaries) -> None:
        """The chain of a request that may be booked next: every chunk's key and end."""
        self._chains.pop((request_id, fingerprint), None)
        self._chains[request_id, fingerprint] = boundaries
        if len(self._chains) > _CHAINS:
            del self._chains[next(iter(self._chains))]

    def observe(self, observed: Observed, now_ms: float) -> None:
        """An accepted heartbeat."""
        heartbeat, worker = observed.heartbeat, observed.heartbeat.worker
        view = self._views.get(worker)
        if view is not None and view.heartbeat.epoch != heartbeat.epoch:
            self._drop(worker)
            view = None
        if observed.apply_resident:
            self.index.apply(heartbeat, now_ms, observed.reset)
        elif observed.reset:
            self.index.forget(worker)
        self.index.slot(worker)
        if view is None:
            costs = {cost.tier: cost for cost in heartbeat.tiers}
            view = WorkerView(heartbeat, heartbeat.load, costs, heartbeat.prefill, heartbeat.decode)
            self._views[worker] = view
        else:
            if view.heartbeat.node != heartbeat.node:
                self._by_node.pop(view.heartbeat.node, None)
                self.places.moved()
            view.report(heartbeat, self.knobs.cost_share)
        view.way_ms = self._way_ms(heartbeat)
        if heartbeat.node and self._by_node.get(heartbeat.node) != worker:
            self._by_node[heartbeat.node] = worker
            self.places.moved()
        view.heard(heartbeat.load, now_ms)
        self._settle(view, now_ms)
        self._stale.add(worker)

    def withhold(self, worker: str, withheld: bool) -> None:
        """Whether this router makes the worker no offers, whatever its heartbeats say: an operator drains it here."""
        view = self._views.get(worker)
        if view is not None and view.withheld != withheld:
            view.withheld = withheld
            self._stale.add(worker)

    def forget(self, forgotten: Forgotten) -> None:
        """A worker process is gone."""
        view = self._views.get(forgotten.worker)
        if view is not None and view.heartbeat.epoch == forgotten.epoch:
            self._drop(forgotten.worker)

    def replied(self, worker: str, reply: OfferReply, now_ms: float) -> None:
        """An offer reply's fresh counts: they contain what was accepted before; an acceptance's pages contain the
        assignment itself too, its queue does not yet. Of prefixes on their way it says nothing: what was assumed of
        those holds until a heartbeat does.
        """
        view = self._views.get(worker)
        if view is None or view.heartbeat.epoch != reply.epoch:
            return
        view.heard(reply.load, now_ms)
        booking = view.bookings.get(reply.assignment)
        if booking is not None and reply.accepted:
            booking.pages = 0
        for other in view.bookings.values():
            if other.accepted_ms is not None:
                other.work_ms = 0.0
                if self._contained(other, now_ms):
                    other.pages = 0
        self._sum(view)
        self._stale.add(worker)

    def missed(self, candidate: Candidate) -> None:
        """The worker does not hold what the candidate counted on; its next heartbeat says what else has changed.

        What a process did not hold says nothing of the one that has its name now.
        """
        view = self._views.get(candidate.worker)
        if view is None or view.heartbeat.epoch != candidate.epoch:
            return
        tier = Tier.INFLIGHT if candidate.tier is Tier.INFLIGHT else Tier.GPU
        self.index.drop(candidate.worker, Gone(candidate.prefix_hash, tier))

    def account(self, effect: Booked | Accepted | Unbooked | Measured, now_ms: float) -> None:
        """An accounting effect of the router machine."""
        match effect:
            case Booked():
                self.herds.booked(effect.assignment, effect.candidate.worker, now_ms)
                view = self._views.get(effect.candidate.worker)
                if view is not None and view.heartbeat.epoch == effect.candidate.epoch:
                    booking = Booking(work_ms(effect.candidate), effect.candidate.needed_pages, now_ms)
                    booking.assumed = self._assume(effect.assignment, effect.candidate, now_ms)
                    view.bookings[effect.assignment] = booking
                    self._sum(view)
                    self._booked[effect.assignment] = effect.candidate.worker
                    self._begun(view, effect.assignment, effect.candidate)
            case Accepted():
                view = self._views.get(self._booked.get(effect.assignment, ""))
                if view is not None and effect.assignment in view.bookings:
                    view.bookings[effect.assignment].accepted_ms = now_ms
            case Unbooked():
                self._unbook(effect.assignment)
                self._ended(effect.assignment)
            case Measured():
                view = self._views.get(effect.candidate.worker)
                if view is not None and view.heartbeat.epoch == effect.candidate.epoch:
                    self._learn(view, effect)

    def _learn(self, view: WorkerView, effect: Measured) -> None:
        known = view.own.get(effect.assignment) if effect.assignment is not None else None
        beyond, timings = known or Beyond(), effect.timings
        self.fixed.learn(effect.candidate, timings, effect.way_ms, beyond)
        terms = replace(
            timings,
            queue_ms=timings.queue_ms - beyond.handoff_ms,
            first_token_ms=timings.first_token_ms - effect.way_ms,
        )
        self.corrections.learn(effect.candidate, terms, view.said(), beyond.fixed_ms + beyond.way_ms)
        view.way_ms = self._way_ms(view.heartbeat)
        self._stale.add(view.worker)

    def _way_ms(self, heartbeat: Heartbeat) -> float:
        return self.fixed.way_ms(heartbeat.models[0], heartbeat.worker) if heartbeat.models else 0.0

    def _begun(self, view: WorkerView, assignment: AssignmentId, candidate: Candidate) -> None:
        before = self._step_ms(view)
        view.own[assignment] = self.fixed.predicted(candidate, view.way_ms)
        self._own[assignment] = view.worker
        self._lanes_moved(view, before)

    def _ended(self, assignment: AssignmentId) -> None:
        view = self._views.get(self._own.pop(assignment, ""))
        if view is not None:
            before = self._step_ms(view)
            del view.own[assignment]
            self._lanes_moved(view, before)

    def _lanes_moved(self, view: WorkerView, before: tuple[float, float]) -> None:
        """Most often one lane more is the same bucket of what was measured."""
        if self._step_ms(view) != before:
            self._stale.add(view.worker)

    def _step_ms(self, view: WorkerView) -> tuple[float, float]:
        lanes, knobs = view.lanes, self.knobs
        step_ms = decode_cost(view.decode, lanes, knobs) if lanes else 0.0
        return step_ms, decode_cost(view.decode, lanes + 1, knobs)

    def _unbook(self, assignment: AssignmentId) -> None:
        view = self._views.get(self._booked.pop(assignment, ""))
        if view is None:
            return
        booking = view.bookings.pop(assignment, None)
        if booking is not None:
            self._unassume(view.worker, booking)
        self._sum(view)

    def _settle(self, view: WorkerView, now_ms: float) -> None:
        """Drops the bookings that a heartbeat heard now must contain."""
        for assignment, booking in tuple(view.bookings.items()):
            if self._contained(booking, now_ms):
                del view.bookings[assignment]
                self._booked.pop(assignment, None)
                self._unassume(view.worker, booking)
        self._sum(view)

    def _contained(self, booking: Booking, now_ms: float) -> bool:
        """Whether the worker's counts that are heard now must contain it."""
        return booking.accepted_ms is not None and now_ms >= booking.accepted_ms + self.knobs.settle_ms

    def _assume(self, assignment: AssignmentId, candidate: Candidate, now_ms: float) -> tuple[tuple[int, float], ...]:
        """What an assignment will compute is on its way to the worker's pages, each boundary with its arrival."""
        boundaries = self._chains.pop((assignment.request_id, candidate.fingerprint), None)
        slot = self.index.slot_of(candidate.worker)
        if boundaries is None or slot is None:
            return ()
        begins = now_ms + max(candidate.queue_ms, candidate.load_ms) + candidate.restore_ms
        per_token, cached, holders = candidate.prefill_ms_per_token, candidate.cached_tokens, self.index.gpu.get
        assumed = [
            (key, begins + max(0, end - cached) * per_token)
            for key, end in zip(*boundaries, strict=True)
            if not holders(key, 0) >> slot & 1
        ]
        self.index.assume(slot, assumed)
        return tuple(assumed)

    def _unassume(self, worker: str, booking: Booking) -> None:
        slot = self.index.slot_of(worker)
        if slot is not None:
            self.index.unassume(slot, booking.assumed)

    def _slot_of_node(self, node: str) -> int | None:
        worker = self._by_node.get(node)
        return None if worker is None else self.index.slot_of(worker)

    def _sum(self, view: WorkerView) -> None:
        # Summed anew, not adjusted: floats must not drift.
        idle_at = view.heard_ms + view.load.queue_ms
        for booking in view.bookings.values():  # in the order in which they were made
            idle_at = max(idle_at, booking.booked_ms) + booking.work_ms
        view.idle_at_ms = idle_at
        view.booked_pages = sum([booking.pages for booking in view.bookings.values()])
        self._moved.add(view.worker)

    def _drop(self, worker: str) -> None:
        view = self._views.pop(worker)
        for assignment, booking in view.bookings.items():
            self._booked.pop(assignment, None)
            self._unassume(worker, booking)
        for assignment in view.own:
            self._own.pop(assignment, None)
        if self._by_node.get(view.heartbeat.node) == worker:
            del self._by_node[view.heartbeat.node]
        slot = self.index.slot_of(worker)
        if slot is not None:
            self._table.clear(slot)
        self.index.release(worker)
        self.corrections.forget(worker)
        self.fixed.forget(worker)
        self.places.moved()
