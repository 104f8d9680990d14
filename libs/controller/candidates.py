"""From a request to ranked candidates: every worker, every usable boundary and tier, plus recompute. Pure.

Theory of operation
===================

The chain of the request's processed tokens is hashed once per variant. Three sources say where its prefixes are: the
residency index (device pages, prefills under way, host memory), the catalog's replicas (SSD, and peers' SSD) and its
object receipts. Workers with something of the chain are visited one by one; all others differ only in queue and speed
and can only fetch from peers and the object store, so a lower bound picks the few of them worth scoring: with 1,000
workers and 20 with residency about 84 are looked at.

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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from libs.continuation import chain as chains
from libs.controller.catalog_facts import Chunk, Model, Node, Replica, ReplicaState
from libs.controller.demand import pages_needed
from libs.controller.fleet import Fleet, WorkerView
from libs.controller.knobs import POLICY_KNOBS, PolicyKnobs
from libs.controller.policy import Correction, decode_cost, prefill_cost, rank, scored, stretched, transfer_ms
from libs.controller.protocol import Candidate, GenerationRequest, Pruned, RankedCandidate, Tier
from libs.controller.router_events import Obstacle, ObstacleKind, Plan
from libs.controller.sources import Restore, restorable

_NOWHERE = "0" * 64  # the salt of no tenant


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
    knobs: PolicyKnobs = POLICY_KNOBS,
) -> Plan:
    """Ranked candidates, at most `knobs.ranked`, or the obstacle. `variants` in the name's order; empty = unknown."""
    if not variants:
        detail = f"model {request.model!r} is not known: list the served names with ListModels"
        return Plan(obstacle=Obstacle(ObstacleKind.UNKNOWN_MODEL, detail))
    pruned: Counter[str] = Counter()
    options: list[RankedCandidate] = []
    served = Counter[str]()  # workers of any of the variants, by what came of them
    for entry in variants:
        _Planning(request, entry, fleet, now_ms, knobs, pruned, served).run(options)
    ranked = rank(request.request_id, options, avoid, knobs)
    if len(ranked) > knobs.ranked:
        pruned["rank"] += len(ranked) - knobs.ranked
    counts = tuple(Pruned(reason, pruned[reason]) for reason in sorted(pruned))
    if ranked:
        return Plan(ranked[: knobs.ranked], counts)
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


@dataclass(frozen=True, slots=True)
class _Way:
    """A candidate before it is worth building: tier, boundary, the part of it in device pages, raw costs in ms."""

    tier: Tier
    boundary: int
    resident: int
    name: str
    load_ms: float
    restore_ms: float = 0.0
    size: int = 0
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class _Terms:
    """What all candidates of one worker share; raw, `correction` apart."""

    queue_ms: float
    prefill_ms_per_token: float
    first_token_ms: float
    correction: Correction

    @classmethod
    def of(cls, view: WorkerView, length: int, correction: Correction, knobs: PolicyKnobs) -> _Terms:
        heartbeat, decoding = view.heartbeat, view.load.decoding
        step_ms = decode_cost(heartbeat.decode, decoding, knobs) if decoding else 0.0
        prefill = stretched(prefill_cost(heartbeat.prefill, length, knobs), step_ms, decoding, knobs)
        return cls(view.queue_ms, prefill, decode_cost(heartbeat.decode, decoding + 1, knobs), correction)

    def ttft_ms(self, way: _Way, length: int) -> float:
        """As `policy.scored` will have it."""
        ratio = self.correction
        return (
            max(self.queue_ms * ratio.queue, way.load_ms * ratio.restore)
            + way.restore_ms * ratio.restore
            + (length - way.boundary) * (self.prefill_ms_per_token * ratio.prefill)
            + self.first_token_ms * ratio.first
        )


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
        self.length = len(request.tokens)
        self.groups = entry.model.groups
        self.resident: dict[str, list[tuple[int, str, Tier, float]]] = {}  # worker -> (end, hash, tier, arrival)
        self.nodes = _whole(entry)
        self.replicas: dict[str, dict[int, set[str]]] = {}  # worker -> node index -> groups on its SSD
        self.disks: list[dict[str, set[str]]] = [{} for _ in self.nodes]  # per node: group -> workers with it on SSD
        self.shared: dict[tuple[Tier, ...], list[Restore]] = {}  # restores of workers that hold nothing themselves

    def run(self, options: list[RankedCandidate]) -> None:
        """Appends this variant's candidates."""
        fingerprint = self.entry.model.fingerprint
        self._find_residency()
        self._find_replicas()
        near = set(self.resident) | set(self.replicas)
        feasible: list[WorkerView] = []
        for view in self.fleet.views().values():
            if fingerprint not in view.heartbeat.models:
                continue
            reason = self._infeasible(view)
            if reason is None:
                self.served["feasible"] += 1
                feasible.append(view)
            else:
                self.served[reason] += 1
                self.pruned[reason] += 1
        visited = [view for view in feasible if view.worker in near]
        rest = [view for view in feasible if view.worker not in near]
        if len(rest) > self.knobs.considered:
            self.pruned["bound"] += len(rest) - self.knobs.considered
            length = self.length
            rest = nsmallest(
                self.knobs.considered,
                rest,
                key=lambda view: (
                    view.queue_ms + length * prefill_cost(view.heartbeat.prefill, length, self.knobs),
                    view.worker,
                ),
            )
        for view in visited + rest:
            options += self._of(view)

    # --- sources ---

    def _find_residency(self) -> None:
        index = self.fleet.index
        found: dict[str, int] = {}  # worker -> end of its longest full chunk
        parents: dict[str, int] = {self.entry.chain.base: 0}
        for node in self.entry.chain.chunks:
            holders = index.holders(node.hash)
            for worker in holders:
                self._note(worker, node.hash, node.end, holders[worker])
                found[worker] = node.end
            if holders:
                parents[node.hash] = node.end
        # A resident prefix may end inside the next chunk: look for tails after the chunks where somebody's run ends.
        ends = {0, *found.values(), self.entry.chain.full_end}
        last = [(name, end) for name, end in parents.items() if end in ends][-self.knobs.tail_parents :]
        if self.entry.chain.head not in dict(last):
            last.append((self.entry.chain.head, self.entry.chain.full_end))
        if len(index):
            tokens = self.request.tokens[: self.request.processed]
            for name, end in last:
                for tail in chains.tails_after(name, tokens[end : end + chains.CHUNK_TOKENS], end):
                    for worker, holding in index.holders(tail.hash).items():
                        self._note(worker, tail.hash, tail.end, holding)

    def _note(self, worker: str, name: str, end: int, holding: dict[Tier, float]) -> None:
        entries = self.resident.setdefault(worker, [])
        entries += [(end, name, tier, arrival) for tier, arrival in holding.items()]

    def _find_replicas(self) -> None:
        for index, node in enumerate(self.nodes):
            for replica in node.replicas:
                worker = self.fleet.worker_of(replica.node)
                if worker is not None and replica.state is ReplicaState.READY:
                    self.replicas.setdefault(worker, {}).setdefault(index, set()).add(replica.group)
                    self.disks[index].setdefault(replica.group, set()).add(worker)

    # --- one worker ---

    def _infeasible(self, view: WorkerView) -> str | None:
        heartbeat, pages = view.heartbeat, view.load.pages
        request = self.request
        if heartbeat.draining:
            return "draining"
        if heartbeat.max_context and self.length + request.max_new_tokens > heartbeat.max_context:
            return "context"
        if heartbeat.page_tokens and pages.total:
            needed = pages_needed(self.length, request.max_new_tokens, heartbeat.page_tokens, 0)
            if needed > pages.total:
                return "too-large"
        return None

    def _of(self, view: WorkerView) -> Iterable[RankedCandidate]:
        """The survivors of one worker: the best of each tier, built only once they are known."""
        terms = _Terms.of(view, self.length, self.fleet.corrections.of(view.worker), self.knobs)
        best: dict[Tier, tuple[tuple[float, int, int], _Way]] = {}
        for way in self._ways(view):
            if not self._fits(view, way):
                self.pruned["capacity"] += 1
                continue
            # Quicker, and of equals the one that leans on less.
            order = (terms.ttft_ms(way, self.length), way.boundary, way.size)
            other = best.get(way.tier)
            if other is not None:
                self.pruned["dominated"] += 1
            if other is None or order < other[0]:
                best[way.tier] = (order, way)
        if not best:
            self.served["feasible"] -= 1
            self.served["capacity"] += 1
        return [self._option(view, terms, way) for _, way in best.values()]

    def _ways(self, view: WorkerView) -> Iterable[_Way]:
        """Every way to run the request there."""
        held = self.resident.get(view.worker, [])
        device = max(((end, name) for end, name, tier, _ in held if tier is Tier.GPU), default=(0, ""))
        yield _Way(Tier.NONE, 0, 0, "", 0.0)
        if device[0]:
            yield _Way(Tier.GPU, device[0], device[0], device[1], 0.0)
        for end, name, tier, arrival in held:
            if tier is Tier.INFLIGHT and end > device[0]:
                yield _Way(Tier.INFLIGHT, end, end, name, max(0.0, arrival - self.now_ms))
        gpu = view.costs.get(Tier.GPU)
        for restore in self._restores(view, held, device[0]):
            cost = view.costs.get(restore.tier)
            if cost is not None and restore.tokens < cost.break_even_tokens:
                self.pruned["break-even"] += 1
                continue
            load_ms = sum(transfer_ms(view.costs.get(tier), size, self.knobs) for tier, size in restore.bytes_by_tier)
            size = restore.bytes
            yield _Way(
                restore.tier,
                restore.boundary,
                restore.resident,
                restore.nodes[-1].chunk.hash,
                load_ms,
                transfer_ms(gpu, size, self.knobs),
                size,
                restore.nodes,
            )

    def _restores(self, view: WorkerView, held: list[tuple[int, str, Tier, float]], device: int) -> list[Restore]:
        """Restores on top of the device's prefix, and from lower tiers alone."""
        allowed = self._allowed(view)
        limit = self.request.processed
        own = bool(held) or view.worker in self.replicas
        shared = self.shared.get(tuple(allowed)) if not own else None
        if shared is not None:
            return shared
        holdings = self._holdings(view)
        found = [
            restore
            for resident in sorted({0, device})
            for restore in restorable(self.groups, self.nodes, holdings, allowed, resident, limit)
        ]
        if not own:
            self.shared[tuple(allowed)] = found
        return found

    def _allowed(self, view: WorkerView) -> list[Tier]:
        """Tiers this worker may restore from, cheapest first by its own measurements (one chunk's bytes).

        Peers only where the worker reports what they cost: without that it has no way to them.
        """
        tiers = [Tier.RAM, Tier.SSD, Tier.OBJECT] + ([Tier.PEER] if Tier.PEER in view.costs else [])
        size = max(1, view.heartbeat.bytes_per_token) * chains.CHUNK_TOKENS
        return sorted(tiers, key=lambda tier: (transfer_ms(view.costs.get(tier), size, self.knobs), tier))

    def _holdings(self, view: WorkerView) -> list[dict[str, frozenset[Tier]]]:
        index = self.fleet.index
        own = self.replicas.get(view.worker, {})
        holdings: list[dict[str, frozenset[Tier]]] = []
        for position, node in enumerate(self.nodes):
            durable = {receipt.group for receipt in node.chunk.receipts}
            here = own.get(position, set())
            holders = index.holders(node.chunk.hash)
            remembered = [worker for worker, holding in holders.items() if Tier.RAM in holding]
            tiers: dict[str, frozenset[Tier]] = {}
            for group in self.groups:
                name = group.name
                memory = {worker for worker in remembered if index.in_memory(worker, node.chunk.hash, name)}
                disks: Collection[str] = self.disks[position].get(name, ())
                places = [Tier.OBJECT] if name in durable else []
                places += [Tier.SSD] if name in here else []
                places += [Tier.RAM] if view.worker in memory else []
                if len(disks) > (view.worker in disks) or len(memory) > (view.worker in memory):
                    places.append(Tier.PEER)
                tiers[name] = frozenset(places)
            holdings.append(tiers)
        return holdings

    def _named(self, nodes: Sequence[Node], worker: str) -> tuple[Node, ...]:
        """The nodes, with the directories of the other workers that hold them in memory named as replicas of no known
        content: a peer is found by its directory, and memory holds what its disk may have given up.
        """
        index, named = self.fleet.index, list[Node]()
        for node in nodes:
            known = {(replica.node, replica.group) for replica in node.replicas}
            found = [
                Replica(view.heartbeat.node, group.name, ReplicaState.READY, "")
                for holder, holding in sorted(index.holders(node.chunk.hash).items())
                if holder != worker and Tier.RAM in holding
                for view in [self.fleet.view(holder)]
                if view is not None and view.heartbeat.node
                for group in self.groups
                if (view.heartbeat.node, group.name) not in known
                and index.in_memory(holder, node.chunk.hash, group.name)
            ]
            named.append(replace(node, replicas=(*node.replicas, *found)) if found else node)
        return tuple(named)

    def _option(self, view: WorkerView, terms: _Terms, way: _Way) -> RankedCandidate:
        heartbeat = view.heartbeat
        candidate = Candidate(
            worker=view.worker,
            epoch=heartbeat.epoch,
            fingerprint=self.entry.model.fingerprint,
            tier=way.tier,
            cached_tokens=way.boundary,
            cached_bytes=way.size,
            queue_ms=terms.queue_ms,
            load_ms=way.load_ms,
            restore_ms=way.restore_ms,
            compute_tokens=self.length - way.boundary,
            prefill_ms_per_token=terms.prefill_ms_per_token,
            first_token_ms=terms.first_token_ms,
            page_tokens=heartbeat.page_tokens,
            free_pages=_free(view),
            evictable_pages=view.load.pages.evictable,
            needed_pages=self._needed(view, way.resident),
            max_context=heartbeat.max_context,
            prefix_hash=way.name,
        )
        return RankedCandidate(scored(candidate, terms.correction), self._named(way.nodes, view.worker), terms.queue_ms)

    def _needed(self, view: WorkerView, resident: int) -> int:
        page_tokens = max(1, view.heartbeat.page_tokens)
        return pages_needed(self.length, self.request.max_new_tokens, page_tokens, resident)

    def _fits(self, view: WorkerView, way: _Way) -> bool:
        """Whether free and evictable pages cover the demand; the resident prefix itself is protected, not evictable."""
        if not view.load.pages.total:
            return True  # the worker has not said: it decides
        needed = self._needed(view, way.resident)
        protected = self._needed(view, 0) - needed
        return needed <= _free(view) + max(0, view.load.pages.evictable - protected)


def _free(view: WorkerView) -> int:
    return max(0, view.load.pages.free - view.booked_pages)


def _whole(entry: Variant) -> tuple[Node, ...]:
    """Catalog nodes with the tail; where the catalog knows less than the chain has, bare nodes: RAM may hold them."""
    known = entry.nodes[: len(entry.chain.chunks)]
    nodes = list(known)
    if entry.tail is not None and entry.tail.chunk.start == (known[-1].chunk.end if known else 0):
        # A tail competes with the full chunk in its place: the catalog only has it where the full chunk is not.
        nodes.append(entry.tail)
        return tuple(nodes)
    nodes += [Node(Chunk(node.hash, node.parent, node.start, node.end)) for node in entry.chain.chunks[len(known) :]]
    return tuple(nodes)
