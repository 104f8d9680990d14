"""The best restores of one worker: which boundary of the chain, from which farthest tier, and how fast. Pure.

A restore onto a resident prefix R (0 = none) up to a boundary P takes load from the tiers, staging to the device, and
leaves the rest of the prompt to be computed. A chain falls into runs (`sources.Run`), and between the edges of runs,
of windows and of break-evens all of that is linear in P, but for the maximum of queue and load. So the least is at an
edge, or at one of the two boundaries around the token whose load ends when the queue does: no other need be looked at.
Where all layers see everything, the slopes say which edge.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from libs.controller import table
from libs.controller.policy import predicted_ms
from libs.controller.sources import Sources, first_needed

_TIERS = len(table.SOURCES)
_GPU = _TIERS  # the place of staging in a table's tiers
Places = tuple[int, ...]
"""By group, where a run's objects are read from (place in SOURCES); -1 = nowhere."""


class Read(NamedTuple):
    """nodes[begin : link + 1] are read, the farthest from `tier` (place in SOURCES). Times in ms, corrected."""

    ttft_ms: float
    boundary: int
    size: int
    load_ms: float
    tier: int
    link: int
    begin: int
    resident: int  # onto so many tokens


class Reader(NamedTuple):
    """A worker as a reader: its costs (`Table.columns`), the wait ahead in ms, and ms a prompt token."""

    values: Sequence[float]
    places: Sequence[Places]  # by run
    queue_ms: float
    per_token_ms: float
    first_ms: float

    def stage_ms(self, size: float) -> float:
        """Of so many bytes to the device."""
        return size * self.values[table.PER_BYTE + _GPU] + self.values[table.LATENCY + _GPU]


class Best:
    """The best by farthest tier; and how many boundaries were usable, and of them long enough to pay."""

    __slots__ = ("paying", "reads", "usable")

    def __init__(self) -> None:
        self.reads: list[Read | None] = [None] * _TIERS
        self.usable = self.paying = 0

    def take(self, read: Read) -> None:
        """Keeps it if it is quicker; of equals the one that leans on less."""
        other = self.reads[read.tier]
        if other is None or read < other:
            self.reads[read.tier] = read


class Restores:
    """One plan's. `length`: of the prompt; no boundary lies beyond `limit`."""

    def __init__(self, sources: Sources, length: int, limit: int) -> None:
        self.sources, self.length = sources, length
        self.runs, self.ends = sources.runs, sources.ends
        self._until = bisect_right(self.ends, limit)
        self._windows = any([group.window for group in sources.groups])

    def places(self, slot: int, order: Sequence[int]) -> list[Places]:
        """Of each run the cheapest places that have it, in the worker's own order."""
        return [run.places(slot, order) for run in self.runs]

    def best(self, reader: Reader, resident: int) -> Best:
        """Of one worker, onto the prefix of so many tokens."""
        return self._windowed(reader, resident) if self._windows else self._straight(reader, resident)

    def _straight(self, reader: Reader, resident: int) -> Best:
        ends, values = self.ends, reader.values
        begin, found = bisect_right(ends, resident), Best()
        stage, fixed = values[table.PER_BYTE + _GPU], values[table.LATENCY + _GPU] + reader.first_ms
        loaded, latency, read = 0.0, 0.0, 0
        farthest, used = -1, 0
        for run, places in zip(self.runs, reader.places, strict=True):
            last = min(run.last, self._until - 1)
            if last < begin:
                continue
            first = max(run.first, begin)
            if last < first or -1 in places:
                break
            rate = 0.0  # ms a node
            for place, size in zip(places, run.sizes, strict=True):
                rate += size * values[table.PER_BYTE + place]
                if not used >> place & 1:
                    used |= 1 << place
                    latency += values[table.LATENCY + place]
                    farthest = max(farthest, place)
            least = resident + values[table.BREAK_EVEN + farthest]
            paying = first if ends[first] >= least else bisect_left(ends, least, first)
            found.usable += last - first + 1
            size = sum(run.sizes)
            if paying <= last:
                found.paying += last - paying + 1
                before = loaded + latency
                slope = stage * size - reader.per_token_ms * run.span  # while the queue hides the load
                if slope >= 0:
                    looked: tuple[int, ...] = (paying,)
                elif slope + rate < 0:
                    looked = (last,)
                else:
                    node = first - 1 + int((reader.queue_ms - before) / rate)
                    looked = (min(max(node, paying), last), min(max(node + 1, paying), last))
                for node in looked:
                    load_ms, whole = before + rate * (node + 1 - first), read + size * (node + 1 - first)
                    ttft_ms = max(reader.queue_ms, load_ms) + whole * stage + fixed
                    ttft_ms += (self.length - ends[node]) * reader.per_token_ms
                    found.take(Read(ttft_ms, ends[node], whole, load_ms, farthest, node, begin, resident))
            loaded += rate * (last + 1 - first)
            read += size * (last + 1 - first)
        return found

    def _windowed(self, reader: Reader, resident: int) -> Best:
        found, values = Best(), reader.values
        begin = bisect_right(self.ends, resident)
        edges = self._edges(values, resident, begin)
        reads = [self._read(reader, resident, begin, node) for node in edges]
        for here in reads:
            if here is not None:
                self._count(found, here, values, resident, 1)
        for at in range(len(edges) - 1):
            between, one, other = edges[at + 1] - edges[at] - 1, reads[at], reads[at + 1]
            if not between or one is None or other is None:
                continue
            self._count(found, one, values, resident, between)
            wait_ms = reader.queue_ms
            if (one.load_ms < wait_ms) != (other.load_ms < wait_ms):
                share = (wait_ms - one.load_ms) / (other.load_ms - one.load_ms)
                node = bisect_right(self.ends, one.boundary + share * (other.boundary - one.boundary)) - 1
                for near in (node, node + 1):
                    read = self._read(reader, resident, begin, near)
                    if read is not None and self._pays(read, values, resident):
                        found.take(read)
        return found

    def _count(self, found: Best, read: Read, values: Sequence[float], resident: int, count: int) -> None:
        found.usable += count
        if self._pays(read, values, resident):
            found.paying += count
            found.take(read)

    def _pays(self, read: Read, values: Sequence[float], resident: int) -> bool:
        return read.boundary - resident >= values[table.BREAK_EVEN + read.tier]

    def _edges(self, values: Sequence[float], resident: int, begin: int) -> list[int]:
        """The nodes on both sides of whatever may bend the cost: ascending."""
        ends = self.ends
        edges = {begin, self._until - 1}
        positions = [ends[run.last] for run in self.runs]
        windows = {group.window for group in self.sources.groups if group.window}
        bends = {resident + values[table.BREAK_EVEN + tier] for tier in range(_TIERS)}
        bends |= {position + window for window in windows for position in (resident, *positions)}
        for node in [*[run.last + 1 for run in self.runs], *[bisect_left(ends, bend) for bend in bends]]:
            edges |= {node - 1, node}
        return sorted([node for node in edges if begin <= node < self._until])

    def _read(self, reader: Reader, resident: int, begin: int, node: int) -> Read | None:
        """What a restore up to this node takes; None if something is missing."""
        ends, values = self.ends, reader.values
        boundary, farthest = ends[node], -1
        opens, total = node, 0
        size_of = [0] * _TIERS
        for index, group in enumerate(self.sources.groups):
            low = max(begin, bisect_right(ends, first_needed(group, boundary))) if group.window else begin
            opens = min(opens, low)
            for run, places in zip(self.runs, reader.places, strict=True):
                if run.last < low:
                    continue
                if run.first > node:
                    break
                place = places[index]
                if place < 0:
                    return None
                size = run.sizes[index] * (min(run.last, node) + 1 - max(run.first, low))
                size_of[place] += size
                total += size
        load_ms = 0.0
        for tier, size in enumerate(size_of):
            if size:
                load_ms += size * values[table.PER_BYTE + tier] + values[table.LATENCY + tier]
                farthest = tier
        if farthest < 0:
            return None
        prefill_ms = (self.length - boundary) * reader.per_token_ms
        ttft_ms = predicted_ms(reader.queue_ms, load_ms, reader.stage_ms(total), prefill_ms, reader.first_ms)
        return Read(ttft_ms, boundary, total, load_ms, farthest, node, opens, resident)
