"""From a request to ranked candidates: every worker, every usable boundary and tier, plus recompute. Pure.

Theory of operation
===================

The chain of the request's processed tokens is hashed once per variant. Three sources say where its prefixes are: the
residency index (device pages, prefills under way, host memory), the catalog's replicas (SSD, and peers' SSD) and its
object receipts.

All workers are looked at together, as columns (`table`): one pass over the chain finds the longest prefix that each
has in device pages, and in any tier of its own; then every worker has a bound in a few operations on columns. Only the
best by that bound are scored exactly (`knobs.considered` of those that hold something, as many of those that do not):
with 1,000 workers and 20 with residency 52 are.

For one worker the resident prefix R is the longest boundary in its device pages. Candidates: R itself (GPU); a
running prefill's boundary (INFLIGHT); each boundary restorable on top of R; each restorable from lower tiers alone,
so that a stale GPU candidate leaves something to fall back to; recompute. Of one worker and tier only the best
boundary survives (the others cannot win: `dominated`), and no restore below the worker's measured break-even
(`break-even`).

Feasibility is a hard constraint: epoch (the view is of one process), model, context, capacity, not draining.
Exactness holds by construction: a hash names all tokens before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from libs.continuation import chain as chains
from libs.controller import bounds, policy
from libs.controller.bounds import Prefixes
from libs.controller.catalog_facts import Model, Node
from libs.controller.demand import pages_needed
from libs.controller.fleet import Fleet, WorkerView
from libs.controller.knobs import PolicyKnobs
from libs.controller.peers import Named
from libs.controller.protocol import Candidate, GenerationRequest, Pruned, RankedCandidate, Tier
from libs.controller.residency import key_of
from libs.controller.router_events import Obstacle, ObstacleKind, Plan
from libs.controller.sources import Cases, Link, Restore, Sources

_NOWHERE = "0" * 64  # the salt of no tenant
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Variant:
    """One fingerprint of the request's model name, its chain over the processed tokens, and the catalog's facts.

    `nodes`: the durable full chunks known, a prefix of `chain.chunks`; `tail`: the durable tail under the last of them.
    """

    model: Model
    chain: chains.Chain
    nodes: tuple[Node, ...] = ()
    tail: Node | None = None


def variant(model: Model, request: GenerationRequest, nodes: Sequence[Node] = (), tail: Node | None = None) -> Variant:
    """Hashes the chain. Raises libs.continuation.errors.IdentityError for a salt or fingerprint that is none."""
    root = chains.root(model.fingerprint, request.tenant_salt or _NOWHERE)
    return Variant(model, chains.plan(root, request.tokens[: request.processed]), tuple(nodes), tail)


def plan(
    request: GenerationRequest,
    variants: Sequence[Variant],
    fleet: Fleet,
    now_ms: float,
    avoid: Sequence[str] = (),
    knobs: PolicyKnobs | None = None,
) -> Plan:
    """Ranked candidates, at most `knobs.ranked`, or the obstacle. `variants` in the name's order; empty = unknown.

    `knobs`: the fleet's by default.
    """
    if not variants:
        detail = f"model {request.model!r} is not known: list the served names with ListModels"
        return Plan(obstacle=Obstacle(ObstacleKind.UNKNOWN_MODEL, detail))
    knobs = knobs or fleet.knobs
    pruned: Counter[str] = Counter()
    served = Counter[str]()  # workers of any of the variants, by what came of them
    planned = [_Planning(request, entry, fleet, now_ms, knobs, pruned, served) for entry in variants]
    ways = [(one, way) for one in planned for way in one.ways()]
    shunned = frozenset(avoid)
    scores = [one.score(way, shunned) for one, way in ways]
    best = policy.order(request.request_id, scores, knobs)
    if len(best) > knobs.ranked:
        pruned["rank"] += len(best) - knobs.ranked
    counts = tuple(Pruned(reason, pruned[reason]) for reason in sorted(pruned) if pruned[reason])
    if best:
        ranked = tuple(ways[index][0].option(ways[index][1]) for index in best[: knobs.ranked])
        return Plan(ranked, counts)
    return Plan(pruned=counts, obstacle=_obstacle(request, variants, served))


def _obstacle(request: GenerationRequest, variants: Sequence[Variant], served: Counter[str]) -> Obstacle:
    wanted = len(request.tokens) + request.max_new_tokens
    longest = max(entry.model.max_context for entry in variants)
    if longest and wanted > longest:
        detail = f"{wanted} tokens (prompt and budget) exceed the model's context of {longest}: shorten either"
        return Obstacle(ObstacleKind.TOO_LONG, detail)
    total = served.total()
    if total and served["context"] + served["too-large"] == total:
        detail = f"{wanted} tokens (prompt and budget) exceed what any of its {total} workers can hold: shorten either"
        return Obstacle(ObstacleKind.TOO_LONG, detail)
    if not total:
        return Obstacle(ObstacleKind.NO_WORKER, f"no worker serves model {request.model!r} now")
    parts = ", ".join(f"{count} {reason}" for reason, count in sorted(served.items()))
    return Obstacle(ObstacleKind.NO_CAPACITY, f"none of its {total} workers has room now ({parts})")


@dataclass(slots=True)
class _Worker:
    """A worker that is scored exactly: its terms, and the longest prefix in its device pages."""

    slot: int
    view: WorkerView
    correction: policy.Correction
    queue_ms: float
    prefill_ms_per_token: float
    first_token_ms: float
    device: int = 0
    name: str = ""  # of the device prefix


@dataclass(slots=True)
class _Way:
    """A candidate before it is worth building. `resident`: the part of it in device pages. Raw times in ms."""

    worker: _Worker
    tier: Tier
    boundary: int
    resident: int
    name: str
    ttft_ms: float
    load_ms: float = 0.0
    restore: Restore | None = None


class _Planning:
    """One variant's part of one plan."""

    def __init__(
        self,
        request: GenerationRequest,
        entry: Variant,
        fleet: Fleet,
        now_ms: float,
        knobs: PolicyKnobs,
        pruned: Counter[str],
        served: Counter[str],
    ) -> None:
        self.request, self.entry, self.fleet = request, entry, fleet
        self.now_ms, self.knobs, self.pruned, self.served = now_ms, knobs, pruned, served
        self.index, self.table = fleet.index, fleet.table()
        self.length = len(request.tokens)
        self.links = self._links()
        self.sources = Sources(self.links, entry.model.groups, self.index)
        self.named = Named(self.links, entry.model.groups, fleet, knobs)
        self.prefixes = Prefixes(self.table.size)
        keys = tuple(key_of(node.hash) for node in entry.chain.chunks)
        fleet.planned(
            request.request_id, entry.model.fingerprint, (keys, tuple(node.end for node in entry.chain.chunks))
        )

    def ways(self) -> list[_Way]:
        """The best of every tier of every worker that is scored."""
        serving = self.table.serving(self.entry.model.fingerprint)
        if serving is None:
            return []
        self.prefixes.find(self.request, self.entry.chain, self.links, self.sources, self.index, self.knobs)
        feasible = self._counted(bounds.feasible(serving, self.table, self._wanted))
        chosen = bounds.considered(
            feasible, self.prefixes.own, self.table, self.sources, self.request, self._wanted, self.knobs
        )
        workers = [self._worker(slot) for slot in self._counted(chosen)]
        best: dict[tuple[int, Tier], _Way] = {}
        usable = 0
        for worker in workers:
            for way in self._resident(worker):
                usable += self._keep(best, way)
        if self.sources.any and workers:
            usable += self._restored(workers, best)
        self.pruned["dominated"] += usable - len(best)
        able = len({slot for slot, _ in best})
        self.served["capacity"] += len(workers) - able
        self.served["feasible"] -= len(workers) - able
        return list(best.values())

    def _counted(self, verdict: bounds.Verdict[_T]) -> _T:
        """What is left, the others counted."""
        for reason, count in verdict.out.items():
            self.pruned[reason] += count
            if reason != "bound":  # could have run it
                self.served[reason] += count
                self.served["feasible"] -= count
        self.served["feasible"] += verdict.looked_at
        return verdict.left

    @property
    def _wanted(self) -> int:
        return self.length + self.request.max_new_tokens

    def _keep(self, best: dict[tuple[int, Tier], _Way], way: _Way) -> bool:
        """Quicker, and of equals the one that leans on less."""
        other = best.get((way.worker.slot, way.tier))
        if other is None or _order(way) < _order(other):
            best[way.worker.slot, way.tier] = way
        return True

    # --- sources ---

    def _links(self) -> list[Link]:
        """Catalog nodes with the tail; where it knows less than the chain has, bare ones: RAM may hold them."""
        entry, places = self.entry, self.fleet.places
        known = entry.nodes[: len(entry.chain.chunks)]
        tail, end = entry.tail, known[-1].chunk.end if known else 0
        # A tail competes with the full chunk in its place: the catalog only has it where the full chunk is not.
        ends_in_tail = tail is not None and tail.chunk.start == end
        links = []
        for node in (*known, tail) if tail is not None and ends_in_tail else known:
            chunk = node.chunk
            links.append(Link(chunk.hash, key_of(chunk.hash), chunk.parent, chunk.start, chunk.end, places.of(node)))
        if not ends_in_tail:
            links += [
                Link(bare.hash, key_of(bare.hash), bare.parent, bare.start, bare.end, None)
                for bare in entry.chain.chunks[len(known) :]
            ]
        return links

    # --- one worker ---

    def _worker(self, slot: int) -> _Worker:
        view = self.fleet.view(self.index.names[slot])
        assert view is not None  # the table's slots are the fleet's views
        heartbeat, decoding, knobs = view.heartbeat, view.load.decoding, self.knobs
        step_ms = policy.decode_cost(heartbeat.decode, decoding, knobs) if decoding else 0.0
        per_token = policy.prefill_cost(heartbeat.prefill, self.length, knobs)
        return _Worker(
            slot,
            view,
            self.fleet.corrections.of(view.worker),
            view.queue_ms,
            policy.stretched(per_token, step_ms, decoding, knobs),
            policy.decode_cost(heartbeat.decode, decoding + 1, knobs),
            device := int(self.prefixes.device[slot]),
            self.prefixes.names.get(device, ""),
        )

    def _resident(self, worker: _Worker) -> list[_Way]:
        """Recompute, device pages, and what is being computed there."""
        ways = [_Way(worker, Tier.NONE, 0, 0, "", 0.0)]
        if worker.device:
            ways.append(_Way(worker, Tier.GPU, worker.device, worker.device, worker.name, 0.0))
        for end, name, arrival in self.prefixes.coming.get(worker.slot, ()):
            if end > worker.device:
                ways.append(_Way(worker, Tier.INFLIGHT, end, end, name, 0.0, max(0.0, arrival - self.now_ms)))
        fitting = []
        for way in ways:
            if self._fits(worker.view, way.resident):
                way.ttft_ms = self._ttft(worker, way.boundary, way.load_ms, 0.0)
                fitting.append(way)
            else:
                self.pruned["capacity"] += 1
        return fitting

    def _ttft(self, worker: _Worker, boundary: int, load_ms: float, restore_ms: float) -> float:
        ratio = worker.correction
        return policy.predicted_ms(
            worker.queue_ms * ratio.queue,
            load_ms * ratio.restore,
            restore_ms * ratio.restore,
            (self.length - boundary) * (worker.prefill_ms_per_token * ratio.prefill),
            worker.first_token_ms * ratio.first,
        )

    def _restored(self, workers: list[_Worker], best: dict[tuple[int, Tier], _Way]) -> int:
        """Restores on top of the device's prefix, and from lower tiers alone. Returns how many were usable."""
        tried = [(worker, 0) for worker in workers] + [(worker, worker.device) for worker in workers if worker.device]
        slots = np.array([worker.slot for worker, _ in tried], np.int64)
        cases = Cases(
            slots,
            np.array([resident for _, resident in tried], np.int64),
            self.table.rows[:, slots],
            np.array([worker.prefill_ms_per_token * worker.correction.prefill for worker, _ in tried]),
            np.array([self._fits(worker.view, resident) for worker, resident in tried], np.bool_),
        )
        found = self.sources.restores(cases, self.length, self.request.processed)
        for restore in found.best:
            worker, resident = tried[restore.case]
            link = self.links[restore.index]
            ttft_ms = self._ttft(worker, link.end, restore.load_ms, restore.restore_ms)
            self._keep(
                best, _Way(worker, restore.tier, link.end, resident, link.name, ttft_ms, restore.load_ms, restore)
            )
        self.pruned["break-even"] += found.short
        self.pruned["capacity"] += found.cramped
        return found.usable

    def _needed(self, view: WorkerView, resident: int) -> int:
        page_tokens = max(1, view.heartbeat.page_tokens)
        return pages_needed(self.length, self.request.max_new_tokens, page_tokens, resident)

    def _fits(self, view: WorkerView, resident: int) -> bool:
        """Whether free and evictable pages cover the demand; the resident prefix itself is protected, not evictable."""
        if not view.load.pages.total:
            return True  # the worker has not said: it decides
        needed = self._needed(view, resident)
        protected = self._needed(view, 0) - needed
        return needed <= view.free_pages + max(0, view.load.pages.evictable - protected)

    # --- the ranked ---

    def score(self, way: _Way, shunned: frozenset[str]) -> policy.Score:
        """What the way is ranked by."""
        worker = way.worker.view.worker
        return (worker in shunned, way.ttft_ms, worker, way.tier, way.boundary, self.entry.model.fingerprint)

    def option(self, way: _Way) -> RankedCandidate:
        """The way as a candidate."""
        worker, restore = way.worker, way.restore
        view, ratio = worker.view, worker.correction
        heartbeat = view.heartbeat
        restore_ms = restore.restore_ms if restore is not None else 0.0
        compute = self.length - way.boundary
        raw = policy.predicted_ms(
            worker.queue_ms, way.load_ms, restore_ms, compute * worker.prefill_ms_per_token, worker.first_token_ms
        )
        candidate = Candidate(
            worker=view.worker,
            epoch=heartbeat.epoch,
            fingerprint=self.entry.model.fingerprint,
            tier=way.tier,
            cached_tokens=way.boundary,
            cached_bytes=restore.size if restore is not None else 0,
            queue_ms=worker.queue_ms * ratio.queue,
            load_ms=way.load_ms * ratio.restore,
            restore_ms=restore_ms * ratio.restore,
            compute_tokens=compute,
            prefill_ms_per_token=worker.prefill_ms_per_token * ratio.prefill,
            first_token_ms=worker.first_token_ms * ratio.first,
            ttft_ms=way.ttft_ms,
            correction=way.ttft_ms / raw if raw > 0 else 1.0,
            page_tokens=heartbeat.page_tokens,
            free_pages=view.free_pages,
            evictable_pages=view.load.pages.evictable,
            needed_pages=self._needed(view, way.resident),
            max_context=heartbeat.max_context,
            prefix_hash=way.name,
        )
        chain = self.named.nodes(restore.begin, restore.index + 1, worker.slot) if restore is not None else ()
        return RankedCandidate(candidate, chain, worker.queue_ms)


def _order(way: _Way) -> tuple[float, int, int]:
    return way.ttft_ms, way.boundary, way.restore.size if way.restore is not None else 0
