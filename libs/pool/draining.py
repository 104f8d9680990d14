"""Draining writers: who is warned about, who stays as a fallback, who goes.

A draining writer goes when it is empty, at the effective force-close deadline, or because its cell has too many of
them. The drain TTL only warns. One that a commit left as the fallback of what it could not cover stays until that is
covered; past its stale TTL it stays only where a cell would fall below its minimum without it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .contours import Contour, Move
from .coverage import Cover
from .inventory import WriterRecord
from .knobs import PoolPolicy
from .model import Cell, EndpointKey, Group


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to do about draining writers."""

    close: tuple[tuple[WriterRecord, Move], ...]
    warn: tuple[WriterRecord, ...]


def demotable(
    record: WriterRecord,
    active: Cover,
    serving: Cover,
    listed: Collection[EndpointKey],
    wanted: Collection[Group],
    policy: PoolPolicy,
    now: float,
) -> bool:
    """Whether a fallback is one no longer. ``active``, ``serving``: coverage without and with fallbacks.

    ``wanted``: the cell-families of the endpoints in effect.
    """
    covered = all(active.groups[group] for group in record.endpoint.groups if group in wanted)
    expired = record.stale_until is not None and now >= record.stale_until
    if not (covered and (active.endpoints[record.key] or record.key not in listed)) and not expired:
        return False
    # Families are covered one by one, a cell as a whole: its minimum holds too before anything is given up.
    return serving.spares((record,), {group.cell for group in wanted}, policy.survivability_min)


def sweep(records: Sequence[WriterRecord], policy: PoolPolicy, now: float) -> Sweep:
    """What is due of the draining writers that are no fallbacks."""
    draining = [r for r in records if r.contour is Contour.DRAINING and r.live and not r.fallback]
    close: dict[WriterRecord, Move] = {}
    warn = []
    for record in draining:
        age = now - record.since
        if not record.bound:
            close[record] = Move.EMPTIED
        elif age >= policy.force_close_after_s:
            close[record] = Move.DEADLINE
        elif age >= policy.drain_ttl_s and not record.warned:
            warn.append(record)
    by_cell: dict[Cell, list[WriterRecord]] = {}
    for record in draining:
        for cell in record.endpoint.cells:
            by_cell.setdefault(cell, []).append(record)
    for _cell, members in sorted(by_cell.items()):
        staying = [record for record in members if record not in close]
        excess = len(staying) - policy.drain_threshold
        for record in sorted(staying, key=lambda record: (record.since, record.writer))[: max(0, excess)]:
            close[record] = Move.THRESHOLD
    return Sweep(tuple(close.items()), tuple(warn))
