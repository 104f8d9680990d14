"""Every way to run a request at the workers that are scored exactly: what it takes, and the best of each tier. Pure.

In columns, one entry a worker: recompute, the prefix in device pages, and what `sources` finds restorable; the few
running prefills one by one. Only what will be ranked becomes an object.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from libs.controller import policy
from libs.controller import table as rows
from libs.controller.bounds import Prefixes
from libs.controller.knobs import PolicyKnobs
from libs.controller.protocol import Tier
from libs.controller.sources import Cases, Restores, Sources
from libs.controller.table import Flags, Floats, Ints, Table, predicted_ms


@dataclass(slots=True)
class Terms:
    """What all ways of one worker share; raw, in ms. `prefill_ms`: a token, stretched."""

    queue_ms: float
    prefill_ms: float
    first_ms: float


@dataclass(slots=True)
class Way:
    """One candidate before it is built. `resident`: the part of the boundary in device pages; raw load and restore.

    `link`: the last node that is restored, `begin` the first; -1 = none, then `name` is the boundary's.
    """

    slot: int
    terms: Terms
    tier: Tier
    boundary: int
    resident: int
    ttft_ms: float
    name: str = ""
    load_ms: float = 0.0
    restore_ms: float = 0.0
    size: int = 0
    link: int = -1
    begin: int = 0


@dataclass(frozen=True, slots=True)
class _Column:
    """The ways of one tier, one entry a worker; a `ttft` of infinity where there is none."""

    tier: Tier
    ttft: Floats
    boundary: Ints
    resident: Ints
    restores: Restores | None = None


class Ways:
    """See the module. `pruned`: ways that fell out, by reason."""

    def __init__(
        self, table: Table, slots: Ints, prefixes: Prefixes, length: int, wanted: int, now_ms: float, knobs: PolicyKnobs
    ) -> None:
        self.now_ms, self.knobs = now_ms, knobs
        self.slots, self.prefixes, self.length = slots, prefixes, length
        self.values = values = table.rows[:, slots]
        self.wait: Floats = np.maximum(values[rows.IDLE_AT] - now_ms, 0.0)
        self.device: Ints = prefixes.device[slots]
        self.prefill: Floats = table.prefill(length)[slots] + values[rows.STRETCH]
        self.per_token = self.prefill * values[rows.BY_PREFILL]
        self.queue = self.wait * values[rows.BY_QUEUE]
        self.first = values[rows.FIRST] * values[rows.BY_FIRST]
        self.wanted = wanted
        self.pruned: Counter[str] = Counter()
        self._none: Floats = np.zeros(len(slots))
        self._nowhere: Ints = np.zeros(len(slots), np.int64)
        self._columns: list[_Column] = []
        self._coming: dict[int, tuple[float, int, str, float]] = {}  # place -> ttft, boundary, name, load
        self._fits = self.fits(self._nowhere)
        self._fits_device = self.fits(self.device)

    def fits(self, resident: Ints) -> Flags:
        """Whether free and evictable pages cover the demand; the resident prefix itself is protected, not evictable."""
        values = self.values
        whole = np.ceil(self.wanted / values[rows.PAGE])
        needed = np.maximum(0.0, whole - resident // values[rows.PAGE])
        spare = np.maximum(0.0, values[rows.EVICTABLE] - (whole - needed))
        found: Flags = (values[rows.TOTAL] == 0) | (needed <= values[rows.FREE] + spare)
        return found

    def resident(self) -> None:
        """Recompute, device pages, and what is being computed there."""
        held = self.device > 0
        for tier, boundary, fits, there in (
            (Tier.NONE, self._nowhere, self._fits, None),
            (Tier.GPU, self.device, self._fits_device, held),
        ):
            ways = fits if there is None else fits & there
            self.pruned["capacity"] += int(np.count_nonzero(~fits if there is None else there & ~fits))
            prefill = (self.length - boundary) * self.per_token
            ttft = predicted_ms(self.queue, self._none, self._none, prefill, self.first)
            self._columns.append(_Column(tier, np.where(ways, ttft, np.inf), boundary, boundary))
        if self.prefixes.coming:
            for place, slot in enumerate(self.slots.tolist()):
                for end, name, arrival in self.prefixes.coming.get(slot, ()):
                    if end > self.device[place]:
                        self._computing(place, end, name, max(0.0, arrival - self.now_ms))

    def _computing(self, place: int, end: int, name: str, load_ms: float) -> None:
        if not self.fits(np.full(len(self.slots), end))[place]:
            self.pruned["capacity"] += 1
            return
        load = load_ms * float(self.values[rows.BY_RESTORE, place])
        prefill = (self.length - end) * float(self.per_token[place])
        ttft_ms = policy.predicted_ms(float(self.queue[place]), load, 0.0, prefill, float(self.first[place]))
        other = self._coming.get(place)
        if other is not None:
            self.pruned["dominated"] += 1
        if other is None or (ttft_ms, end) < other[:2]:
            self._coming[place] = (ttft_ms, end, name, load_ms)

    def restored(self, sources: Sources, limit: int) -> None:
        """Restores on top of the device's prefix, and from lower tiers alone."""
        with_device = np.nonzero(self.device > 0)[0]
        count = len(self.slots)
        places = np.concatenate([np.arange(count), with_device])
        resident = np.concatenate([self._nowhere, self.device[with_device]])
        fits = np.concatenate([self._fits, self._fits_device[with_device]])
        cases = Cases(
            self.slots[places], resident, self.values[:, places], self.queue[places], self.per_token[places], fits
        )
        found = sources.restores(cases, self.length, limit)
        self.pruned["break-even"] += found.short
        self.pruned["capacity"] += found.cramped
        kept = 0
        for best in found.best:
            boundary = sources.ends[best.links]
            chosen = np.arange(count)
            alone = (best.ttft[with_device], boundary[with_device], best.size[with_device])
            on_top = (best.ttft[count:], boundary[count:], best.size[count:])
            chosen[with_device] = np.where(_less(on_top, alone), np.arange(count, len(places)), with_device)
            taken = Restores(
                best.tier,
                best.links[chosen],
                best.begins[chosen],
                best.load[chosen],
                best.restore[chosen],
                best.size[chosen],
                best.ttft[chosen],
            )
            self._columns.append(_Column(best.tier, taken.ttft, boundary[chosen], resident[chosen], taken))
            kept += int(np.count_nonzero(np.isfinite(taken.ttft)))
        self.pruned["dominated"] += found.usable - kept

    @property
    def able(self) -> int:
        """Workers with any way."""
        found = np.zeros(len(self.slots), np.bool_)
        for column in self._columns:
            found |= np.isfinite(column.ttft)
        return int(np.count_nonzero(found)) + sum(1 for place in self._coming if not found[place])

    @property
    def count(self) -> int:
        """Ways there are."""
        return sum(int(np.count_nonzero(np.isfinite(one.ttft))) for one in self._columns) + len(self._coming)

    def best(self, most: int | None) -> list[Way]:
        """All, or the quickest that may come among the first `most`: with all that tie and all of the near-tie band."""
        every = np.concatenate([column.ttft for column in self._columns])
        least = np.isfinite(every)
        if most is not None and np.count_nonzero(least) > most:
            limit = float(np.partition(every, most - 1)[most - 1])
            least = every <= max(limit, policy.band_ms(float(every.min()), self.knobs))
        queue, prefill = self.wait.tolist(), self.prefill.tolist()
        first, slots = self.values[rows.FIRST].tolist(), self.slots.tolist()
        found: list[Way] = []
        for number, column in enumerate(self._columns):
            places = np.nonzero(least[number * len(slots) : (number + 1) * len(slots)])[0]
            listed = [column.ttft, column.boundary, column.resident]
            restores = column.restores
            if restores is not None:
                listed += [restores.load, restores.restore, restores.size, restores.links, restores.begins]
            for place, ttft_ms, boundary, resident, *rest in zip(
                places.tolist(), *[values[places].tolist() for values in listed], strict=True
            ):
                terms = Terms(queue[place], prefill[place], first[place])
                if rest:
                    load_ms, restore_ms, size, link, begin = rest
                    way = Way(
                        slots[place], terms, column.tier, boundary, resident, ttft_ms, "", load_ms,
                        restore_ms, int(size), link, begin,
                    )  # fmt: skip
                else:
                    name = self.prefixes.names.get(boundary, "")
                    way = Way(slots[place], terms, column.tier, boundary, resident, ttft_ms, name)
                found.append(way)
        for place, (ttft_ms, end, name, load_ms) in self._coming.items():
            terms = Terms(queue[place], prefill[place], first[place])
            found.append(Way(slots[place], terms, Tier.INFLIGHT, end, end, ttft_ms, name, load_ms))
        return found


def _less(one: tuple[Floats, Ints, Floats], other: tuple[Floats, Ints, Floats]) -> Flags:
    """Quicker, and of equals the one that leans on less: entry by entry, by the first that differs."""
    found: Flags = one[0] < other[0]
    equal = one[0] == other[0]
    for here, there in zip(one[1:], other[1:], strict=True):
        found |= equal & (here < there)
        equal &= here == there
    return found
