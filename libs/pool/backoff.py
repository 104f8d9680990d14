"""How long to wait before the next dial: fast at first, then exponential with full jitter (AWS Architecture Blog,
Exponential Backoff And Jitter, 2015), so that a hundred routers that lost one worker do not come back as one.
"""

from __future__ import annotations

from .knobs import PoolPolicy
from .model import Chance


def pause_s(policy: PoolPolicy, failures: int, outage: bool, chance: Chance) -> float:
    """Seconds until the dial after ``failures`` in a row (at least one). ``outage``: the only endpoint of a cell."""
    if failures <= policy.fast_retries:
        return chance.uniform(0.0, policy.fast_retry_s)
    slow = failures - policy.fast_retries - 1
    ceiling = min(policy.reconnect_max_s, policy.outage_reconnect_max_s) if outage else policy.reconnect_max_s
    return chance.uniform(0.0, min(ceiling, policy.reconnect_min_s * 2.0 ** min(slow, 40)))
