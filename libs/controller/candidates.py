"""From a request to ranked candidates: every worker, every usable boundary and tier, plus recompute. Pure.

Theory of operation
===================

The chain of the request's processed tokens is hashed once per variant. Three sources say where its prefixes are: the
residency index (device pages, prefills under way, host memory), the catalog's replicas (SSD, and peers' SSD) and its
object receipts.

All workers are looked at together, as columns (`table`): one pass over the chain finds the longest prefix that each
has in device pages, and in any tier of its own; then every worker has a bound in a few operations on columns, which
none of its candidates beats. Workers are scored exactly one by one, the least bound first (`ways`), until the next
bound is behind all that will be ranked; never more than `knobs.considered` of those that hold something, and
`considered_others` of those that do not. With 1,000 workers and 20 with residency about 20 are.

For one worker the resident prefix R is the longest boundary in its device pages. Candidates: R itself (GPU); a
running prefill's boundary (INFLIGHT); each boundary restorable on top of R; each restorable from lower tiers alone,
so that a stale GPU candidate leaves something to fall back to; recompute. Of one worker and tier only the best
boundary survives (the others cannot win: `dominated`), and no restore below the worker's measured break-even
(`break-even`).

A plan may say that none of its candidates should be asked yet, because others compute what they would (`holding`).

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
from libs.controller import bounds, holding, policy
from libs.controller.bounds import Prefixes
from libs.controller.catalog_facts import Model, Node
from libs.controller.corrections import Correction
from libs.controller.demand import pages_needed
from libs.controller.fleet import Fleet, WorkerView
from libs.controller.knobs import PolicyKnobs
from libs.controller.peers import Named
from libs.controller.protocol import Candidate, GenerationRequest, Heartbeat, Pruned, RankedCandidate
from libs.controller.residency import key_of
from libs.controller.router_events import Herd, Obstacle, ObstacleKind, Plan
from libs.controller.sources import Link, Sources, group_bytes
from libs.controller.table import Flags
from libs.controller.ways import Way, Ways

_NOWHERE = "0" * 64  # the salt of no tenant
_T = TypeVar("_T")
_Known = tuple[WorkerView, Heartbeat, Correction, int, int]
"""Of a worker: its view, the view's heartbeat, its correction, free pages, pages of the whole sequence."""


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
    herd: Herd | None = None,
    first: int | None = None,
) -> Plan:
    """Ranked candidates, at most `knobs.ranked`, or the obstacle. `variants` in the name's order; empty = unknown.

    `knobs`: the fleet's by default; `herd`: where the request was held before; `first`: only so many of the ranked are
    made, for who asks for no more.
    """
    if not variants:
        detail = f"model {request.model!r} is not known: list the served names with ListModels"
        return Plan(obstacle=Obstacle(ObstacleKind.UNKNOWN_MODEL, detail))
    knobs = knobs or fleet.knobs
    pruned: Counter[str] = Counter()
    served = Counter[str]()  # workers of any of the variants, by what came of them
    planned = [_Planning(request, entry, fleet, now_ms, knobs, pruned, served, herd) for entry in variants]
    # Who is to be avoided comes last whatever it would take: then all are looked at.
    most = knobs.ranked if not avoid else None
    made = [(one, found) for one in planned if (found := one.ways(most)) is not None]
    ways = [(one, way) for one, found in made for way in found.best()]
    shunned = frozenset(avoid)
    scores = []
    for one, way in ways:
        worker = one.worker(way)
        scores.append(
            (worker in shunned, way.ttft_ms, worker, int(way.tier), way.boundary, one.entry.model.fingerprint)
        )
    draw = made[0][0].draw if made else policy.BY_REQUEST
    best = policy.order(request.request_id, scores, knobs, draw)
    hold, leads = None, False
    if best:
        planning, chosen = ways[best[0]]
        asked = planning.asked()
        every = next(found.found for one, found in made if one is planning)
        chain = planning.entry.chain
        leads, dealt = holding.leads(asked, chosen, chain.full_end), None
        if leads and planning.draw.name:
            fleet.herds.leads(request.request_id, planning.draw.name, chain.chunks)
        if holding.worth_asking(planning.prefixes, herd):
            hold = holding.hold(asked, chosen, every)
            dealt = holding.drawn(asked, chosen, every)
        if herd is None and len(fleet.herds):
            member = fleet.herds.member(request.request_id, chain.chunks, now_ms)
            dealt = holding.joined(asked, chosen, every, member)
        if hold is not None:
            pruned["held"] += sum([way.boundary < hold.tokens for way in every])
        elif dealt is not None and (herd is None or dealt != draw):
            # Dealt among those that are kept, so that what is recorded is dealt the same: every worker's best.
            best = _by_worker(best, scores)[: knobs.ranked]
            kept = [scores[index] for index in best]
            draw = dealt if herd is not None else policy.seated(kept, knobs, dealt, fleet.herds.served(dealt.name))
            best = [best[place] for place in policy.order(request.request_id, kept, knobs, draw)]
    best = best[: knobs.ranked]
    pruned["rank"] += sum([len(found.found) for _, found in made]) - len(best)
    counts = tuple([Pruned(reason, pruned[reason]) for reason in sorted(pruned) if pruned[reason]])
    if best:
        ranked = tuple([ways[index][0].option(ways[index][1]) for index in best[:first]])
        return Plan(ranked, counts, hold=hold, leads=leads, draw=draw)
    return Plan(pruned=counts, obstacle=_obstacle(request, variants, served))


def _by_worker(order: Sequence[int], scores: Sequence[policy.Score]) -> list[int]:
    """Every worker's first, then the others."""
    firsts: dict[str, int] = {}
    for index in order:
        firsts.setdefault(scores[index][2], index)
    return [*firsts.values(), *[index for index in order if firsts[scores[index][2]] != index]]


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
        herd: Herd | None,
    ) -> None:
        self.herd, self.draw, self.able = herd, policy.BY_REQUEST, 0
        self.request, self.entry, self.fleet = request, entry, fleet
        self.now_ms, self.knobs, self.pruned, self.served = now_ms, knobs, pruned, served
        self.index, self.table = fleet.index, fleet.table()
        self.length = len(request.tokens)
        self.wanted = self.length + request.max_new_tokens
        self.links = self._links()
        self.sources = Sources(self.links, entry.model.groups, self.index)
        self.named = Named(self.links, entry.model.groups, fleet, knobs)
        self.prefixes = Prefixes(self.table.size)
        chunks = entry.chain.chunks
        if len(self.links) == len(chunks) and entry.tail is None:
            self.keys, ends = tuple([link.key for link in self.links]), tuple(self.sources.ends)
        else:
            self.keys, ends = tuple([key_of(node.hash) for node in chunks]), tuple([node.end for node in chunks])
        self._workers: dict[int, _Known] = {}
        fleet.planned(request.request_id, entry.model.fingerprint, (self.keys, ends))

    def ways(self, most: int | None) -> Ways | None:
        """The best of every tier of every worker that is scored; None where nobody serves the model."""
        fingerprint = self.entry.model.fingerprint
        serving = self.table.serving(fingerprint)
        if serving is None:
            return None
        request, now_ms, knobs, table, sources = self.request, self.now_ms, self.knobs, self.table, self.sources
        prefixes = self.prefixes
        prefixes.find(request, self.entry.chain, self.keys, sources, self.index, knobs)
        able = self._counted(bounds.feasible(serving, table, fingerprint, self.wanted))
        fixed = self.fleet.fixed.of(fingerprint)
        self.able = int(np.count_nonzero(able))
        self.draw = self._drawn(able)
        by = self.draw.name or request.request_id
        slots = self._counted(
            bounds.considered(able, prefixes.own, table, sources, fixed, request, self.wanted, now_ms, knobs, by)
        )
        found = Ways(table, prefixes, sources, fixed, self.length, self.wanted, request.processed, now_ms, knobs, most)
        found.look_at(slots)
        if len(slots) > found.looked_at:
            self.pruned["bound"] += len(slots) - found.looked_at
        for reason, count in found.pruned.items():
            self.pruned[reason] += count
        unable = found.looked_at - found.able
        self.served["capacity"] += unable
        self.served["feasible"] -= unable
        return found

    def _drawn(self, able: Flags) -> policy.Draw:
        """By the first chunk that nobody has, where so much is to be computed that others may come to wait for it."""
        if self.herd is not None:
            return policy.Draw(self.herd.prefix)
        entry, settled = self.entry, self.prefixes.settled
        if entry.nodes:
            settled = max(settled, entry.nodes[-1].chunk.end)
        new = entry.chain.full_end - settled
        if new <= 0 or not self.able:
            return policy.BY_REQUEST
        if new * float(np.minimum.reduce(self.table.per_token(self.length)[able])) < self.knobs.hold_least_ms:
            return policy.BY_REQUEST
        return policy.Draw(next(chunk.hash for chunk in entry.chain.chunks if chunk.end > settled))

    def asked(self) -> holding.Request:
        """As `holding` wants to know it."""
        size = sum([group_bytes(group) for group in self.entry.model.groups])
        return holding.Request(
            self.length, size, self.able, self.prefixes, self.fleet, self.table, self.now_ms, self.knobs, self.herd
        )

    def _counted(self, verdict: bounds.Verdict[_T]) -> _T:
        """What is left, the others counted."""
        for reason, count in verdict.out.items():
            self.pruned[reason] += count
            if reason != "bound":  # could have run it
                self.served[reason] += count
                self.served["feasible"] -= count
        self.served["feasible"] += verdict.looked_at
        return verdict.left

    def _links(self) -> list[Link]:
        """Catalog nodes with the tail; where it knows less than the chain has, bare ones: RAM may hold them."""
        entry, places = self.entry, self.fleet.places
        known = entry.nodes[: len(entry.chain.chunks)]
        tail, end = entry.tail, known[-1].chunk.end if known else 0
        # A tail competes with the full chunk in its place: the catalog only has it where the full chunk is not.
        ends_in_tail = tail is not None and tail.chunk.start == end
        links = [places.link(node) for node in known]
        if tail is not None and ends_in_tail:
            links.append(places.link(tail))
        else:
            links += places.bare(entry.chain.chunks[len(known) :])
        return links

    def worker(self, way: Way) -> str:
        """Its worker's name."""
        return self.index.names[way.terms.slot]

    def option(self, way: Way) -> RankedCandidate:
        """The way as a candidate."""
        terms, compute = way.terms, self.length - way.boundary
        view, heartbeat, ratio, free, whole = self._known(terms.slot)
        prefill_ms = compute * terms.prefill_ms / ratio.prefill
        raw = max(terms.wait_ms, way.load_ms / ratio.restore) + way.restore_ms / ratio.restore
        raw += prefill_ms + (terms.first_ms - view.way_ms) / ratio.first + view.way_ms
        restored = way.link >= 0
        candidate = Candidate(
            heartbeat.worker,
            heartbeat.epoch,
            self.entry.model.fingerprint,
            way.tier,
            way.boundary,
            way.size,
            terms.queue_ms,
            way.load_ms,
            way.restore_ms,
            compute,
            terms.prefill_ms,
            way.first_ms,
            way.ttft_ms,
            way.ttft_ms / raw if raw > 0 else 1.0,
            heartbeat.page_tokens,
            free,
            view.load.pages.evictable,
            max(0, whole - way.resident // (heartbeat.page_tokens or 1)),
            heartbeat.max_context,
            self.links[way.link].name if restored else way.name,
        )
        chain = self.named.nodes(way.begin, way.link + 1, terms.slot) if restored else ()
        return RankedCandidate(candidate, chain, terms.wait_ms)

    def _known(self, slot: int) -> _Known:
        """What all ways of one worker share."""
        found = self._workers.get(slot)
        if found is None:
            view = self.fleet.view(self.index.names[slot])
            assert view is not None  # the table's slots are the fleet's views
            heartbeat, ratio = view.heartbeat, self.fleet.corrections.of(view.worker)
            whole = pages_needed(self.length, self.request.max_new_tokens, max(1, heartbeat.page_tokens), 0)
            found = self._workers[slot] = (view, heartbeat, ratio, view.free_pages, whole)
        return found
