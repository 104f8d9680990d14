"""What a worker's device and its restores do, as declared costs: queue, restore, prefill, decode, quiesce.

Each lane serves one run at a time and all lanes advance beside each other. What a prefill has computed is in the pages,
and on its way out of them, from the end of each chunk on. A run that waits for a lane while an older
one computes a prefix of its prompt waits for that prefix and shares it (as the live pool's `awaits` and `adopt`).
Every operation tells the watch which pages it touches, from its start to its quiescence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libs.continuation.chain import CHUNK_TOKENS
from libs.controller import worker_events as wx
from libs.controller.protocol import AssignmentId, Offer, Tier, TierTokens
from libs.simulation import declared
from libs.simulation.pages import PagePool, PagesShortError
from libs.simulation.schedule import Ask, WorkerSpec

if TYPE_CHECKING:
    from libs.simulation.world import World

_PREFILL_STEP = 16  # tokens of one iteration: where a prefill can be stopped


@dataclass(frozen=True, slots=True)
class Span:
    """A lane's time with one run: prefill until `decodes_ms` (the end, if it never came to that), then decode."""

    request_id: str
    began_ms: float
    decodes_ms: float
    ended_ms: float


@dataclass(slots=True, eq=False)
class Job:
    """One assignment's operation. `ticket` makes what was planned for an earlier stage void."""

    offer: Offer
    ask: Ask
    stage: str  # restore, queued, prefill, decode, ending
    names: tuple[tuple[int, str], ...]
    cached: int = 0
    reached: int = 0  # by its prefill, whole chunks
    drawn: int = 0
    first: int = 0  # index of the first token it draws
    ticket: int = 0
    began_ms: float = 0.0
    decodes_ms: float | None = None
    lane: bool = False
    stopping: bool = False
    restored: tuple[TierTokens, ...] = ()

    @property
    def assignment(self) -> AssignmentId:
        return self.offer.assignment

    @property
    def length(self) -> int:
        return len(self.offer.request.tokens)


class Runtime:
    """Of one worker process; a new process has a new one. `tell` feeds the machine."""

    def __init__(
        self,
        world: World,
        spec: WorkerSpec,
        pool: PagePool,
        ram: dict[str, None],
        tell: Callable[[wx.WorkerEvent], None],
    ) -> None:
        self.world, self.spec, self.pool, self.ram, self._tell = world, spec, pool, ram, tell
        self.agenda = world.agenda
        self.jobs: dict[AssignmentId, Job] = {}
        self.alive = True
        self._lanes = spec.lanes

    # --- what the node reads ---

    def queue_ms(self) -> float:
        """The wait for a lane, predicted now."""
        waiting = [job for job in self.jobs.values() if job.stage in ("queued", "restore") and not job.stopping]
        if self._lanes > 0 and not waiting:
            return 0.0
        work = sum(self._work(job, self._begins(job)) for job in waiting)
        running = [job for job in self.jobs.values() if job.lane]
        work += sum(max(0.0, self._work(job) - (self.agenda.now - job.began_ms)) for job in running)
        return work / self.spec.lanes if self._lanes <= 0 else max(0.0, work / self.spec.lanes)

    def inflight(self) -> dict[str, tuple[int, float]]:
        """Boundaries that running prefills will pass: end and ms until then."""
        found: dict[str, tuple[int, float]] = {}
        for job in self.jobs.values():
            if job.stage != "prefill" or job.stopping:
                continue
            for end, name in job.names:
                if job.cached < end <= job.length and name not in self.pool.index:
                    due = job.began_ms + (end - job.cached) * self._prefill_ms() - self.agenda.now
                    if name not in found:
                        found[name] = (end, max(0.0, due))
        return found

    def coming(self, names: tuple[tuple[int, str], ...], limit: int, but: AssignmentId | None = None) -> int:
        """The longest boundary of these that an older job has in its prompt and has not computed yet."""
        wanted = {name: end for end, name in names if end <= limit}
        longest = 0
        for job in self.jobs.values():
            if job.assignment == but:
                break
            if job.stage in ("queued", "prefill", "restore") and not job.stopping:
                longest = max(longest, *(wanted.get(name, 0) for end, name in job.names if end <= job.length), 0)
        return longest

    # --- effects ---

    def restore(self, offer: Offer, resident: int) -> None:
        """Brings the offer's chain into reserved pages."""
        job = self._job(offer, "restore")
        job.cached = resident
        self.world.watch.op_holds(self.spec.name, job.assignment, self._pages(job))
        self._later(job, 0.5, self._fetch, offer, 0)

    def run(self, assignment: AssignmentId, offer: Offer, cached: int) -> None:
        """Queues prefill and decode."""
        job = self.jobs.get(assignment) or self._job(offer, "queued")
        job.stage, job.cached = "queued", cached
        self.world.watch.op_holds(self.spec.name, assignment, self._pages(job))
        self.agenda.after(0.0, self._admit)

    def stop(self, assignment: AssignmentId) -> None:
        """Ends the job at its next boundary."""
        job = self.jobs[assignment]
        job.stopping = True
        if job.stage == "ending":
            return
        slice_ms = self._decode_ms() if job.stage == "decode" else _PREFILL_STEP * self._prefill_ms()
        self._later(job, 1.0 if job.stage == "queued" else slice_ms, self._quiesce)

    def fail(self, n: int) -> bool:
        """The n-th run fails at once; False if there is none."""
        running = [
            job for job in self.jobs.values() if job.stage in ("queued", "prefill", "decode") and not job.stopping
        ]
        if not running:
            return False
        if n % 2:  # those that have no lane yet first
            running.sort(key=lambda job: job.lane)
            n //= 1_000
        self._end(running[n % len(running)], wx.RunFailed(running[n % len(running)].assignment, "device error"))
        return True

    def end(self) -> None:
        """The process is gone."""
        self.alive = False
        for job in self.jobs.values():
            if job.lane:
                self._note(job)
        self.jobs.clear()

    # --- restore ---

    def _fetch(self, job: Job, offer: Offer, index: int) -> None:
        if index == 0:
            self._tell(wx.FetchStarted(job.assignment))
        chain = [node for node in offer.chain if node.chunk.end > job.cached]
        if not chain:
            self._restored(job, "")
            return
        chunk = chain[0].chunk
        tier = self._source(chunk.hash)
        if tier is None or chunk.start > job.cached:
            self._restored(job, f"chunk {chunk.hash[:8]} is gone")
            return
        self.pool.load(self.pool.leases[job.assignment], chunk.end)
        self.world.watch.op_holds(self.spec.name, job.assignment, self._pages(job))
        cost = 1.0 + (chunk.end - job.cached) * self._tier_ms(tier)
        self._later(job, cost, self._fetched, offer, chunk.hash, chunk.end, tier)

    def _fetched(self, job: Job, offer: Offer, name: str, end: int, tier: Tier) -> None:
        if not self.world.fetch(self.spec.name, self.ram, name, tier):
            self._restored(job, f"chunk {name[:8]} is damaged")
            return
        lease = self.pool.leases[job.assignment]
        before = job.cached
        self.pool.fill(lease, end, job.names)
        job.cached = end
        self.world.restored[tier.name] += end - before
        job.restored += (TierTokens(tier, end - before, (end - before) * declared.BYTES_PER_TOKEN),)
        self._fetch(job, offer, 1)

    def _restored(self, job: Job, problem: str) -> None:
        job.ticket += 1
        restored = job.restored
        if problem:
            self._tell(wx.RestoreFailed(job.assignment, job.cached, restored, problem))
        else:
            self._tell(wx.RestoreDone(job.assignment, job.cached, restored))

    def _source(self, name: str) -> Tier | None:
        """The cheapest tier that seems to hold a chunk."""
        store = self.world.store
        if name in self.ram:
            return Tier.RAM
        if store.has(self.spec.name, name):
            return Tier.SSD
        if self.world.peer_of(self.spec.name, name) is not None:
            return Tier.PEER
        return Tier.OBJECT if store.has("object", name) else None

    def _tier_ms(self, tier: Tier) -> float:
        spec = self.spec
        part, cost = {
            Tier.RAM: ("ram", spec.ram_ms),
            Tier.SSD: ("ssd", spec.ssd_ms),
            Tier.PEER: ("peer", spec.peer_ms),
        }.get(tier, ("object", spec.object_ms))
        return cost * self.world.slowness(spec.name, part)

    # --- run ---

    def _admit(self) -> None:
        """Lanes to those that wait, oldest first; who waits for a prefix lets others pass."""
        if not self.alive:
            return
        for job in tuple(self.jobs.values()):
            if self._lanes <= 0:
                return
            if job.stage != "queued" or job.stopping or self.jobs.get(job.assignment) is not job:
                continue
            limit = job.length - 1
            if self.coming(job.names, limit, job.assignment) > max(job.cached, self.pool.longest(job.names, limit)[0]):
                continue
            self._start(job)

    def _start(self, job: Job) -> None:
        lease = self.pool.leases[job.assignment]
        resident = self.pool.longest(job.names, job.length - 1)
        if resident[0] > job.cached and self.pool.adopt(lease, resident):
            job.cached = resident[0]
        self._lanes -= 1
        job.lane, job.stage, job.began_ms = True, "prefill", self.agenda.now
        self.world.watch.op_holds(self.spec.name, job.assignment, self._pages(job))
        if self.spec.tells_lane:
            self._tell(wx.LaneGranted(job.assignment))
        if job.ask.shared > job.cached and not job.drawn:
            self.world.worker(self.spec.name).prefills[job.ask.prefix] += 1
        job.reached = job.cached
        self._advance(job)
        self.world.worker(self.spec.name).hurry()

    def _advance(self, job: Job) -> None:
        """To the end of the chunk, or of the prompt."""
        end = (job.reached // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        if end < job.length:
            self._later(job, (end - job.reached) * self._prefill_ms(), self._passed, end)
        else:
            self._later(job, (job.length - job.reached) * self._prefill_ms(), self._prefilled)

    def _passed(self, job: Job, end: int) -> None:
        if not self._fill(job, end):
            return
        job.reached = end
        self.world.worker(self.spec.name).computed(job.offer.request.tokens[:end], job.assignment)
        self._advance(job)
        self.agenda.after(0.0, self._admit)

    def _prefilled(self, job: Job) -> None:
        if job.ask.deadly:
            self.world.worker(self.spec.name).die(job.ask.name)
            return
        if not self._fill(job, job.length):
            return
        job.stage, job.decodes_ms = "decode", self.agenda.now
        self._tell(wx.PrefillDone(job.assignment, job.length - job.cached))
        self.world.worker(self.spec.name).computed(job.offer.request.tokens[: job.length - 1], job.assignment)
        self._decode(job)
        self.agenda.after(0.0, self._admit)

    def _decode(self, job: Job) -> None:
        left = declared.length(job.ask) - job.first - job.drawn
        if left <= 0:
            self._later(job, 0.0, self._end, wx.Finished(job.assignment, declared.finish(job.ask)))
            return
        burst = self.world.schedule.settings.burst
        count = min(left, burst) if burst else left
        self._later(job, count * self._decode_ms(), self._drawn, count)

    def _drawn(self, job: Job, count: int) -> None:
        start = job.first + job.drawn
        job.drawn += count
        drawn = declared.tokens(job.ask, start, start + count)
        # The last drawn token is pending: it is not in the pages.
        if not self._fill(job, job.length + job.drawn - 1):
            return
        self._tell(wx.TokensDrawn(job.assignment, drawn))
        if not job.stopping:
            self._decode(job)

    def _fill(self, job: Job, end: int) -> bool:
        lease = self.pool.leases[job.assignment]
        try:
            self.pool.fill(lease, end, job.names)
        except PagesShortError as error:
            self.world.watch.short_of_pages(self.spec.name, job.assignment, str(error))
            return False
        self.world.watch.op_holds(self.spec.name, job.assignment, self._pages(job))
        return True

    def _end(self, job: Job, event: wx.WorkerEvent) -> None:
        """The run ends by itself; its last iteration still touches pages."""
        job.stage = "ending"
        if isinstance(event, wx.Finished):
            text = job.offer.request.tokens + declared.tokens(job.ask, job.first, job.first + job.drawn)
            lease = self.pool.leases[job.assignment]
            self.pool.fill(lease, lease.filled, declared.names(text[: lease.filled]))
            self.world.worker(self.spec.name).computed(text[: lease.filled], job.assignment)
        self._later(job, self._decode_ms(), self._quiesce)
        self._tell(event)

    def _quiesce(self, job: Job) -> None:
        if job.stopping and job.stage == "prefill":
            done = (
                int((self.agenda.now - job.began_ms) / max(1e-9, self._prefill_ms())) // _PREFILL_STEP * _PREFILL_STEP
            )
            self._fill(job, min(job.length - 1, job.cached + done))
        late = self._late(job)
        if late is not None:
            self._tell(late)
        del self.jobs[job.assignment]
        if job.lane:
            self._lanes += 1
            self._note(job)
        self.world.watch.op_ends(self.spec.name, job.assignment)
        self._tell(wx.Quiesced(job.assignment))
        self.agenda.after(0.0, self._admit)

    def _late(self, job: Job) -> wx.WorkerEvent | None:
        """What the iteration that was running at the end had to say: nobody may listen any more."""
        key, turn = job.assignment, job.ticket + job.length + job.assignment.attempt
        drawn = wx.TokensDrawn(key, (declared.token(job.ask, job.first + job.drawn),))
        prefilled = wx.PrefillDone(key, job.length - job.cached)
        said: tuple[wx.WorkerEvent, ...]
        match job.stage if job.stopping or job.stage == "ending" else "":
            case "restore":
                said = (wx.RestoreDone(key, job.cached), wx.RestoreFailed(key, job.cached), wx.FetchStarted(key))
            case "queued":
                said = (wx.LaneGranted(key), wx.RunFailed(key, "stopped"))
            case "prefill":
                said = (prefilled, wx.RunFailed(key, "stopped"))
            case "decode":
                said = (drawn, wx.Finished(key, declared.finish(job.ask)), wx.RunFailed(key, "stopped"))
            case "ending":
                said = (drawn, prefilled, wx.Finished(key, declared.finish(job.ask)), wx.RunFailed(key, "stopped"))
            case _:
                return None
        return said[turn % len(said)]

    # --- parts ---

    def _note(self, job: Job) -> None:
        now = self.agenda.now
        decodes_ms = now if job.decodes_ms is None else job.decodes_ms
        self.world.worker(self.spec.name).spans.append(Span(job.ask.name, job.began_ms, decodes_ms, now))

    def _job(self, offer: Offer, stage: str) -> Job:
        request = offer.request
        job = Job(offer, self.world.asks[request.request_id], stage, declared.names(request.tokens[:-1]))
        job.first = len(request.tokens) - request.output_start
        self.jobs[offer.assignment] = job
        return job

    def _pages(self, job: Job) -> tuple[int, ...]:
        lease = self.pool.leases[job.assignment]
        source = lease.copy_source
        return (*lease.table, *lease.spare) if source is None else (*lease.table, *lease.spare, source)

    def _work(self, job: Job, begins: int | None = None) -> float:
        spec, computed = self.spec, job.cached if begins is None else begins
        return (job.length - computed) * spec.prefill_ms + job.offer.request.max_new_tokens * spec.decode_ms

    def _begins(self, job: Job) -> int:
        """Where one that has no lane yet will begin to compute: behind what is read for it, or what it waits for."""
        if job.stage == "restore":
            return max(job.cached, job.offer.chain[-1].chunk.end if job.offer.chain else 0)
        return max(job.cached, self.coming(job.names, job.length - 1, job.assignment))

    def _prefill_ms(self) -> float:
        return self.spec.prefill_ms * self.world.slowness(self.spec.name, "prefill")

    def _decode_ms(self) -> float:
        return self.spec.decode_ms * self.world.slowness(self.spec.name, "decode")

    def _later(self, job: Job, delay_ms: float, action: Callable[..., None], *arguments: object) -> None:
        job.ticket += 1
        self.agenda.after(delay_ms, self._due, job, job.ticket, action, arguments)

    def _due(self, job: Job, ticket: int, action: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if self.alive and job.ticket == ticket and self.jobs.get(job.assignment) is job:
            action(job, *arguments)
