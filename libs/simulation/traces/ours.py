"""Our policy in the replay: the router's own planning, ledger, corrections and index, on heartbeats made of samples.

The chain's nodes are the trace's blocks: names stand for hashes, since equal ids are equal prefixes. Device pages and
memory are heard of in heartbeats, disks and the object store through facts as the catalog would tell them, as stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from libs.simulation.traces.tiers import UNCHANGED, Directory
from libs.simulation.traces.worker import Job

_ROOT = "0" * 64
_GROUP = LayerGroup("full", (0,), 0, 1, 1, "float32")
_TOKEN_BYTES = 8  # of that group
_MODEL = Model("1" * 64, (_GROUP,), BLOCK_TOKENS)
_FURTHEST = 1 << 30
_KEPT = 1 << 19  # blocks on no disk whose names, links and facts are kept: made again when they are wanted again
_GPU, _RAM, _INFLIGHT = Tier.GPU, Tier.RAM, Tier.INFLIGHT


@dataclass(slots=True, eq=False)
class _Block:
    """A block of the trace as a router hears of it. `disks`: of these workers (bits), as they told; `node`: what the
    catalog would say, with `told` as its disks and `told_stored` whether the store had it.
    """

    number: int
    name: str
    link: chains.Node | None = None
    disks: int = 0
    node: Node | None = None
    told: int = 0
    told_stored: bool = False


class _Blocks(dict[int, _Block]):
    """By number; made when first asked for."""

    def __missing__(self, number: int) -> _Block:
        made = self[number] = _Block(number, f"{number:064x}")
        return made


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
        self._bits = [1 << number for number in range(workers)]
        self._blocks = _Blocks()
        self._coming: list[set[int]] = [set() for _ in range(workers)]  # blocks told of as coming, by worker
        self._most = _KEPT
        for number in range(workers):
            first = Sample(number, 0.0, 0.0, 0, 0, 0, UNCHANGED, UNCHANGED, UNCHANGED, (), Factors())
            self.fleet.observe(Observed(self._heartbeat(first), True, True), 0.0)

    def choose(self, number: int, request: Recorded, now: float) -> int:
        name = f"{self._seed}-{number}"
        if len(self._blocks) > self._most:
            self._blocks = _Blocks({number: block for number, block in self._blocks.items() if block.disks})
            self._most = len(self._blocks) + _KEPT
        # Nothing reads the tokens: the chain is given, and no worker advertises a tail.
        tokens = (0,) * request.input_tokens
        asked = GenerationRequest(name, "m", tokens, request.input_tokens, max(1, request.output_tokens))
        blocks = [self._blocks[one] for one in request.blocks]
        links = self._chain(request, blocks)
        nodes: list[Node] = []
        for block, link in zip(blocks, links, strict=False):  # a last block of one token is in no chain
            node = self._fact(block, link, now)
            if node is None:
                break
            nodes.append(node)
        entry = candidates.Variant(_MODEL, chains.Chain(_ROOT, 0, links), tuple(nodes))
        plan = candidates.plan(asked, (entry,), self.fleet, now, first=1)
        best = plan.ranked[0].candidate
        assignment = AssignmentId(name, 1)
        self.fleet.account(Booked(assignment, best), now)
        self.fleet.account(Accepted(assignment), now + 2 * self._costs.hop_ms)
        self._chosen[number] = best
        return self._numbers[best.worker]

    def heard(self, sample: Sample, now: float) -> None:
        bit = self._bits[sample.worker]
        for number in sample.ssd.entered:
            block = self._blocks[number]
            block.disks = block.disks | bit if block.disks else bit
        for number in sample.ssd.left:
            block = self._blocks[number]
            if block.disks & bit:
                block.disks ^= bit
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

    def _chain(self, request: Recorded, blocks: Sequence[_Block]) -> tuple[chains.Node, ...]:
        links: list[chains.Node] = []
        parent, start = _ROOT, 0
        for block in blocks:
            link = block.link
            if link is None:
                link = block.link = chains.Node(block.name, parent, start, start + BLOCK_TOKENS)
            links.append(link)
            parent, start = block.name, link.end
        last = links[-1]
        end = request.end(len(links))
        if last.end != end:
            links[-1] = chains.Node(last.hash, last.parent, last.start, end)
        return tuple(links) if end > last.start else tuple(links[:-1])

    def _fact(self, block: _Block, link: chains.Node, now: float) -> Node | None:
        disks, store = block.disks, self._tiers.store
        stored = store and self._directory.stored.get(block.number, now) + self._costs.stale_ms <= now
        if not disks and not stored:
            return None
        node = block.node
        if node is not None and block.told == disks and block.told_stored == stored and node.chunk.end == link.end:
            return node
        receipts = (Receipt(_GROUP.name, "b", "k", "e", 0, "c"),) if stored else ()
        replicas = tuple(Replica(self._names[at], _GROUP.name, ReplicaState.READY, "c") for at in bits(disks))
        node = Node(Chunk(link.hash, link.parent, link.start, link.end, receipts=receipts), replicas)
        block.told, block.told_stored, block.node = disks, stored, node
        return node

    def _heartbeat(self, sample: Sample) -> Heartbeat:
        worker, costs, factors = sample.worker, self._costs, sample.factors
        self._sequence[worker] += 1
        name, model, blocks = self._names[worker], _MODEL.fingerprint, self._blocks
        coming, stale = self._coming[worker], costs.stale_ms
        resident = [
            Resident(blocks[block].name, BLOCK_TOKENS, _INFLIGHT, model, max(0.0, there - stale))
            for block, there in sample.coming
        ]
        gone: list[Gone] = []
        for tier, changes in ((_GPU, sample.device), (_RAM, sample.ram)):
            resident += [Resident(blocks[block].name, BLOCK_TOKENS, tier, model) for block in changes.entered]
            gone += [Gone(blocks[block].name, tier) for block in changes.left]
        coming.difference_update(sample.device.entered)
        for block in sample.device.left:
            if block in coming:
                coming.remove(block)
                gone.append(Gone(blocks[block].name, _INFLIGHT))
        coming.update([block for block, _ in sample.coming])
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
