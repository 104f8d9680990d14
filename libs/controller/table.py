"""The fleet as columns: what a plan needs of every worker, one row a number, so that a thousand workers are scored at
once. Pure; the numbers are `WorkerView`'s and the corrections', and no truth of their own.

Columns are the slots of the residency index. A column is rewritten when its worker was heard, booked or corrected since
the last plan; a free slot serves no model and so is never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from libs.controller.knobs import PolicyKnobs
from libs.controller.policy import Correction, decode_cost, name_hash, prefill_cost
from libs.controller.protocol import DecodeCost, Heartbeat, Load, PrefillCost, Tier, TierCost

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

# Rows. Times in ms; pages of the largest layer group; 0 = not said, as in the heartbeat.
IDLE_AT, STRETCH, FIRST = (
    0,
    1,
    2,
)  # IDLE_AT: on the router's clock; STRETCH: ms longer a prompt token while lanes decode
BY_QUEUE, BY_RESTORE, BY_PREFILL, BY_FIRST = 3, 4, 5, 6  # corrections
FREE, EVICTABLE, TOTAL, PAGE, CONTEXT, DRAINING = 7, 8, 9, 10, 11, 12
LATENCY, PER_BYTE, BREAK_EVEN, ORDER = 13, 18, 23, 28  # each begins a row per tier, in TIERS' order
_ROWS = 33

TIERS = (Tier.RAM, Tier.SSD, Tier.PEER, Tier.OBJECT, Tier.GPU)  # the last stands for staging to device
SOURCES = TIERS[:4]
NO_WAY = 9.0  # the ORDER of a tier that the worker has no way to

_EDGES = 64  # context lengths at which prefill costs may change, of all workers; beyond them costs are approximate
_FIRST_SLOTS = 16
_CHUNK_TOKENS = 256


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
    def idle_at_ms(self) -> float: ...
    @property
    def free_pages(self) -> int: ...


class Table:
    """See the module. `rows`: [row, slot]; `hashes`: of the workers' names; both as long as `size`."""

    def __init__(self, knobs: PolicyKnobs) -> None:
        self.knobs = knobs
        self.size = 0
        self._rows: Floats = np.zeros((_ROWS, _FIRST_SLOTS))
        self._hashes: Hashes = np.zeros(_FIRST_SLOTS, np.uint64)
        self._serving: dict[str, Flags] = {}
        self._models: list[tuple[str, ...]] = []  # by slot
        self._prefill: dict[int, Floats] = {}  # up to this context: ms a token
        self._edges: list[int] = []  # its keys, ascending
        self._tables: list[tuple[PrefillCost, ...]] = []  # by slot

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

    def prefill(self, context: int) -> Floats:
        """Measured ms a prompt token at this context, by slot."""
        for edge in self._edges:
            if context <= edge:
                return self._prefill[edge][: self.size]
        return self._last()[: self.size]

    def write(self, slot: int, view: View, correction: Correction) -> None:
        """What is known of a worker now."""
        heartbeat, load, knobs = view.heartbeat, view.load, self.knobs
        while slot >= self._rows.shape[1]:
            self._grow()
        while slot >= len(self._models):
            self._models.append(())
            self._tables.append(())
        self.size = max(self.size, slot + 1)
        decoding, pages = load.decoding, load.pages
        step_ms = decode_cost(view.decode, decoding, knobs) if decoding else 0.0
        values = [
            view.idle_at_ms,
            step_ms / max(1, knobs.prefill_budget_tokens),
            decode_cost(view.decode, decoding + 1, knobs),
            correction.queue,
            correction.restore,
            correction.prefill,
            correction.first,
            view.free_pages,
            pages.evictable,
            pages.total,
            max(1, heartbeat.page_tokens),
            heartbeat.max_context,
            heartbeat.draining,
            *costs_of(view.costs, heartbeat.bytes_per_token, knobs),
        ]
        self._rows[:, slot] = values
        if self._models[slot] != heartbeat.models:
            self._serve(slot, heartbeat.models)
            self._hashes[slot] = name_hash(heartbeat.worker)
        if self._tables[slot] != view.prefill or not view.prefill:
            self._price(slot, view.prefill)

    def clear(self, slot: int) -> None:
        """The slot is free."""
        if slot < len(self._models):
            self._serve(slot, ())

    def _serve(self, slot: int, models: tuple[str, ...]) -> None:
        for fingerprint in self._models[slot]:
            flags = self._serving[fingerprint]
            flags[slot] = False
            if not flags.any():
                del self._serving[fingerprint]
        for fingerprint in models:
            self._serving.setdefault(fingerprint, np.zeros(self._rows.shape[1], np.bool_))[slot] = True
        self._models[slot] = models

    def _price(self, slot: int, table: tuple[PrefillCost, ...]) -> None:
        self._tables[slot] = table
        for bucket in table:
            if bucket.up_to_tokens not in self._prefill and len(self._edges) < _EDGES:
                self._edge(bucket.up_to_tokens)
        for edge in self._edges:
            self._prefill[edge][slot] = prefill_cost(table, edge, self.knobs)
        self._last()[slot] = table[-1].ms_per_token if table else self.knobs.default_prefill_ms_per_token

    def _edge(self, edge: int) -> None:
        self._edges = sorted([*self._edges, edge])
        column = np.zeros(self._rows.shape[1])
        column[: len(self._tables)] = [prefill_cost(table, edge, self.knobs) for table in self._tables]
        self._prefill[edge] = column

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


def predicted_ms(queue: Floats, load: Floats, restore: Floats, prefill: Floats, first_token: Floats) -> Floats:
    """`policy.predicted_ms` of each."""
    found: Floats = np.maximum(queue, load) + restore + prefill + first_token
    return found


def costs_of(costs: Mapping[Tier, TierCost], bytes_per_token: int, knobs: PolicyKnobs) -> Sequence[float]:
    """Latency, ms a byte, break-even and order of each tier. Order: cheapest first by the worker's own measurements of
    one chunk's bytes; peers only where it reports what they cost: without that it has no way to them.
    """
    latency, per_byte, break_even, whole = [], [], [], []
    size = max(1, bytes_per_token) * _CHUNK_TOKENS
    for tier in TIERS:
        cost = costs.get(tier)
        unknown = cost is None or cost.bytes_per_ms <= 0
        latency.append(knobs.default_latency_ms if cost is None or unknown else cost.latency_ms)
        per_byte.append(1.0 / (knobs.default_bytes_per_ms if cost is None or unknown else cost.bytes_per_ms))
        break_even.append(0 if cost is None else cost.break_even_tokens)
        whole.append((latency[-1] + size * per_byte[-1], tier))
    order = sorted(range(len(SOURCES)), key=whole.__getitem__)
    places = [float(order.index(index)) for index in range(len(SOURCES))] + [NO_WAY]
    if Tier.PEER not in costs:
        places[TIERS.index(Tier.PEER)] = NO_WAY
    return [*latency, *per_byte, *break_even, *places]
