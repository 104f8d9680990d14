"""From all workers to the few that are scored exactly: prefixes, feasibility and a bound, in columns. Pure.

The bound of a worker is what its best candidate could be at most as good as: everything it has of the chain in its own
tiers at no cost, or the whole of what all can restore from peers and the store at the worker's own costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from libs.continuation import chain as chains
from libs.controller import policy
from libs.controller import table as rows
from libs.controller.knobs import PolicyKnobs
from libs.controller.protocol import GenerationRequest
from libs.controller.residency import ResidencyIndex, bits, key_of
from libs.controller.sources import Shared, Sources
from libs.controller.table import Flags, Floats, Hashes, Ints, Table

_COMING = 4  # boundaries of running prefills that are tried at one worker, the longest
_UNBOUNDED = 12  # workers that are quicker scored than bounded
_FEW = 8  # holders that are quicker set one by one
_GPU = 4  # the place of staging in a table's tiers
T = TypeVar("T")


class Verdict(NamedTuple, Generic[T]):
    """Who is left, and how many are out for which reason. `looked_at`: workers seen for the first time."""

    left: T
    out: dict[str, int]
    looked_at: int = 0


@dataclass(slots=True)
class Prefixes:
    """How much of one chain each worker has. By slot; `names`: device boundary -> its name."""

    size: int
    device: Ints = field(init=False)  # the longest boundary in device pages
    own: Ints = field(init=False)  # in any tier of its own, running prefills included
    settled: int = 0  # the most of it that any has in a tier of its own, running prefills apart
    names: dict[int, str] = field(default_factory=dict)
    coming: dict[int, list[tuple[int, str, float]]] = field(default_factory=dict)  # boundary, name, arrival

    def __post_init__(self) -> None:
        self.device = np.zeros(self.size, np.int64)
        self.own = np.zeros(self.size, np.int64)

    def find(
        self,
        request: GenerationRequest,
        chain: chains.Chain,
        keys: Sequence[int],
        sources: Sources,
        index: ResidencyIndex,
        knobs: PolicyKnobs,
    ) -> None:
        """One pass over the chain, from the longest boundary down."""
        self._find_lower(sources)
        runs = self._find_resident(chain, keys, index)
        if index.tail_ends:
            self._find_tails(request, chain, runs[: knobs.tail_parents], index)
        np.maximum(self.own, self.device, out=self.own)
        self.settled = int(np.maximum.reduce(self.own)) if self.size else 0
        for slot, boundaries in self.coming.items():
            self.own[slot] = max(self.own[slot], max(boundaries)[0])

    def _find_lower(self, sources: Sources) -> None:
        """By the catalog's nodes, whose tail may lie inside the chain's next chunk."""
        seen = 0
        for run in reversed(sources.runs):
            fresh = 0
            for holders in (*run.memory, *run.disks):
                fresh |= holders
            fresh &= ~seen
            if fresh:
                _assign(self.own, fresh, sources.ends[run.last])
                seen |= fresh

    def _find_resident(self, chain: chains.Chain, keys: Sequence[int], index: ResidencyIndex) -> list[tuple[str, int]]:
        """Returns the chunks where somebody's run ends."""
        runs: list[tuple[str, int]] = []
        gpu, ram, coming, assumed = index.gpu.get, index.ram, index.coming, index.assumed
        seen, last, remembered = 0, 0, False
        for node, key in zip(reversed(chain.chunks), reversed(keys), strict=True):
            holders = gpu(key, 0)
            if holders is not last and holders:
                last = holders
                fresh = holders & ~seen
                if fresh:
                    _assign(self.device, fresh, node.end)
                    self.names[node.end] = node.hash
                    seen |= fresh
                    runs.append((node.hash, node.end))
            if not remembered and key in ram:
                remembered = True
                if not runs or runs[-1][1] != node.end:
                    runs.append((node.hash, node.end))
            if key in coming or key in assumed:
                for slot, arrival in index.arrivals(key):
                    self._note(slot, node.end, node.hash, arrival)
        return runs

    def _find_tails(
        self, request: GenerationRequest, chain: chains.Chain, runs: list[tuple[str, int]], index: ResidencyIndex
    ) -> None:
        """A resident prefix may end inside the next chunk."""
        for parent, start in dict.fromkeys([(chain.head, chain.full_end), *runs, (chain.base, 0)]):
            last = min(request.processed, start + chains.CHUNK_TOKENS - 1)
            for end in range(start + chains.TAIL_TOKENS, last + 1, chains.TAIL_TOKENS):
                if end not in index.tail_ends:
                    continue
                name = chains.node_hash(parent, request.tokens[start:end])
                key = key_of(name)
                for slot in bits(index.gpu.get(key, 0)):
                    if self.device[slot] < end:
                        self.device[slot] = end
                        self.names[end] = name
                for slot, arrival in index.arrivals(key):
                    self._note(slot, end, name, arrival)

    def _note(self, slot: int, end: int, name: str, arrival: float) -> None:
        if slot >= self.size:
            return
        known = self.coming.setdefault(slot, [])
        known.append((end, name, arrival))
        if len(known) > _COMING:
            known.remove(min(known))


def feasible(serving: Flags, table: Table, fingerprint: str, wanted: int) -> Verdict[Flags]:
    """Who of those that serve the model may run a sequence of `wanted` tokens, pages that are free now apart."""
    open_to, served = table.open_to(fingerprint)
    if wanted <= open_to:
        return Verdict(serving, {}, served)
    values = table.rows
    draining = values[rows.DRAINING] > 0
    context = values[rows.CONTEXT] < wanted
    large = values[rows.LARGEST] < wanted
    unable = draining | context | large
    left = serving & ~unable
    out: dict[str, int] = {}
    if np.count_nonzero(left) < served:
        context = serving & context & ~draining
        large = serving & large & ~draining & ~context
        out = {
            reason: count
            for reason, flags in (("draining", serving & draining), ("context", context), ("too-large", large))
            if (count := int(np.count_nonzero(flags)))
        }
    return Verdict(left, out, served)


def considered(
    able: Flags,
    own: Ints,
    table: Table,
    sources: Sources,
    fixed: Sequence[float],
    request: GenerationRequest,
    wanted: int,
    now_ms: float,
    knobs: PolicyKnobs,
    drawn_by: str,
) -> Verdict[list[tuple[float, int]]]:
    """The slots worth scoring exactly, with their bounds, ascending: the best of those that hold something, and of the
    others. `fixed`: by tier, of first tokens; `drawn_by`: the name by which near ties are drawn.
    """
    if int(np.count_nonzero(able)) <= _UNBOUNDED:
        return Verdict([(0.0, slot) for slot in able.nonzero()[0].tolist()], {})
    near = able & (own > 0)
    far = able ^ near
    out: dict[str, int] = {}
    full = far & (table.rows[rows.ROOM] < wanted)
    count = int(np.count_nonzero(full))
    if count:
        out["capacity"] = count
        far ^= full
    bound = _bounds(own, table, sources.shared(), len(request.tokens), now_ms) + min(fixed)
    chosen: list[tuple[float, int]] = []
    for group, most in ((near, knobs.considered), (far, knobs.considered_others)):
        over = int(np.count_nonzero(group)) - most
        if over > 0:
            out["bound"] = out.get("bound", 0) + over
            slots = _least(np.where(group, bound, np.inf), table.hashes, drawn_by, most, knobs)
        else:
            slots = group.nonzero()[0]
        chosen += zip(bound[slots].tolist(), slots.tolist(), strict=True)
    return Verdict(sorted(chosen), out)


def _bounds(own: Ints, table: Table, shared: Shared | None, length: int, now_ms: float) -> Floats:
    values, per_token = table.rows, table.per_token(length)
    wait = np.maximum(values[rows.IDLE_AT] - now_ms, values[rows.REST]) * values[rows.BY_QUEUE]
    base = wait + values[rows.FIRST]
    bound: Floats = base + (length - own) * per_token
    if shared is None:
        return bound
    each = shared.token_bytes
    gap = np.maximum(np.where(own > 0, shared.reach, shared.boundary) - own, 0)
    latency, per_byte, *more = [values[row + tier] for tier in shared.tiers for row in (rows.LATENCY, rows.PER_BYTE)]
    may = values[rows.BREAK_EVEN + shared.tiers[0]] <= shared.reach
    if more:
        latency, per_byte = np.minimum(latency, more[0]), np.minimum(per_byte, more[1])
        may |= values[rows.BREAK_EVEN + shared.tiers[1]] <= shared.reach
    may &= gap > 0
    # All that is shared; or as much of it as comes while the request waits anyhow. (Rows of nobody hold zeros.)
    late, load = latency - wait, per_byte * each + 1e-12
    stage = values[rows.PER_BYTE + _GPU] * each - per_token  # what a token costs that is restored while that is hidden
    hidden = np.minimum(np.maximum(-late / load, 0.0), gap)
    whole = np.maximum(late + gap * load, 0.0) + gap * stage
    part = np.maximum(late + hidden * load, 0.0) + hidden * stage
    return np.where(may, bound + np.minimum(0.0, values[rows.LATENCY + _GPU] + np.minimum(whole, part)), bound)


def _least(bounds: Floats, names: Hashes, drawn_by: str, most: int, knobs: PolicyKnobs) -> Ints:
    """The slots of the `most` least, of which there are more; where more are within the band of the least, those the
    near-tie draw prefers. Who is not asked for is infinitely far.
    """
    near = (bounds <= policy.band_ms(float(np.minimum.reduce(bounds)), knobs)).nonzero()[0]
    taken = near[:0]
    if len(near) <= most:
        last = np.partition(bounds, most - 1)[most - 1]
        taken = (bounds < last).nonzero()[0]
        near = (bounds == last).nonzero()[0]
        most -= len(taken)
    if len(near) > most:
        draws = _mixed(names[near] ^ np.uint64(policy.name_hash(drawn_by)))
        near = near[np.argsort(draws, kind="stable")[:most]]
    return np.concatenate([taken, near])


def _mixed(values: Hashes) -> Hashes:
    """`policy.mixed` of each."""
    values = values + np.uint64(policy.MIX_ADD)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(policy.MIX_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(policy.MIX_SECOND)
    return values ^ (values >> np.uint64(31))


def _assign(column: Ints, holders: int, value: int) -> None:
    """Sets the value at the slots of a set of holders."""
    if holders.bit_count() <= _FEW:
        for slot in bits(holders):
            column[slot] = value
        return
    raw = np.frombuffer(holders.to_bytes(-(-len(column) // 8), "little"), np.uint8)
    column[np.unpackbits(raw, count=len(column), bitorder="little").view(np.bool_)] = value
