"""Costs as a router believes them: what a worker reports, smoothed over its heartbeats. Pure.

A report is a measurement and off by what measurements are off by. Between workers that are equally fast, the one whose
last report happened to be low would get every long prompt. What a worker gets wrong every time is not smoothed away:
that is what corrections are for. A table with other buckets than before is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.controller.protocol import DecodeCost, PrefillCost, Tier, TierCost

Prefill = tuple[PrefillCost, ...]
Decode = tuple[DecodeCost, ...]


@dataclass(frozen=True, slots=True)
class Noise:
    """How far reports scatter about what is believed: `variance` of their ratio, and `smoothed`: by what share what is
    believed is off.
    """

    variance: float
    smoothed: float


QUIET = Noise(0.0, 0.0)


def noise(old: Noise, was: float, now: float, share: float) -> Noise:
    """With one more report of `now` where `was` was believed."""
    if was <= 0 or now <= 0:
        return old
    variance = _mix(old.variance, (now / was - 1) ** 2, share)
    return Noise(variance, math.sqrt(variance * share / (2 - share)))


def prefill(old: Prefill, new: Prefill, share: float) -> Prefill:
    """`share` of the new table, the rest of the old."""
    if old == new or [one.up_to_tokens for one in old] != [one.up_to_tokens for one in new]:
        return new
    return tuple(
        [
            PrefillCost(now.up_to_tokens, _mix(was.ms_per_token, now.ms_per_token, share))
            for was, now in zip(old, new, strict=True)
        ]
    )


def decode(old: Decode, new: Decode, share: float) -> Decode:
    """`share` of the new table, the rest of the old."""
    if old == new or [one.lanes for one in old] != [one.lanes for one in new]:
        return new
    return tuple(
        [DecodeCost(now.lanes, _mix(was.step_ms, now.step_ms, share)) for was, now in zip(old, new, strict=True)]
    )


def tiers(old: Mapping[Tier, TierCost], new: Sequence[TierCost], share: float) -> dict[Tier, TierCost]:
    """`share` of the new costs, the rest of the old; break-evens as they are now."""
    return {cost.tier: _tier(old.get(cost.tier), cost, share) for cost in new}


def _tier(old: TierCost | None, new: TierCost, share: float) -> TierCost:
    if old is None or old.bytes_per_ms <= 0 or new.bytes_per_ms <= 0 or old == new:
        return new
    per_byte = _mix(1 / old.bytes_per_ms, 1 / new.bytes_per_ms, share)
    latency_ms = _mix(old.latency_ms, new.latency_ms, share)
    return TierCost(new.tier, latency_ms, 1 / per_byte, new.break_even_tokens)


def _mix(old: float, new: float, share: float) -> float:
    return old + share * (new - old)
