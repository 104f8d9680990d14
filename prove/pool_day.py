"""A logical day for the adaptive floor: the recorded traces' arrivals over a load curve with an idle night.

The traces last minutes; what is theirs here is how arrivals follow each other and how long each request runs. Their
gaps are stretched to the rate of the hour. The pool's whole core runs under a logical clock, with the defaults'
periodic generations and all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise

from libs.pool.contours import Move
from libs.pool.effects import Ready
from libs.pool.events import PoolEvent
from libs.pool.knobs import PoolPolicy
from libs.pool.model import CellTarget
from libs.simulation.traces.recorded import SHIPPED, Recorded, read
from tests.pool.world import World, endpoint

CURVE = (0, 0, 0, 0, 0, 0, 0, 0, 2, 30, 200, 700, 900, 500, 800, 1_000, 700, 400, 500, 300, 120, 40, 8, 4)
"""Requests an hour and cell, by the hour. The night is the first eight hours: nobody comes."""
NIGHT_HOURS = 8
TRACES = {"A": "mooncake_synthetic_trace.jsonl", "B": "dynamo_mooncake_trace_1000.jsonl"}
"""Each cell's model has its own customers."""
_PREFILL_S, _DECODE_S = 0.00015, 0.012
"""A token's, as the traces' declared costs have them."""
_LOOK_S = 60.0
_DUE_S = 15.0
"""A change of the floor is due within this: a look of the core and a dial."""


@dataclass
class Day:
    """What was seen."""

    requests: int = 0
    lost: int = 0
    least: dict[str, int] = field(default_factory=dict)
    """Fewest serving writers of each cell, after any event."""
    quiet_spells: int = 0
    """Times that a cell was without activity for long enough to be idle."""
    switches: int = 0
    connects: int = 0
    shrunk: int = 0
    """Writers that the floor took out."""
    removals: dict[str, int] = field(default_factory=dict)
    commits: dict[str, int] = field(default_factory=dict)
    churn_per_writer_hour: float = 0.0
    looked: Counter[str] = field(default_factory=Counter)
    astray: list[str] = field(default_factory=list)
    """Looks that found another count than the load asks for."""
    by_hour: list[float] = field(default_factory=list)
    """Active writers, the mean over each hour."""


def arrivals(rows: Sequence[Recorded], hour_s: float) -> Iterator[tuple[float, float]]:
    """(second of the day, seconds it runs), ascending."""
    gaps = [(after.at_ms - before.at_ms) / 1_000 for before, after in pairwise(rows)]
    mean = sum(gaps) / len(gaps)
    now = NIGHT_HOURS * hour_s
    for gap, row in zip(cycle(gaps), cycle(rows), strict=False):
        # A gap is so much work of the curve's, whatever hours it reaches over.
        left = gap / mean
        while True:
            hour = int(now / hour_s)
            if hour >= len(CURVE):
                return
            rate, rest_s = CURVE[hour] / 3_600, (hour + 1) * hour_s - now
            if left <= rate * rest_s:
                break
            left -= rate * rest_s
            now = (hour + 1) * hour_s
        now += left / rate
        yield now, row.input_tokens * _PREFILL_S + row.output_tokens * _DECODE_S


def day(policy: PoolPolicy, seed: int, hour_s: float = 3_600.0) -> Day:
    """Plays it; an hour may be shorter, then there are fewer requests in it."""
    world = World(policy, seed=seed, tick_s=5.0)
    try:
        return _Play(world, hour_s).played()
    finally:
        world.close()


class _Play:
    def __init__(self, world: World, hour_s: float) -> None:
        self.world, self.hour_s, self.found = world, hour_s, Day()
        self.endpoints = [endpoint(index, "A") for index in range(3)] + [endpoint(index, "B") for index in range(3, 5)]
        self.open: Counter[str] = Counter()
        self.last = dict.fromkeys(TRACES, world.now)
        """When each cell was last active, as the load has it."""
        self.since = dict.fromkeys(TRACES, world.now)
        """Since when without a spell that is long enough to be idle."""
        self.hours: list[list[int]] = [[] for _ in CURVE]
        self.shrunk: set[int] = set()

    def played(self) -> Day:
        world, found = self.world, self.found
        world.read(*self.endpoints)
        world.run(1)
        world.watch = self.watch
        began = world.now
        for cell, name in TRACES.items():
            for at, seconds in arrivals(read(SHIPPED / name), self.hour_s):
                world.after(at, lambda cell=cell, seconds=seconds: self.request(cell, seconds))
        looks = int(len(CURVE) * self.hour_s / _LOOK_S)
        for look in range(1, looks + 1):
            world.after(look * _LOOK_S - 0.5, lambda: self.look(began))
        world.run(len(CURVE) * self.hour_s)
        told = world.core.snapshot(world.now)
        world.run(3_600)  # what runs over midnight ends
        world.assert_rest()
        found.shrunk = len(self.shrunk)
        found.switches, found.connects = told.floor_switches, told.connects
        found.removals = {move.value: count for move, count in told.removals.items()}
        found.commits, found.churn_per_writer_hour = dict(told.commits), round(told.churn_per_writer_hour, 2)
        found.by_hour = [round(sum(counts) / len(counts), 2) if counts else 0.0 for counts in self.hours]
        return found

    def watch(self, event: PoolEvent, handle: object) -> Ready:
        ready: Ready = handle()  # type: ignore[operator]
        del event
        self.shrunk |= {record.writer for record in self.world.records if record.why is Move.SHRUNK}
        cover = self.world.core.books.cover()
        for cell in TRACES:
            self.found.least[cell] = min(self.found.least.get(cell, 99), cover.cells[cell])
        return ready

    def request(self, cell: str, seconds: float) -> None:
        world, found = self.world, self.found
        found.requests += 1
        self.touch(cell)
        session = world.bind(CellTarget(cell))
        if session is None:
            found.lost += 1
            return
        self.open[cell] += 1

        def done() -> None:
            self.touch(cell)
            self.open[cell] -= 1
            world.finish(session)
            found.lost += session.closes[0].reason.label != "done"

        world.after(seconds, done)

    def touch(self, cell: str) -> None:
        now, idle_s = self.world.now, self.world.core.policy.idle_s
        if not self.open[cell] and now - self.last[cell] >= idle_s:
            self.found.quiet_spells += 1
            self.since[cell] = now
        self.last[cell] = now

    def look(self, began: float) -> None:
        """Whether the count is what the load asks for, where it has had the time to be."""
        world, policy = self.world, self.world.core.policy
        hour = int((world.now - began) / self.hour_s)
        self.hours[min(hour, len(CURVE) - 1)].append(len(world.active()))
        for cell in TRACES:
            quiet = 0.0 if self.open[cell] else world.now - self.last[cell]
            settled = world.now - self.since[cell] >= policy.recovery_grace_s + _DUE_S
            if quiet >= policy.idle_s + _DUE_S and settled:
                due, why = policy.idle_writers_per_endpoint, "idle"
            elif quiet < policy.idle_s - _DUE_S and world.now - self.since[cell] >= _DUE_S:
                due, why = policy.writers_per_endpoint, "active"
            else:
                continue
            self.found.looked[why] += 1
            for one in self.endpoints:
                has = len(world.active(one.key))
                if cell in one.cells and has != due:
                    self.found.astray.append(
                        f"{(world.now - began) / 3600:.2f} h: {one.worker} has {has}, {why}: {due}"
                    )
