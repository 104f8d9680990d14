"""The fleet as columns: what a plan needs of every worker, one row a number, so that a thousand workers are scored at
once. Pure; the numbers are `WorkerView`'s and the corrections', and no truth of their own.

Columns are the slots of the residency index. A column is rewritten when its worker was heard, booked or corrected since
the last plan; a free slot serves no model and so is never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from libs.controller.corrections import Correction
from libs.controller.knobs import PolicyKnobs
from libs.controller.policy import decode_cost, name_hash, prefill_cost
from libs.controller.protocol import DecodeCost, Heartbeat, Load, PrefillCost, Tier, TierCost

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Places8 = npt.NDArray[np.int8]

# Rows. Costs as they are believed: with their corrections. Times in ms; pages of the largest layer group.
IDLE_AT, FIRST = range(2)  # on the router's clock; the first decode step and the way, less what is fixed (`fixed`)
BY_QUEUE, BY_RESTORE = range(
    2, 4
)  # corrections: of the wait from now until IDLE_AT, and, already in them, of the tiers
FREE, EVICTABLE, TOTAL, PAGE, DRAINING = range(4, 9)
CONTEXT, LARGEST, ROOM = range(9, 12)  # tokens of a sequence: at most, if all pages were free, with those that are
LATENCY, PER_BYTE, BREAK_EVEN, ORDER = 12, 17, 22, 27  # each begins a row per tier, in TIERS' order
REST = 32  # what is left, on average, of the step that runs when a request arrives: the least wait
_ROWS = 33

TIERS = (Tier.RAM, Tier.SSD, Tier.PEER, Tier.OBJECT, Tier.GPU)  # the last stands for staging to device
SOURCES: tuple[Tier, ...] = TIERS[:4]
NO_WAY = 9.0  # the ORDER of a tier that the worker has no way to
_NEVER = 1e30  # its latency, ms
_ANY = math.inf  # a limit that was not said

_PEER = SOURCES.index(Tier.PEER)
_PLACE = {tier: at for at, tier in enumerate(TIERS)}
_EDGES = 64  # context lengths at which prefill costs may change, of all workers; beyond them costs are approximate
_FIRST_SLOTS = 16
_CHUNK_TOKENS = 256
_BEYOND = 1 << 62  # every edge


class View(Protocol):
    """What is read of a worker."""

    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def load(self) -> Load: ...
    @property
    def costs(self) -> Mapping[Tier, TierCost]: ...
    @property
    def prefill(self) -> tuple[PrefillCost, ...]: ...
    @property
    def decode(self) -> tuple[DecodeCost, ...]: ...
    @property
    def way_ms(self) -> float: ...
    @property
    def lanes(self) -> int: ...
    @property
    def idle_at_ms(self) -> float: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def draining(self) -> bool: ...


class Table:
    """See the module. `rows`: [row, slot]; `hashes`: of the workers' names; both as long as `size`.

    `columns`: the same numbers by slot; `orders`: by slot, the tiers that the worker has a way to, cheapest first, as
    places in SOURCES.
    """

    def __init__(self, knobs: PolicyKnobs) -> None:
        self.knobs = knobs
        self.size = 0
        self.columns: list[list[float]] = []
        self.orders: list[tuple[int, ...]] = []
        self._open: dict[str, tuple[float, int]] = {}  # by model, as long as it holds
        self._rows: Floats = np.zeros((_ROWS, _FIRST_SLOTS))
        self._hashes: Hashes = np.zeros(_FIRST_SLOTS, np.uint64)
        self._serving: dict[str, Flags] = {}
        self._models: list[tuple[str, ...]] = []  # by slot
        self._prefill: dict[int, Floats] = {}  # up to this context: ms a token
        self._edges: list[int] = []  # its keys, ascending
        self._terms: list[tuple[tuple[PrefillCost, ...], float, float]] = []  # by slot: costs, decode step, correction

    @property
    def rows(self) -> Floats:
        """[row, slot]."""
        return self._rows[:, : self.size]

    @property
    def hashes(self) -> Hashes:
        """Of the workers' names."""
        return self._hashes[: self.size]

    def serving(self, fingerprint: str) -> Flags | None:
        """Which slots serve the model; None where nobody does."""
        found = self._serving.get(fingerprint)
        return None if found is None else found[: self.size]

    def open_to(self, fingerprint: str) -> tuple[float, int]:
        """The longest sequence in tokens that all of the model's workers take, -inf where one drains; and how many they
        are. Without those pages that are in use.
        """
        found = self._open.get(fingerprint)
        if found is None:
            slots = np.nonzero(self._serving[fingerprint])[0]
            limits = self._rows[(CONTEXT, LARGEST), :][:, slots]
            drains = bool(self._rows[DRAINING, slots].any())
            found = self._open[fingerprint] = (-math.inf if drains else float(limits.min()), len(slots))
        return found

    def per_token(self, context: int) -> Floats:
        """Ms a prompt token at this context, stretched while lanes decode, by slot."""
        for edge in self._edges:
            if context <= edge:
                return self._prefill[edge][: self.size]
        return self._last()[: self.size]

    def moved(self, slot: int, view: View) -> None:
        """The worker's queue or its free pages are others; all else is as it was written."""
        column, free = self.columns[slot], view.free_pages
        column[IDLE_AT], column[FREE] = view.idle_at_ms, free
        if column[TOTAL]:
            column[ROOM] = (free + column[EVICTABLE]) * column[PAGE]
        self._rows[IDLE_AT, slot], self._rows[FREE, slot], self._rows[ROOM, slot] = column[IDLE_AT], free, column[ROOM]

    def write(self, slot: int, view: View, correction: Correction) -> None:
        """What is known of a worker now."""
        heartbeat, pages, knobs = view.heartbeat, view.load.pages, self.knobs
        while slot >= self._rows.shape[1]:
            self._grow()
        while slot >= len(self._models):
            self._models.append(())
            self._terms.append(((), 0.0, 1.0))
            self.columns.append([])
            self.orders.append(())
        self.size = max(self.size, slot + 1)
        lanes = view.lanes
        step_ms = decode_cost(view.decode, lanes, knobs) if lanes else 0.0
        page, free = max(1, heartbeat.page_tokens), view.free_pages
        costs, order = costs_of(view.costs, heartbeat.bytes_per_token, correction.restore, knobs)
        values = [
            view.idle_at_ms,
            decode_cost(view.decode, lanes + 1, knobs) * correction.first + view.way_ms,
            correction.queue,
            correction.restore,
            free,
            pages.evictable,
            pages.total,
            page,
            view.draining,
            heartbeat.max_context or _ANY,
            pages.total * page or _ANY,
            (free + pages.evictable) * page if pages.total else _ANY,
            *costs,
            step_ms / 2,
        ]
        before = self.columns[slot]
        if not before or before[DRAINING:ROOM] != values[DRAINING:ROOM]:
            self._open.clear()
        self._rows[:, slot] = values
        self.columns[slot] = values
        self.orders[slot] = order
        if self._models[slot] != heartbeat.models:
            self._serve(slot, heartbeat.models)
            self._hashes[slot] = name_hash(heartbeat.worker)
        self._price(slot, view.prefill, step_ms, correction.prefill)

    def clear(self, slot: int) -> None:
        """The slot is free."""
        if slot < len(self._models):
            self._serve(slot, ())

    def _serve(self, slot: int, models: tuple[str, ...]) -> None:
        self._open.clear()
        for fingerprint in self._models[slot]:
            flags = self._serving[fingerprint]
            flags[slot] = False
            if not flags.any():
                del self._serving[fingerprint]
        for fingerprint in models:
            self._serving.setdefault(fingerprint, np.zeros(self._rows.shape[1], np.bool_))[slot] = True
        self._models[slot] = models

    def _price(self, slot: int, table: tuple[PrefillCost, ...], step_ms: float, ratio: float) -> None:
        terms = self._terms[slot] = (table, step_ms, ratio)
        for bucket in table:
            if bucket.up_to_tokens not in self._prefill and len(self._edges) < _EDGES:
                self._edge(bucket.up_to_tokens)
        for edge in self._edges:
            self._prefill[edge][slot] = self._per_token(terms, edge)
        self._last()[slot] = self._per_token(terms, _BEYOND)

    def _edge(self, edge: int) -> None:
        self._edges = sorted([*self._edges, edge])
        column = np.zeros(self._rows.shape[1])
        column[: len(self._terms)] = [self._per_token(terms, edge) for terms in self._terms]
        self._prefill[edge] = column

    def _per_token(self, terms: tuple[tuple[PrefillCost, ...], float, float], context: int) -> float:
        table, step_ms, ratio = terms
        # Lanes decode in each of its iterations; in the last one that is the first token's time.
        budget = max(1, self.knobs.prefill_budget_tokens)
        stretch_ms = step_ms * ((context - 1) // budget) / context
        return (prefill_cost(table, context, self.knobs) + stretch_ms) * ratio

    def _last(self) -> Floats:
        """Beyond every edge."""
        return self._prefill.setdefault(0, np.zeros(self._rows.shape[1]))

    def _grow(self) -> None:
        more = self._rows.shape[1]
        self._rows = np.concatenate([self._rows, np.zeros((_ROWS, more))], axis=1)
        self._hashes = np.concatenate([self._hashes, np.zeros(more, np.uint64)])
        self._serving = {
            name: np.concatenate([flags, np.zeros(more, np.bool_)]) for name, flags in self._serving.items()
        }
        self._prefill = {edge: np.concatenate([column, np.zeros(more)]) for edge, column in self._prefill.items()}


def costs_of(
    costs: Mapping[Tier, TierCost], bytes_per_token: int, ratio: float, knobs: PolicyKnobs
) -> tuple[Sequence[float], tuple[int, ...]]:
    """Latency, ms a byte, break-even and order of each tier; and the tiers with a way, as `Table.orders` has them.
    Order: cheapest first by the worker's own measurements of one chunk's bytes; peers only where it reports what they
    cost: without that it has no way to them.
    """
    latency = [knobs.default_latency_ms * ratio] * len(TIERS)
    per_byte = [ratio / knobs.default_bytes_per_ms] * len(TIERS)
    break_even = [0.0] * len(TIERS)
    for tier, cost in costs.items():
        at = _PLACE.get(tier)
        if at is not None:
            break_even[at] = cost.break_even_tokens
            if cost.bytes_per_ms > 0:
                latency[at], per_byte[at] = cost.latency_ms * ratio, ratio / cost.bytes_per_ms
    size = max(1, bytes_per_token) * _CHUNK_TOKENS
    # SOURCES are in their tiers' order: of equals the nearer is first.
    ways = [at for _, at in sorted([(latency[at] + size * per_byte[at], at) for at in range(len(SOURCES))])]
    places = [NO_WAY] * len(TIERS)
    for place, at in enumerate(ways):
        places[at] = float(place)
    if Tier.PEER not in costs:
        places[_PEER], latency[_PEER] = NO_WAY, _NEVER
        ways.remove(_PEER)
    return [*latency, *per_byte, *break_even, *places], tuple(ways)
