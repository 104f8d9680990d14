"""What restoring from a tier has cost of late, from the plan's first look to its last node's landing.

The tiers' own meters tell how fast their bytes come. A restore is more: each object is found, checked, handed from
thread to thread and waited for in turn, beside a device loop that wants the same processors. From memory that is nearly
all of its time. So what routers are told is measured on whole restores, less what the upload is known to take (they are
told that one too).

A price that is too high keeps its tier from being chosen, and so from being measured again: one without a new
measurement for `_FRESH_S` is dropped, and the tier's own meter decides again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from libs.chunks.cost import CostMeter, Price
from libs.controller.protocol import Tier

_FRESH_S = 120.0
_LEAST_MS = 0.01


@dataclass(slots=True)
class _Whole:
    meter: CostMeter
    at: float


class WholeRestores:
    """`own`: the tiers' own meters; `upload`: staging to device. On the event loop."""

    def __init__(
        self, own: Mapping[Tier, CostMeter], upload: CostMeter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.own, self.upload, self._clock = own, upload, clock
        self._whole: dict[Tier, _Whole] = {}

    def observe(self, brought: Mapping[Tier, int], ms: float) -> None:
        """A restore took `ms`; `brought`: bytes by tier. What the nearer tiers' part should have taken is theirs, the
        rest the farthest's.
        """
        sizes = {tier: size for tier, size in brought.items() if size > 0 and tier in self.own}
        if not sizes:
            return
        tier = max(sizes)
        size = sizes.pop(tier)
        nearer_ms = sum(self.price(other).ms(part) for other, part in sizes.items())
        ms = max(_LEAST_MS, ms - nearer_ms - self.upload.price().ms(size + sum(sizes.values())))
        known = self._fresh(tier)
        if known is None:
            # Until the second one, a fifth of the first is taken to be there whatever the size.
            guess = Price(ms / 5, size / max(_LEAST_MS, ms * 4 / 5))
            known = self._whole[tier] = _Whole(CostMeter(guess), 0.0)
        known.meter.observe(size, ms)
        known.at = self._clock()

    def price(self, tier: Tier) -> Price:
        """What routers are told."""
        known = self._fresh(tier)
        return self.own[tier].price() if known is None else known.meter.price()

    def _fresh(self, tier: Tier) -> _Whole | None:
        known = self._whole.get(tier)
        return known if known is not None and self._clock() - known.at < _FRESH_S else None
