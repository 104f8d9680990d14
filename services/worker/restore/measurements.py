"""What the tiers cost, as heartbeats report it, and from which length restoring from them beats computing.

Break-even: the shortest prefix of n tokens (a multiple of the tail's 16) for which latency + bytes(n) / bandwidth +
upload is below n times the measured prefill cost at that length. bytes(n) is what a restore really reads: windowed
groups stop growing at their window. 0 = not measured, MAX_TOKENS = never, within any context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libs.chunks.cost import Price
from libs.continuation.chain import TAIL_TOKENS
from libs.continuation.layout import Layout
from libs.controller.protocol import PrefillCost, Tier, TierCost
from services.worker.restore.whole import WholeRestores

MAX_TOKENS = 1 << 20


class StorageMeasurements:
    """Implements `TierMeasurements`."""

    def __init__(self, layout: Layout, restores: WholeRestores, prefill: Callable[[], Sequence[PrefillCost]]) -> None:
        self._layout, self._restores, self._prefill = layout, restores, prefill

    def tiers(self) -> Sequence[TierCost]:
        """Now; tiers that have never been read are left out."""
        prefill, upload = self._prefill(), self._restores.upload.price()
        found = [TierCost(Tier.GPU, upload.latency_ms, upload.bytes_per_ms)] if upload.samples else []
        for tier, meter in sorted(self._restores.own.items()):
            if meter.price().samples:
                price = self._restores.price(tier)
                found.append(
                    TierCost(
                        tier, price.latency_ms, price.bytes_per_ms, break_even(self._layout, price, upload, prefill)
                    )
                )
        return found


def break_even(layout: Layout, price: Price, upload: Price, prefill: Sequence[PrefillCost]) -> int:
    """Tokens; see the module. Lengths grow by an eighth per step: fine enough, and few steps."""
    if not prefill:
        return 0
    tokens = TAIL_TOKENS
    while tokens < MAX_TOKENS:
        size = layout.restore_bytes(tokens)
        if price.ms(size) + upload.ms(size) < tokens * _ms_per_token(prefill, tokens):
            return tokens
        tokens += max(1, tokens // 8 // TAIL_TOKENS) * TAIL_TOKENS
    return MAX_TOKENS


def _ms_per_token(prefill: Sequence[PrefillCost], tokens: int) -> float:
    for cost in prefill:
        if tokens <= cost.up_to_tokens:
            return cost.ms_per_token
    return prefill[-1].ms_per_token
