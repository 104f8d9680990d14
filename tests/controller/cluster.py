"""A router and several workers, their machines joined by links that lose order, repeat and break. No clock, no I/O.

Every choice comes from outside (`random.Random(seed)` or hypothesis), so a failing schedule is a seed. The tokens of a
request are declared by `declared_token`: whatever attempts were needed, exactly those must reach the requester.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

from libs.controller import router_effects as fx
from libs.controller import router_events as rx
from libs.controller import worker_effects as wfx
from libs.controller import worker_events as wx
from libs.controller.catalog_facts import Chunk, Node
from libs.controller.fences import Fence
from libs.controller.knobs import RouterKnobs, WorkerKnobs
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
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
    Pages,
    RankedCandidate,
    Result,
    Submission,
    Tier,
    TierTokens,
    TokenLogprobs,
    TokensDelivery,
)
from libs.controller.router import RouterMachine
from libs.controller.wire import TunnelCodec
from libs.controller.worker import WorkerMachine

FINGERPRINT = "f" * 64
CONTEXT = 64


def declared_token(request_id: str, index: int) -> int:
    return (sum(request_id.encode()) * 31 + index * 7) % 997


def request(request_id: str, prompt: int = 5, budget: int = 6, **kwargs: object) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        model="m",
        tokens=tuple(range(1, prompt + 1)),
        output_start=prompt,
        max_new_tokens=budget,
        **kwargs,  # type: ignore[arg-type]
    )


@dataclass
class Job:
    """What the worker's restore and runtime are doing for one assignment."""

    offer: Offer
    stage: str  # restore, queued, prefilled, finished
    cached: int = 0
    drawn: int = 0
    stopping: bool = False


@dataclass
class SimWorker:
    name: str
    machine: WorkerMachine
    pages: int = 40
    reserved: dict[AssignmentId, int] = field(default_factory=dict)
    jobs: dict[AssignmentId, Job] = field(default_factory=dict)
    reserving: list[Offer] = field(default_factory=list)
    offers: dict[AssignmentId, Offer] = field(default_factory=dict)
    inbox: list[bytes] = field(default_factory=list)
    outbox: list[bytes] = field(default_factory=list)
    tunnel: int = 0
    drained: int = 0


class Cluster:
    def __init__(
        self,
        seed: int,
        workers: int = 3,
        knobs: RouterKnobs | None = None,
        router_fence: Fence | None = None,
        worker_fence: Fence | None = None,
        reorder: bool = True,
        worker_knobs: WorkerKnobs | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.reorder = reorder
        self.codec = TunnelCodec()
        self.router = RouterMachine(knobs or RouterKnobs(offers_unanswered=1 + seed % 3), fence=router_fence)
        self.worker_fence = worker_fence
        self.worker_knobs = worker_knobs or WorkerKnobs(max_control_tasks=3)
        self.workers: dict[str, SimWorker] = {}
        self.ended: list[WorkerMachine] = []  # of processes that are gone
        self.epochs = 0
        self.tunnels = 0
        for index in range(workers):
            self.start(f"w{index}")
        self.plans: list[fx.PlanRequested] = []
        self.timers: dict[fx.TimerId, float] = {}
        self.submitted: dict[tuple[str, int], GenerationRequest] = {}
        self.origins = 0
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.terminals: dict[tuple[str, int], list[object]] = defaultdict(list)
        self.decisions: list[fx.Decision] = []
        self.booked: set[AssignmentId] = set()
        self.active: dict[AssignmentId, tuple[str, int]] = {}
        self.offered: set[AssignmentId] = set()
        self.wanted: dict[str, int] = {}
        self.offers: set[AssignmentId] = set()
        self.trace: list[str] = []

    # --- workers ---

    def start(self, name: str) -> None:
        self.epochs += 1
        self.tunnels += 1
        if name in self.workers:
            self.ended.append(self.workers[name].machine)
        machine = WorkerMachine(self.epochs, {FINGERPRINT: CONTEXT}, self.worker_knobs, fence=self.worker_fence)
        self.workers[name] = SimWorker(name, machine, tunnel=self.tunnels)

    def kill(self, name: str, loss: rx.Loss = rx.Loss.PROCESS) -> None:
        epoch = self.workers[name].machine.epoch
        self.start(name)
        self.feed(rx.WorkerUnavailable(name, epoch, loss))

    def refuses(self, worker: SimWorker, event: wx.WorkerEvent) -> None:
        assert worker.machine.handle(event, self.now) == [], f"{event} caused something"

    def forge(self) -> None:
        """Something nobody may say, about an active assignment: it must change nothing."""
        if not self.active:
            return
        assignment = self.rng.choice(sorted(self.active))
        worker, epoch = self.active[assignment]
        live = [key for key in self.submitted if key[0] == assignment.request_id and not self.terminals[key]]
        key = live[0]
        value = self.submitted[key]
        due = len(value.tokens) - value.output_start + len(self.tokens[key])
        left = value.max_new_tokens - len(self.tokens[key])
        right = declared_token(assignment.request_id, due)
        match self.rng.randrange(6):
            case 0:
                self.feed(rx.DeltaReceived("nobody", Delta(assignment, epoch, due, (right,))))
            case 1:
                self.feed(rx.DeltaReceived(worker, Delta(assignment, epoch + 1, due, (right,))))
            case 2:
                bad = Delta(assignment, epoch, due, ()) if self.rng.random() < 0.5 else None
                odd = Delta(assignment, epoch, due, (right,), (TokenLogprobs(0.0), TokenLogprobs(0.0)))
                self.unmoved(rx.DeltaReceived(worker, bad or odd))
            case 3:
                if due:
                    self.unmoved(rx.DeltaReceived(worker, Delta(assignment, epoch, due - 1, (0, right))))
            case 4:
                self.unmoved(rx.DeltaReceived(worker, Delta(assignment, epoch, due, (right,) * (left + 1))))
            case 5:
                self.feed(rx.ReplyReceived("nobody", OfferReply(assignment, epoch, False, DeclineReason.QUEUE_FULL)))

    def unmoved(self, event: rx.RouterEvent) -> None:
        effects = self.router.handle(event, self.now)
        assert effects == [], f"{event} caused {effects}"

    def drain(self, name: str) -> None:
        """Drains the worker, cuts what still runs, and brings up its successor once it has quiesced."""
        worker = self.workers[name]
        self.work(worker, wx.DrainRequested())
        if self.rng.random() < 0.5:
            self.work(worker, wx.DrainExpired())
        if worker.drained and not worker.outbox:
            epoch = worker.machine.epoch
            self.start(name)
            self.feed(rx.WorkerUnavailable(name, epoch, rx.Loss.RETIRED))

    def silence(self, name: str) -> None:
        """The router gives up on a worker that is alive: it goes on computing and talking."""
        self.feed(rx.WorkerUnavailable(name, self.workers[name].machine.epoch, rx.Loss.SILENCE))

    def break_tunnel(self, name: str) -> None:
        worker = self.workers[name]
        worker.inbox.clear()
        worker.outbox.clear()
        lost, self.tunnels = worker.tunnel, self.tunnels + 1
        worker.tunnel = self.tunnels
        self.work(worker, wx.TunnelLost(lost))
        for assignment in sorted(self.offers):
            self.feed(rx.RouteDropped(assignment, name, worker.machine.epoch, "tunnel lost"))

    def work(self, worker: SimWorker, event: wx.WorkerEvent) -> None:
        self.trace.append(f"{worker.name} {event!r}")
        for effect in worker.machine.handle(event, self.now):
            match effect:
                case wfx.Reserve():
                    worker.reserving.append(effect.offer)
                    worker.offers[effect.offer.assignment] = effect.offer
                case wfx.Reply(tunnel, message) | wfx.EmitDelta(tunnel, message) | wfx.EmitResult(tunnel, message):
                    if tunnel == worker.tunnel:
                        worker.outbox.append(self.codec.encode(message))
                case wfx.StartRestore():
                    worker.jobs[effect.offer.assignment] = Job(effect.offer, "restore", effect.resident_tokens)
                case wfx.StartRun():
                    offer = worker.offers[effect.assignment]
                    worker.jobs[effect.assignment] = Job(offer, "queued", effect.cached_tokens)
                case wfx.Stop():
                    worker.jobs[effect.assignment].stopping = True
                case wfx.Release():
                    assert effect.assignment in worker.reserved, "released twice or never reserved"
                    assert effect.assignment not in worker.jobs, "released under a running operation"
                    del worker.reserved[effect.assignment]
                case wfx.Drained():
                    worker.drained += 1

    def local_step(self, worker: SimWorker) -> bool:
        """One step of the worker's own pool or runtime."""
        choices: list[AssignmentId | None] = [*sorted(worker.jobs)]
        if worker.reserving:
            choices.append(None)
        if not choices:
            return False
        chosen = self.rng.choice(choices)
        pages = Pages(worker.pages, worker.pages - sum(worker.reserved.values()))
        if chosen is None:
            offer = worker.reserving.pop(0)
            need = len(offer.request.tokens) + offer.request.max_new_tokens
            if sum(worker.reserved.values()) + need > worker.pages:
                reason = DeclineReason.INSUFFICIENT_PAGES
                self.work(worker, wx.ReservationRefused(offer.assignment, reason, "", 0.0, pages))
            elif offer.candidate.tier is Tier.GPU and self.rng.random() < 0.5:
                self.work(worker, wx.ReservationRefused(offer.assignment, DeclineReason.PREFIX_GONE))
            else:
                worker.reserved[offer.assignment] = need
                resident = offer.candidate.cached_tokens if offer.candidate.tier is Tier.GPU else 0
                self.work(worker, wx.ReservationMade(offer.assignment, resident, 0.0, pages))
            return True
        job = worker.jobs[chosen]
        length = len(job.offer.request.tokens)
        if job.stopping or job.stage == "finished":
            del worker.jobs[chosen]
            self.work(worker, wx.Quiesced(chosen))
        elif job.stage == "restore":
            cached = job.offer.candidate.cached_tokens
            if self.rng.random() < 0.3:
                self.work(worker, wx.FetchStarted(chosen))
            elif self.rng.random() < 0.3:
                self.work(worker, wx.RestoreFailed(chosen, job.cached, (), "chunk gone"))
            else:
                self.work(worker, wx.RestoreDone(chosen, cached, (TierTokens(Tier.SSD, cached - job.cached),)))
        elif job.stage == "queued":
            if self.rng.random() < 0.5:
                job.stage = "lane"
                self.work(worker, wx.LaneGranted(chosen))
            else:
                self._prefill(worker, job, length)
        elif job.stage == "lane":
            self._prefill(worker, job, length)
        elif job.drawn == job.offer.request.max_new_tokens:
            job.stage = "finished"
            self.work(worker, wx.Finished(chosen, FinishReason.LENGTH))
        elif self.rng.random() < 0.03:
            job.stage = "finished"
            self.work(worker, wx.RunFailed(chosen, "device error"))
        else:
            start = length - job.offer.request.output_start + job.drawn
            count = min(self.rng.randint(1, 2), job.offer.request.max_new_tokens - job.drawn)
            job.drawn += count
            drawn = tuple(declared_token(chosen.request_id, start + i) for i in range(count))
            self.work(worker, wx.TokensDrawn(chosen, drawn))
        return True

    def _prefill(self, worker: SimWorker, job: Job, length: int) -> None:
        assignment = job.offer.assignment
        if self.rng.random() < 0.03:
            job.stage = "finished"
            self.work(worker, wx.RunFailed(assignment, "device error"))
        else:
            job.stage = "prefilled"
            self.work(worker, wx.PrefillDone(assignment, length - job.cached))

    # --- links ---

    def _take(self, box: list[bytes], repeat: float) -> bytes:
        index = self.rng.randrange(min(len(box), 3)) if self.reorder else 0
        data = box[index]
        if not (self.reorder and self.rng.random() < repeat):
            del box[index]
        return data

    def to_worker(self, worker: SimWorker) -> bool:
        if not worker.inbox:
            return False
        message = self.codec.decode(self._take(worker.inbox, 0.1))
        pages = Pages(worker.pages, worker.pages - sum(worker.reserved.values()))
        if isinstance(message, Offer):
            self.work(worker, wx.OfferReceived(message, worker.tunnel, 0.0, pages))
        else:
            assert isinstance(message, Cancel)
            self.work(worker, wx.CancelReceived(message))
        return True

    def to_router(self, worker: SimWorker) -> bool:
        if not worker.outbox:
            return False
        match self.codec.decode(self._take(worker.outbox, 0.1)):
            case OfferReply() as reply:
                self.feed(rx.ReplyReceived(worker.name, reply))
            case Delta() as delta:
                self.feed(rx.DeltaReceived(worker.name, delta))
            case Result() as result:
                self.feed(rx.ResultReceived(worker.name, result))
        return True

    # --- router ---

    def submit(self, value: GenerationRequest, delivered: int = 0) -> tuple[str, int]:
        self.origins += 1
        key = (value.request_id, self.origins)
        self.submitted[key] = value
        self.feed(rx.Submitted(Submission(value, delivered), self.origins))
        return key

    def allowed(self, event: rx.RouterEvent) -> tuple[type, ...] | None:
        """What an event that concerns nothing active may cause at most; None = anything. An oracle of its own."""
        match event:
            case rx.ReplyReceived(worker, said) | rx.DeltaReceived(worker, said) | rx.ResultReceived(worker, said):
                own = self.active.get(said.assignment) == (worker, said.epoch)
                if own and isinstance(event, rx.ReplyReceived) and said.assignment not in self.offered:
                    return ()  # answered already
                return None if own else (fx.SendCancel,)
            case rx.RouteDropped():
                return None if self.active.get(event.assignment) == (event.worker, event.epoch) else ()
            case rx.OfferTimedOut():
                return None if event.assignment in self.offered else ()
            case rx.HoldExpired():
                return None if self.wanted.get(event.request_id, 0) <= event.plan_id else ()
            case rx.Planned():
                return None if self.wanted.get(event.request_id) == event.plan_id else ()
            case rx.RequestCancelled() | rx.DeadlineReached():
                live = (event.request_id, event.origin)
                if event.origin is None or (live in self.submitted and not self.terminals[live]):
                    return None
                return ()
            case rx.Submitted():
                name = event.submission.request.request_id
                others = [key for key in self.submitted if key[0] == name and key[1] != event.origin]
                taken = any(not self.terminals[key] for key in others)
                return (fx.Deliver,) if taken else None
        return None

    def feed(self, event: rx.RouterEvent) -> None:
        self.trace.append(repr(event))
        allowed = self.allowed(event)
        for effect in self.router.handle(event, self.now):
            assert allowed is None or isinstance(effect, allowed), f"{event} caused {effect}"
            self.trace.append(repr(effect))
            match effect:
                case fx.PlanRequested():
                    self.plans.append(effect)
                    self.wanted[effect.request_id] = effect.plan_id
                case fx.SendOffer():
                    self.offers.add(effect.offer.assignment)
                    self.offered.add(effect.offer.assignment)
                    self.active[effect.offer.assignment] = (effect.worker, effect.offer.epoch)
                    if effect.offer.epoch == self.workers[effect.worker].machine.epoch:
                        self.workers[effect.worker].inbox.append(self.codec.encode(effect.offer))
                case fx.SendCancel():
                    self.workers[effect.worker].inbox.append(self.codec.encode(effect.cancel))
                case fx.CloseRoute():
                    self.offers.discard(effect.assignment)
                case fx.SetTimer():
                    self.timers[effect.timer] = self.now + effect.after_ms
                case fx.CancelTimer():
                    self.timers.pop(effect.timer, None)
                case fx.Deliver():
                    self._deliver(effect)
                case fx.RecordDecision():
                    self.decisions.append(effect.decision)
                case fx.Accepted():
                    self.offered.discard(effect.assignment)
                case fx.Booked():
                    assert effect.assignment not in self.booked
                    self.booked.add(effect.assignment)
                case fx.Unbooked():
                    self.booked.remove(effect.assignment)
                    self.offered.discard(effect.assignment)
                    del self.active[effect.assignment]

    def _deliver(self, effect: fx.Deliver) -> None:
        delivery = effect.delivery
        key = (delivery.request_id, effect.origin)
        assert key in self.submitted, "a delivery for nobody"
        assert not self.terminals[key], f"a delivery after the terminal one: {delivery}"
        base = len(self.submitted[key].tokens) - self.submitted[key].output_start
        tokens = self.tokens[key]
        if isinstance(delivery, TokensDelivery):
            assert delivery.index == base + len(tokens), "gap or repetition"
            for offset, token in enumerate(delivery.tokens):
                assert token == declared_token(delivery.request_id, delivery.index + offset), "not the declared token"
            tokens.extend(delivery.tokens)
            assert len(tokens) <= self.submitted[key].max_new_tokens
        else:
            self.terminals[key].append(delivery)
            if isinstance(delivery, CompletedDelivery):
                assert len(tokens) == self.submitted[key].max_new_tokens, "completed but not whole"
        if isinstance(delivery, (TokensDelivery, CompletedDelivery, CancelledDelivery)):
            assert delivery.usage.generated_tokens == base + len(tokens)
            assert delivery.usage.prompt_tokens == self.submitted[key].output_start
            if tokens:
                usage = delivery.usage
                assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens

    def candidates(self, avoid: tuple[str, ...], processed: int) -> tuple[RankedCandidate, ...]:
        options: list[RankedCandidate] = []
        gpu, ssd = min(3, processed), min(4, processed)
        for worker in sorted(self.workers.values(), key=lambda w: (w.name in avoid, self.rng.random())):
            epoch = worker.machine.epoch - (self.rng.random() < 0.05)
            for tier, cached in ((Tier.GPU, gpu), (Tier.SSD, ssd), (Tier.NONE, 0)):
                chain = (Node(Chunk("c" * 64, "p" * 64, 0, ssd)),) if tier is Tier.SSD else ()
                options.append(RankedCandidate(Candidate(worker.name, epoch, FINGERPRINT, tier, cached), chain))
        return tuple(options)

    def plan(self) -> bool:
        if not self.plans:
            return False
        wanted = self.plans.pop(self.rng.randrange(len(self.plans)))
        chance = self.rng.random()
        options = self.candidates(wanted.avoid, wanted.request.processed) if chance > 0.15 else ()
        kind = rx.ObstacleKind.TOO_LONG if chance < 0.01 else rx.ObstacleKind.NO_CAPACITY
        obstacle = None if options else rx.Obstacle(kind, "no room")
        plan = rx.Plan(options, (), obstacle, leads=self.rng.random() < 0.3)
        if options and self.rng.random() < 0.2 and (wanted.herd is None or wanted.herd.patience_ms > 0):
            leader = options[0].candidate
            processes = ((leader.worker, leader.epoch),)
            plan = replace(plan, hold=rx.Hold("ab", 256, processes, 40.0, 100.0))
        self.feed(rx.Planned(wanted.request_id, wanted.plan_id, plan))
        return True

    def fire(self, timer: fx.TimerId, late: bool = False) -> None:
        if not late:
            self.now = max(self.now, self.timers.pop(timer))
        if timer.kind is fx.TimerKind.OFFER:
            self.feed(rx.OfferTimedOut(AssignmentId(timer.request_id, timer.number)))
        elif timer.kind is fx.TimerKind.HOLD:
            self.feed(rx.HoldExpired(timer.request_id, timer.number))
        else:
            self.feed(rx.DeadlineReached(timer.request_id, timer.number))

    # --- running ---

    def step(self, faults: float = 0.0) -> bool:
        """One random step; False if nothing can happen but timers."""
        if faults and self.rng.random() < faults:
            self.fault()
            return True
        workers = list(self.workers.values())
        moves = [self.plan]
        for worker in workers:
            moves += [
                lambda w=worker: self.to_worker(w),
                lambda w=worker: self.to_router(w),
                lambda w=worker: self.local_step(w),
            ]
        self.rng.shuffle(moves)
        return any(move() for move in moves)

    def fault(self) -> None:
        name = self.rng.choice(sorted(self.workers))
        match self.rng.randrange(15):
            case 0:
                self.kill(name, self.rng.choice(list(rx.Loss)))
            case 1:
                self.break_tunnel(name)
            case 2:
                self.silence(name)
            case 3:
                offers = sorted((t for t in self.timers if t.kind is fx.TimerKind.OFFER), key=lambda t: t.request_id)
                if offers:
                    self.fire(self.rng.choice(offers))
            case 4:
                live = sorted(self.submitted)
                if live:
                    request_id, origin = self.rng.choice(live)
                    self.feed(rx.RequestCancelled(request_id, self.rng.choice([None, origin, origin + 1])))
            case 5:
                if self.offers:
                    assignment = self.rng.choice(sorted(self.offers))
                    self.fire(fx.TimerId(fx.TimerKind.OFFER, assignment.request_id, assignment.attempt - 1), late=True)
            case 7:
                deadlines = sorted((t for t in self.timers if t.kind is fx.TimerKind.DEADLINE), key=str)
                if deadlines and self.rng.random() < 0.3:
                    timer = self.rng.choice(deadlines)
                    self.timers.pop(timer)
                    self.fire(timer, late=True)
            case 8:
                self.drain(name)
            case 9 | 10:
                self.forge()
            case 11:
                if self.submitted and self.rng.random() < 0.5:
                    value = self.submitted[self.rng.choice(sorted(self.submitted))]
                    self.submit(value, len(value.tokens) - value.output_start)
            case 12:
                if self.wanted:
                    request_id = self.rng.choice(sorted(self.wanted))
                    stale = rx.Plan(obstacle=rx.Obstacle(rx.ObstacleKind.TOO_LONG, "stale"))
                    self.feed(rx.Planned(request_id, self.wanted[request_id] - 1, stale))
            case 13:
                worker = self.workers[name]
                before = worker.machine.assignments()
                if before:
                    self.refuses(worker, wx.CancelReceived(Cancel(self.rng.choice(before), worker.machine.epoch + 1)))
                if not worker.machine.draining:
                    self.refuses(worker, wx.DrainExpired())
            case 6:
                self.feed(rx.CapacityFreed(self.rng.randint(1, 3)))
            case 14:
                epoch = self.workers[name].machine.epoch
                self.feed(rx.PrefixesReported(name, epoch, tuple(self.router.awaited)))

    def settle(self) -> None:
        """Runs to the end: every message delivered, every wait ended by its deadline."""
        for _ in range(20_000):
            if self.step():
                continue
            if self.router.waiting and self.rng.random() < 0.5:
                self.feed(rx.CapacityFreed(2))
                if self.plans:
                    continue
            for name, worker in sorted(self.workers.items()):
                if worker.drained:
                    self.start(name)
            if not self.timers:
                break
            self.fire(min(self.timers, key=lambda t: (self.timers[t], t.request_id, t.number)))
        else:
            raise AssertionError("does not settle")
        for key in self.submitted:
            assert len(self.terminals[key]) == 1, f"{key} has {len(self.terminals[key])} terminal deliveries"
        assert len(self.router) == self.router.waiting == self.router.held == len(self.router.awaited) == 0
        assert not self.booked and not self.timers
        for worker in self.workers.values():
            assert not worker.reserved and len(worker.machine) == 0, f"{worker.name} still holds pages"

    def check(self) -> None:
        """After every step."""
        for worker in self.workers.values():
            assert sum(worker.reserved.values()) <= worker.pages
        for key, terminals in self.terminals.items():
            assert len(terminals) <= 1, key

    def outcomes(self) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)
        for terminals in self.terminals.values():
            for delivery in terminals:
                label = type(delivery).__name__
                counts[label + (f" {delivery.code.name}" if isinstance(delivery, ErrorDelivery) else "")] += 1
        return dict(counts)


def run(seed: int, faults: float = 0.06, requests: int = 8, **kwargs: object) -> Cluster:
    """One random schedule to its end, checked."""
    cluster = Cluster(seed, **kwargs)  # type: ignore[arg-type]
    rng = cluster.rng
    for number in range(requests):
        prompt, budget = rng.randint(2, 8), rng.randint(1, 8)
        generated = rng.choice([0, 0, 0, 2])
        name = f"r{number}"
        base = request(name, prompt, budget, tenant=rng.choice("ab"), priority=rng.randint(0, 1), deadline_ms=5_000)
        if generated:
            done = tuple(declared_token(name, i) for i in range(generated))
            base = request(name, prompt, budget, deadline_ms=5_000)
            base = GenerationRequest(name, "m", base.tokens + done, prompt, budget, deadline_ms=5_000)
        cluster.submit(base, generated)
        for _ in range(rng.randint(0, 12)):
            cluster.step(faults)
            cluster.check()
    for _ in range(60):
        cluster.step(faults)
        cluster.check()
    cluster.settle()
    return cluster
