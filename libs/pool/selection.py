"""Which writer takes a bind. Pure functions over candidates.

The result is an order of preference: a bind that the first cannot take (its command channel is full) goes to the next.
Regular writers before the fallbacks that a commit left behind, well ones before degraded ones.

*Round robin*: sorted by id, the one after the last taken first. *Two choices*: of a sample, two are compared by the
work that waits at them; that keeps the longest queue short without everybody running to the shortest one
(Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .inventory import WriterRecord
from .knobs import PickMode, PoolPolicy
from .model import Chance, WriterId

Work = Callable[[WriterId], int]
"""Outstanding work of a writer: payloads in its command channel and routes, as the user weighs them."""


def tiers(records: Sequence[WriterRecord]) -> list[list[WriterRecord]]:
    """Candidates for a bind, best tier first, each tier in the order of ids; those that take no bind left out."""
    found: list[list[WriterRecord]] = [[], [], [], []]
    for record in sorted(records, key=lambda record: record.writer):
        if record.serving:
            found[2 * record.fallback + bool(record.degraded)].append(record)
    return [tier for tier in found if tier]


def order(
    tiers: Sequence[Sequence[WriterRecord]], policy: PoolPolicy, work: Work, chance: Chance, last: WriterId
) -> list[WriterRecord]:
    """The order of preference. ``last``: the writer taken last for this target, 0 for none."""
    result: list[WriterRecord] = []
    for tier in tiers:
        if policy.pick_mode is PickMode.ROUND_ROBIN:
            after = [record for record in tier if record.writer > last]
            result += [*after, *tier[: len(tier) - len(after)]]
        else:
            result += _two_choices(tier, policy.pick_sample, work, chance)
    return result


def _two_choices(tier: Sequence[WriterRecord], size: int, work: Work, chance: Chance) -> list[WriterRecord]:
    if len(tier) == 1:
        return list(tier)
    sample = chance.sample(tier, min(size, len(tier)))
    pair = sorted(sample[:2], key=lambda record: (work(record.writer), record.writer))
    rest = sorted(sample[2:], key=lambda record: (work(record.writer), record.writer))
    chosen = {record.writer for record in sample}
    return [*pair, *rest, *(record for record in tier if record.writer not in chosen)]
