"""What it would cost to have an evicted prefix back, by what this worker has measured: the page pool's `ReturnCost`.

The durable part comes from the cheaper of disk and object store (its latency, its bandwidth over what a restore really
reads, then staging to device) or is computed again where that is cheaper; the rest is computed. Until anything is
measured the pool's default stands in. Snapshots of the measurements are kept for a second: an eviction ranks many
routes under the pool's lock, and prices move slowly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.continuation.layout import Layout
from libs.controller.protocol import PrefillCost, Tier, TierCost
from services.worker.pages.eviction import default_return_cost

_KEPT_S = 1.0
_KEEPING = frozenset({Tier.SSD, Tier.OBJECT})
"""Where what is durable surely lies; whether memory or a peer still has it when it is wanted, nobody knows."""


@dataclass(frozen=True, slots=True)
class Prices:
    """`prefill` ascending by length; `tiers` without the device; `upload`: staging to device, None if not measured."""

    prefill: tuple[PrefillCost, ...]
    tiers: tuple[TierCost, ...]
    upload: TierCost | None


class MeasuredReturnCost:
    """Implements `pages.eviction.ReturnCost`. Measurements are handed over by `measure` once there is something that
    measures.
    """

    def __init__(self, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout, self._clock = layout, clock
        self._prefill: Callable[[], Sequence[PrefillCost]] | None = None
        self._tiers: Callable[[], Sequence[TierCost]] | None = None
        self._prices = Prices((), (), None)
        self._until = float("-inf")

    def measure(self, prefill: Callable[[], Sequence[PrefillCost]], tiers: Callable[[], Sequence[TierCost]]) -> None:
        """Where costs come from, from now on."""
        self._prefill, self._tiers = prefill, tiers
        self._until = float("-inf")

    def __call__(self, tokens: int, durable: int) -> float:
        """Milliseconds for `tokens` computed tokens of which `durable` can be restored."""
        prices = self._now()
        if not prices.prefill:
            return default_return_cost(tokens, durable)
        whole = tokens * _ms_per_token(prices.prefill, tokens)
        if not durable or not prices.tiers:
            return whole
        # What follows a restored prefix is computed at the cost of its own, longer, context.
        rest = (tokens - durable) * _ms_per_token(prices.prefill, tokens)
        return min(whole, self._restore_ms(prices, durable) + rest)

    def _restore_ms(self, prices: Prices, durable: int) -> float:
        size = self._layout.restore_bytes(durable)
        fetch = min(tier.latency_ms + size / max(tier.bytes_per_ms, 1e-9) for tier in prices.tiers)
        upload = prices.upload
        return fetch + (0.0 if upload is None else upload.latency_ms + size / max(upload.bytes_per_ms, 1e-9))

    def _now(self) -> Prices:
        if self._prefill is None or self._tiers is None:
            return self._prices
        now = self._clock()
        if now >= self._until:
            self._until = now + _KEPT_S
            found = self._tiers()
            self._prices = Prices(
                tuple(self._prefill()),
                tuple(cost for cost in found if cost.tier in _KEEPING),
                next((cost for cost in found if cost.tier is Tier.GPU), None),
            )
        return self._prices


def _ms_per_token(prefill: Sequence[PrefillCost], tokens: int) -> float:
    for cost in prefill:
        if tokens <= cost.up_to_tokens:
            return cost.ms_per_token
    return prefill[-1].ms_per_token
