"""Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002): ddmin.

A failing schedule is reduced to asks and faults of which none can be left out without the failure going away, then to
the workers and routers that are still named or needed. What counts as the failure is the invariant's name: a schedule
that breaks another one is another failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from libs.simulation.schedule import Ask, Fault, Schedule, ScheduleError, check
from libs.simulation.world import World

T = TypeVar("T")


def ddmin(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A 1-minimal subsequence that still fails. `items` as a whole must."""
    kept = list(items)
    parts = 2
    while len(kept) >= 2:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept, parts = rest, max(2, parts - 1)
                break
        else:
            if parts >= len(kept):
                break
            parts = min(len(kept), 2 * parts)
    return [] if len(kept) == 1 and fails([]) else kept


def broken_by(schedule: Schedule) -> str:
    """The invariant a schedule breaks; "" if none."""
    failure = World(schedule).run()
    return failure.invariant if failure is not None else ""


def shrink(schedule: Schedule, broken: Callable[[Schedule], str] = broken_by) -> Schedule:
    """The smallest schedule found that breaks what this one does (this one, if it breaks nothing)."""
    wanted = broken(schedule)
    if not wanted:
        return schedule

    def made(items: Sequence[Ask | Fault]) -> Schedule:
        asks = tuple(item for item in items if isinstance(item, Ask))
        named = {ask.name for ask in schedule.asks} - {ask.name for ask in asks}
        faults = tuple(item for item in items if isinstance(item, Fault) and item.who not in named)
        return replace(schedule, asks=asks, faults=faults)

    small = made(ddmin([*schedule.asks, *schedule.faults], lambda items: broken(made(items)) == wanted))
    for candidate in _fewer_nodes(small):
        if broken(candidate) == wanted:
            small = candidate
    return small


def _fewer_nodes(schedule: Schedule) -> list[Schedule]:
    """The schedule with fewer workers and routers, where nothing names those left out; smallest last."""
    found: list[Schedule] = []
    settings = schedule.settings
    for count in range(len(settings.workers) - 1, 0, -1):
        found += _checked(replace(schedule, settings=replace(settings, workers=settings.workers[:count])))
    for count in range(settings.routers - 1, 0, -1):
        found += _checked(replace(schedule, settings=replace(settings, routers=count)))
    return found


def _checked(schedule: Schedule) -> list[Schedule]:
    try:
        return [check(schedule)]
    except ScheduleError:
        return []
