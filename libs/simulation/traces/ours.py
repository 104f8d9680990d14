"""Our policy in the replay: the router's own planning, ledger, corrections and index, on heartbeats made of samples.

The chain's nodes are the trace's blocks: names stand for hashes, since equal ids are equal prefixes. Device pages and
memory are heard of in heartbeats, disks and the object store through facts as the catalog would tell them, as stale.
"""

from __future__ import annotations

from typing import cast

from libs.continuation import chain as chains
from libs.controller import candidates
from libs.controller.catalog_facts import Chunk, LayerGroup, Model, Node, Receipt, Replica, ReplicaState
from libs.controller.discovery import Observed
from libs.controller.fleet import Fleet
from libs.controller.knobs import PolicyKnobs
from libs.controller.protocol import (
    AssignmentId,
    Candidate,
    DecodeCost,
    GenerationRequest,
    Gone,
    Heartbeat,
    Load,
    PrefillCost,
    Resident,
    Tier,
    TierCost,
    Timings,
    Usage,
)
from libs.controller.residency import bits
from libs.controller.router_effects import Accepted, Booked, Measured, Unbooked
from libs.simulation.traces.costs import Costs, TierSet, Transfer
from libs.simulation.traces.recorded import BLOCK_TOKENS, Recorded
from libs.simulation.traces.routing import Factors, Policy, Sample
from libs.simulation.traces.tiers import Directory
from libs.simulation.traces.worker import Job

_ROOT = "0" * 64
_GROUP = LayerGroup("full", (0,), 0, 1, 1, "float32")
_TOKEN_BYTES = 8  # of that group
_MODEL = Model("1" * 64, (_GROUP,), BLOCK_TOKENS)
_FURTHEST = 1 << 30
_KEPT = 1 << 19  # blocks whose names, links and facts are kept: made again when they are wanted again


def knobs(costs: Costs) -> PolicyKnobs:
    """What a router of such workers is set to: their prefill budget, and when a heartbeat contains an assignment."""
    return PolicyKnobs(
        prefill_budget_tokens=costs.budget_tokens,
        settle_ms=costs.stale_ms,
        default_prefill_ms_per_token=costs.prefill_ms,
        default_first_token_ms=costs.decode_ms,
    )


class Segue(Policy):
    """See the module."""

    def __init__(
        self,
        workers: int,
        seed: int,
        costs: Costs,
        tiers: TierSet,
        directory: Directory,
        changed: PolicyKnobs | None = None,
    ) -> None:
        self.fleet = Fleet(changed or knobs(costs))
        self._seed, self._costs, self._tiers, self._directory = seed, costs, tiers, directory
        self._names = [f"w{number:04}" for number in range(workers)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._sequence = [0] * workers
        self._chosen: dict[int, Candidate] = {}
        self._hashes: dict[int, str] = {}
        self._links: dict[int, chains.Node] = {}
        self._disks: dict[int, int] = {}  # block -> bits of workers
        self._facts: dict[int, tuple[int, bool, Node]] = {}
        for number in range(workers):
            first = Sample(number, 0.0, 0.0, 0, 0, 0, (), (), (), (), Factors())
            self.fleet.observe(Observed(self._heartbeat(first), True, True), 0.0)

    def choose(self, number: int, request: Recorded, now: float) -> int:
        name = f"{self._seed}-{number}"
        if len(self._hashes) > _KEPT:
            for kept in (self._hashes, self._links, self._facts):
                kept.clear()
        # Nothing reads the tokens: the chain is given, and no worker advertises a tail.
        tokens = cast("tuple[int, ...]", range(request.input_tokens))
        asked = GenerationRequest(name, "m", tokens, request.input_tokens, max(1, request.output_tokens))
        links = self._chain(request)
        nodes: list[Node] = []
        for block, link in zip(request.blocks, links, strict=False):  # a last block of one token is in no chain
            node = self._fact(block, link, now)
            if node is None:
                break
            nodes.append(node)
        entry = candidates.Variant(_MODEL, chains.Chain(_ROOT, 0, links), tuple(nodes))
        plan = candidates.plan(asked, (entry,), self.fleet, now)
        best = plan.ranked[0].candidate
        assignment = AssignmentId(name, 1)
        self.fleet.account(Booked(assignment, best), now)
        self.fleet.account(Accepted(assignment), now + 2 * self._costs.hop_ms)
        self._chosen[number] = best
        return self._numbers[best.worker]

    def heard(self, sample: Sample, now: float) -> None:
        for block, there in sample.ssd:
            old, bit = self._disks.get(block, 0), 1 << sample.worker
            left = old | bit if there else old & ~bit
            if left:
                self._disks[block] = left
            else:
                self._disks.pop(block, None)
        self.fleet.observe(Observed(self._heartbeat(sample), False, True), now)

    def finished(self, worker: int, job: Job, now: float) -> None:
        chosen = self._chosen.pop(job.number)
        begun = max(job.arrived_ms, job.ready_ms) if job.staged else job.arrived_ms
        staging = job.staged * self._costs.restore_ms
        timings = Timings(
            queue_ms=max(0.0, job.started_ms - begun),
            restore_ms=job.load_ms + staging if job.staged else 0.0,
            prefill_ms=job.prefilled_ms - job.started_ms - staging if job.computed else 0.0,
            first_token_ms=job.first_ms - job.prefilled_ms,
            ttft_ms=job.first_ms - job.arrived_ms,
        )
        self.fleet.account(Measured(chosen, Usage(), timings), now)
        self.fleet.account(Unbooked(AssignmentId(f"{self._seed}-{job.number}", 1)), now)

    # --- as the wire and the catalog would say it ---

    def _hash(self, block: int) -> str:
        found = self._hashes.get(block)
        if found is None:
            found = self._hashes[block] = f"{block:064x}"
        return found

    def _chain(self, request: Recorded) -> tuple[chains.Node, ...]:
        links: list[chains.Node] = []
        parent, start = _ROOT, 0
        for block in request.blocks:
            link = self._links.get(block)
            if link is None:
                link = self._links[block] = chains.Node(self._hash(block), parent, start, start + BLOCK_TOKENS)
            links.append(link)
            parent, start = link.hash, link.end
        last = links[-1]
        end = request.end(len(links))
        if last.end != end:
            links[-1] = chains.Node(last.hash, last.parent, last.start, end)
        return tuple(links) if end > last.start else tuple(links[:-1])

    def _fact(self, block: int, link: chains.Node, now: float) -> Node | None:
        disks = self._disks.get(block, 0)
        stored = self._tiers.store and self._directory.stored.get(block, now) + self._costs.stale_ms <= now
        if not disks and not stored:
            return None
        known = self._facts.get(block)
        if known is not None and known[0] == disks and known[1] == stored and known[2].chunk.end == link.end:
            return known[2]
        receipts = (Receipt(_GROUP.name, "b", "k", "e", 0, "c"),) if stored else ()
        replicas = tuple(Replica(self._names[at], _GROUP.name, ReplicaState.READY, "c") for at in bits(disks))
        node = Node(Chunk(link.hash, link.parent, link.start, link.end, receipts=receipts), replicas)
        self._facts[block] = (disks, stored, node)
        return node

    def _heartbeat(self, sample: Sample) -> Heartbeat:
        worker, costs, factors = sample.worker, self._costs, sample.factors
        self._sequence[worker] += 1
        name, model = self._names[worker], _MODEL.fingerprint
        resident = [
            Resident(self._hash(block), BLOCK_TOKENS, Tier.INFLIGHT, model, max(0.0, there - costs.stale_ms))
            for block, there in sample.coming
        ]
        gone: list[Gone] = []
        for tier, changes in ((Tier.GPU, sample.device), (Tier.RAM, sample.ram)):
            for block, there in changes:
                if there:
                    resident.append(Resident(self._hash(block), BLOCK_TOKENS, tier, model))
                else:
                    gone.append(Gone(self._hash(block), tier))
                    if tier is Tier.GPU:
                        gone.append(Gone(self._hash(block), Tier.INFLIGHT))
        return Heartbeat(
            worker=name,
            epoch=1,
            sequence=self._sequence[worker],
            node=name,
            load=Load(sample.queue_ms * factors.queue, sample.active, sample.decoding, sample.waiting),
            lanes=costs.lanes,
            models=(model,),
            prefill=(PrefillCost(_FURTHEST, costs.prefill_ms * factors.prefill),),
            decode=(DecodeCost(costs.lanes, costs.decode_ms * factors.decode),),
            tiers=self._tier_costs(factors.restore),
            resident=tuple(resident),
            gone=tuple(gone),
            bytes_per_token=_TOKEN_BYTES,
        )

    def _tier_costs(self, factor: float) -> tuple[TierCost, ...]:
        costs = self._costs
        found = [(Tier.GPU, Transfer(costs.restore_ms, 0.0)), (Tier.RAM, costs.ram), (Tier.SSD, costs.ssd)]
        if self._tiers.peers:
            # Which tier of a peer it will be is not known: mostly the larger one.
            per_token = costs.ssd.per_token_ms + costs.peer.per_token_ms
            found.append((Tier.PEER, Transfer(per_token, costs.ssd.latency_ms + costs.peer.latency_ms)))
        if self._tiers.store:
            found.append((Tier.OBJECT, costs.store))
        return tuple(
            TierCost(tier, cost.latency_ms * factor, _TOKEN_BYTES / (cost.per_token_ms * factor))
            for tier, cost in found
        )
