"""Every way to run a request at the workers that are scored exactly: what it takes, and the best of each tier. Pure.

Worker by worker, the most promising by their bound first: recompute, the prefix in device pages, a prefix that is being
computed, and what `restores` finds. It ends when no other worker's bound reaches those that will be ranked, and only
what will be ranked becomes an object.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.controller import policy
from libs.controller import table as rows
from libs.controller.bounds import Prefixes
from libs.controller.fixed import first_ms
from libs.controller.knobs import PolicyKnobs
from libs.controller.protocol import Tier
from libs.controller.restores import Best, Read, Reader, Restores
from libs.controller.sources import Sources
from libs.controller.table import SOURCES, Table

_GPU = len(SOURCES)  # the place of staging in a table's tiers


@dataclass(slots=True)
class Terms:
    """What all ways of one worker share, in ms as corrected. `prefill_ms`: a token, stretched; `wait_ms`: the queue
    before its correction; `first_ms`: a first token without what is fixed of it.
    """

    slot: int
    wait_ms: float
    queue_ms: float
    prefill_ms: float
    first_ms: float


@dataclass(slots=True)
class Way:
    """One candidate before it is built. `resident`: the part of the boundary in device pages. Times as corrected.
    `first_ms`: with what is fixed.

    `link`: the last node that is restored, `begin` the first; -1 = none, then `name` is the boundary's.
    """

    ttft_ms: float
    terms: Terms
    tier: Tier
    boundary: int
    resident: int
    name: str = ""
    load_ms: float = 0.0
    restore_ms: float = 0.0
    size: int = 0
    link: int = -1
    begin: int = 0
    first_ms: float = 0.0


class Ways:
    """See the module. `fixed`: ms of a first token that no worker measures, by tier. `pruned`: ways that fell out, by
    reason; `found`: what is left; `able`: workers with any way.

    `most`: only those are wanted that may come among the first so many, with all that tie and all of the near-tie band;
    None = all.
    """

    def __init__(
        self,
        table: Table,
        prefixes: Prefixes,
        sources: Sources,
        fixed: Sequence[float],
        length: int,
        wanted: int,
        limit: int,
        now_ms: float,
        knobs: PolicyKnobs,
        most: int | None,
    ) -> None:
        self.table, self.prefixes, self.sources, self.fixed, self.knobs = table, prefixes, sources, fixed, knobs
        self.length, self.wanted, self.now_ms, self.most = length, wanted, now_ms, most
        self._per_token = table.per_token(length)
        self._restores = Restores(sources, length, limit) if sources.any else None
        self.pruned: Counter[str] = Counter()
        self.found: list[Way] = []
        self.able = self.looked_at = 0
        self._times: list[float] = []  # of `found`, ascending

    def look_at(self, slots: Iterable[tuple[float, int]]) -> None:
        """Workers with their bounds, ascending; behind what may be ranked none is looked at."""
        for bound, slot in slots:
            if bound > self.limit_ms:
                break
            before = len(self.found)
            self._worker(slot)
            self.looked_at += 1
            self.able += len(self.found) > before

    @property
    def limit_ms(self) -> float:
        """What takes longer is not ranked."""
        if self.most is None or len(self._times) < self.most:
            return math.inf
        return max(self._times[self.most - 1], policy.band_ms(self._times[0], self.knobs))

    def best(self) -> list[Way]:
        """Those that may be ranked."""
        limit = self.limit_ms
        return [way for way in self.found if way.ttft_ms <= limit]

    def _worker(self, slot: int) -> None:
        values = self.table.columns[slot]
        wait = max(values[rows.REST], values[rows.IDLE_AT] - self.now_ms)
        queue, per_token, first = wait * values[rows.BY_QUEUE], float(self._per_token[slot]), values[rows.FIRST]
        terms, device = Terms(slot, wait, queue, per_token, first), int(self.prefixes.device[slot])
        fits = self._fits(values, 0)
        if fits:
            self._take(Way(queue + self.length * per_token + first, terms, Tier.NONE, 0, 0))
        else:
            self.pruned["capacity"] += 1
        fits_device = device > 0 and self._fits(values, device)
        if fits_device:
            ttft_ms = queue + (self.length - device) * per_token + first
            self._take(Way(ttft_ms, terms, Tier.GPU, device, device, self.prefixes.names[device]))
        elif device:
            self.pruned["capacity"] += 1
        coming = self.prefixes.coming.get(slot)
        if coming:
            self._computing(terms, values, [one for one in coming if one[0] > device])
        if self._restores is not None:
            places = self._restores.places(slot, self.table.orders[slot])
            reader = Reader(values, places, queue, per_token, first)
            self._restored(terms, reader, device, fits, fits_device)

    def _take(self, way: Way) -> None:
        own_ms = way.terms.first_ms
        way.first_ms = first_ms(own_ms, self.fixed[way.tier])
        way.ttft_ms += way.first_ms - own_ms
        self.found.append(way)
        if self.most is not None:
            insort(self._times, way.ttft_ms)

    def _fits(self, values: list[float], resident: int) -> bool:
        """Whether free and evictable pages cover the demand; the resident prefix itself is protected, not evictable."""
        if values[rows.TOTAL] == 0:
            return True
        page = values[rows.PAGE]
        whole = -(-self.wanted // page)
        held = min(resident // page, whole)
        return whole - held <= values[rows.FREE] + max(0.0, values[rows.EVICTABLE] - held)

    def _computing(self, terms: Terms, values: list[float], coming: list[tuple[int, str, float]]) -> None:
        best: Way | None = None
        for end, name, arrival in coming:
            if not self._fits(values, end):
                self.pruned["capacity"] += 1
                continue
            load_ms = max(0.0, arrival - self.now_ms) * values[rows.BY_RESTORE]
            prefill_ms = (self.length - end) * terms.prefill_ms
            ttft_ms = policy.predicted_ms(terms.queue_ms, load_ms, 0.0, prefill_ms, terms.first_ms)
            if best is not None:
                self.pruned["dominated"] += 1
            if best is None or (ttft_ms, end) < (best.ttft_ms, best.boundary):
                best = Way(ttft_ms, terms, Tier.INFLIGHT, end, end, name, load_ms)
        if best is not None:
            self._take(best)

    def _restored(self, terms: Terms, reader: Reader, device: int, fits: bool, fits_device: bool) -> None:
        """Restores on top of the device's prefix, and from lower tiers alone: of each tier the better one."""
        assert self._restores is not None
        reads: list[Read | None] = [None] * len(SOURCES)
        if device:
            on_top = self._restores.best(reader, device)
            self._count(on_top, fits_device)
            if fits_device:
                reads = on_top.reads
        if not device or any([place >= 0 and reads[place] is None for places in reader.places for place in places]):
            # What is read from a tier onto the prefix is read from it sooner than alone.
            alone = self._restores.best(reader, 0)
            self._count(alone, fits)
            if fits:
                reads = [one or other for one, other in zip(reads, alone.reads, strict=True)]
        for place, read in enumerate(reads):
            if read is not None:
                self.pruned["dominated"] -= 1
                self._take(self._way(terms, reader, SOURCES[place], read))

    def _count(self, best: Best, fits: bool) -> None:
        self.pruned["break-even"] += best.usable - best.paying
        self.pruned["dominated" if fits else "capacity"] += best.paying

    def _way(self, terms: Terms, reader: Reader, tier: Tier, read: Read) -> Way:
        restore_ms = reader.stage_ms(read.size)
        way = Way(read.ttft_ms, terms, tier, read.boundary, read.resident, "", read.load_ms, restore_ms)
        way.size, way.link, way.begin = read.size, read.link, read.begin
        return way
