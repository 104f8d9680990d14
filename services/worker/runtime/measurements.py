"""What the device loop measures about itself: plain values, copied out on request.

Milliseconds are wall time of whole iterations on the loop's thread, device work included. Prefill time is kept apart
for iterations that also carried decoding lanes, since those stretch it.

An iteration costs something however few its rows are: a decode step's time, about. A prompt's last iteration draws its
first token, and whoever predicts a time to first token adds a decode step for that; so that step is taken off the
iteration before its prompt rows are charged, or ten tokens would seem to cost as much each as a hundred do together.
Of small iterations little is learnt, also where they are a bucket's first: a sample counts by its rows. Nor is much
learnt of one that took far longer than those before it: a thread that was not run for a while says nothing of the work.

Of the warm-up's iterations the quickest counts. The first pays for what libraries compile, and while a cluster starts
its processes keep each other from running; but a worker that seems several times as slow as the others gets no work,
and would seem so for good. So it goes on until the quickest has not been beaten for a while (`steady`). For the same
reason the quickest counts of the first few large iterations of each bucket: of a worker that seems quicker than it is
the truth is soon known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

_ALPHA = 0.1  # share of the older samples that one of weight 1 replaces
_MOST = 2.0  # times the recent mean that a sample counts at most
_SMALLEST_BUCKET = 256
_FEW, _LARGE = 8, 0.5  # first samples of a bucket, of such a weight, of which the least counts
_UNBEATEN = 6  # repetitions of the warm-up
_CLEARLY = 0.95
_LEAST = 0.1  # share of an iteration that its prompt rows are charged at least


@dataclass(frozen=True, slots=True)
class Timing:
    """`recent_ms`: mean of samples that fade, by their weights; `weight`: what is left of those. `total_ms` over all
    `count` samples.
    """

    count: int = 0
    total_ms: float = 0.0
    recent_ms: float = 0.0
    weight: float = 0.0

    def add(self, took_ms: float, weight: float = 1.0) -> Timing:
        """With one more sample, of a weight from 0 to 1."""
        ms = min(took_ms, _MOST * self.recent_ms) if self.count else took_ms
        left = self.weight * (1 - _ALPHA) ** weight
        recent = (left * self.recent_ms + weight * ms) / (left + weight)
        return Timing(self.count + 1, self.total_ms + took_ms, recent, left + weight)

    def least(self, took_ms: float, weight: float = 1.0) -> Timing:
        """With one more sample, of which only the least counts."""
        ms = min(took_ms, self.recent_ms) if self.count else took_ms
        return Timing(self.count + 1, self.total_ms + took_ms, ms, max(self.weight, weight))


@dataclass(frozen=True, slots=True)
class Measurements:
    """Counters since start, and the loop's load when the snapshot was taken.

    primed_rows: lanes whose device state (page tables) was uploaded; a lane that merely decodes adds none.
    decode_step_ms: by number of decoding lanes, iterations without prompt rows. prefill_token_ms and
    prefill_beside_decode_token_ms: ms per prompt token, by bucket: the context length at the end of the chunk, rounded
    up to a power of two. pending_prompts: tokens still to be fed and the length they lead to, in order. elapsed_ms: of
    the iteration under way.
    """

    iterations: int = 0
    primed_rows: int = 0
    decode_rows: int = 0
    prompt_rows: int = 0
    tokens: int = 0
    decode_step_ms: Mapping[int, Timing] = field(default_factory=dict)
    prefill_token_ms: Mapping[int, Timing] = field(default_factory=dict)
    prefill_beside_decode_token_ms: Mapping[int, Timing] = field(default_factory=dict)
    decoding_lanes: int = 0
    prefilling_lanes: int = 0
    waiting_jobs: int = 0
    pending_prompts: tuple[tuple[int, int], ...] = ()
    elapsed_ms: float = 0.0


def length_bucket(length: int) -> int:
    """The smallest power of two >= length, at least 256."""
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def steady(took: Sequence[float]) -> bool:
    """Whether the quickest of these repetitions is as quick as it gets: the last few did not beat it clearly."""
    return len(took) > _UNBEATEN and min(took[-_UNBEATEN:]) > _CLEARLY * min(took[:-_UNBEATEN])


@dataclass(slots=True)
class Meter:
    """The loop's own running copy; touched by one thread at a time."""

    iterations: int = 0
    primed_rows: int = 0
    decode_rows: int = 0
    prompt_rows: int = 0
    tokens: int = 0
    decode_step_ms: dict[int, Timing] = field(default_factory=dict)
    prefill_token_ms: dict[int, Timing] = field(default_factory=dict)
    prefill_beside_decode_token_ms: dict[int, Timing] = field(default_factory=dict)
    warming: bool = False

    def iteration(self, ms: float, decode_rows: int, prompt_rows: int, longest_prompt: int, *, drew: bool) -> None:
        """Books one iteration. `longest_prompt`: the largest context length any prompt chunk reached; 0 without one.
        `drew`: whether a prompt's first token came of it.
        """
        self.iterations += 1
        self.decode_rows += decode_rows
        self.prompt_rows += prompt_rows
        if prompt_rows == 0:
            self._add(self.decode_step_ms, decode_rows, ms)
            return
        if drew:
            ms = max(ms - step_ms(self.decode_step_ms, decode_rows + 1), _LEAST * ms)
        table = self.prefill_beside_decode_token_ms if decode_rows else self.prefill_token_ms
        key, weight = length_bucket(longest_prompt), min(1.0, prompt_rows / _SMALLEST_BUCKET)
        self._add(table, key, ms / prompt_rows, weight)

    def _add(self, table: dict[int, Timing], key: int, ms: float, weight: float = 1.0) -> None:
        known = table.get(key, Timing())
        first = known.count < _FEW and weight >= _LARGE
        table[key] = known.least(ms, weight) if self.warming or first else known.add(ms, weight)


def step_ms(timings: Mapping[int, Timing], lanes: int) -> float:
    """Of a decode step over this many lanes: the next larger number that was measured, else the largest; 0 of none."""
    if not timings or lanes <= 0:
        return 0.0
    measured = min((one for one in timings if one >= lanes), default=max(timings))
    return timings[measured].recent_ms


def prefill_timings(found: Measurements) -> list[tuple[int, Timing]]:
    """Ascending by length; from iterations without decoding lanes where there were some."""
    return sorted({**found.prefill_beside_decode_token_ms, **found.prefill_token_ms}.items())


def rows_ms(timings: Sequence[tuple[int, Timing]], start: int, end: int) -> float:
    """Of a prompt's rows [start, end): each at the price of its own context, those behind the last bucket at its."""
    total, at = 0.0, start
    for place, (longest, timing) in enumerate(timings):
        to = end if place == len(timings) - 1 else min(end, longest)
        total += max(0, to - at) * timing.recent_ms
        at = max(at, to)
    return total


def whole_prompts(timings: Sequence[tuple[int, Timing]]) -> list[tuple[int, float]]:
    """Ms a token of whole prompts up to these lengths, half a bucket each: what is told of prices. A long one's first
    rows are cheaper than its last, and by the price of the last all of it would seem to take up to twice as long.
    """
    edges = sorted({edge for longest, _ in timings for edge in (longest * 3 // 4, longest)})
    return [(edge, rows_ms(timings, 0, edge) / edge) for edge in edges]


def prompts_ms(timings: Sequence[tuple[int, Timing]], prompts: Sequence[tuple[int, int]]) -> float:
    """Of all rows of these prompts: (tokens still to be fed, length they lead to)."""
    return sum(rows_ms(timings, length - tokens, length) for tokens, length in prompts)


def turnover(running: Sequence[int], waiting: Sequence[int], lanes: int, coming: int = 0) -> int:
    """Decode steps until there is a lane for one more job, behind those that wait. Of both: steps each may take;
    `coming`: so many more wait, of which that is not known: as much as the others.
    """
    known = [*running, *waiting]
    queued = [*waiting, *[sum(known) // max(1, len(known))] * coming]
    if len(running) + len(queued) < lanes:
        return 0
    ends = [0] * (lanes - len(running)) + sorted(running)
    heapify(ends)
    for steps in queued:
        heapreplace(ends, ends[0] + steps)
    return ends[0]


def ahead_ms(found: Measurements, coming: Sequence[int], budget: int) -> float:
    """What comes before the first row of one more prompt: all rows of the others, also of prompts that are still
    `coming`, and the decode steps of the iterations that end before the one it has rows in, less what has passed of the
    one under way. `budget`: rows of an iteration.
    """
    prompts = (*found.pending_prompts, *((tokens, tokens) for tokens in coming))
    rows, ms = sum(tokens for tokens, _ in prompts), prompts_ms(prefill_timings(found), prompts)
    steps, decoding, reading = found.decode_step_ms, found.decoding_lanes, found.prefilling_lanes
    if found.elapsed_ms:
        running = sum(tokens for tokens, _ in prompts[:reading])
        # Prompts that end in it draw in it.
        ms += step_ms(steps, decoding + (reading if running <= budget else 0))
        rows -= min(running, budget)
    ms += rows // budget * step_ms(steps, decoding + reading)
    return max(0.0, ms - found.elapsed_ms)
