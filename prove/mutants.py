"""The controller with one guard taken away: every fence, every rejection of the discovery registry, every row of the
two transition tables, and every row that is kept out of them although its event can arrive.

A mutant is applied in this process for as long as it is tried; all of them are values, so that they can be named,
listed and sent to other processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from libs.controller import discovery, router_table, worker_table
from libs.controller.discovery import DiscoveryEffect, Registry, Rejection
from libs.controller.fences import Fence, FenceName, RouterFence, WorkerFence
from libs.controller.protocol import Heartbeat
from libs.simulation.generate import generate
from libs.simulation.schedule import Schedule
from libs.simulation.world import Failure, World

# Named in counts only: nothing asks them.
COUNTS_ONLY = {RouterFence.UNKNOWN_REQUEST, RouterFence.USAGE_MISMATCH, WorkerFence.UNKNOWN_ASSIGNMENT}

# Mutants that are the same machine, and why.
EQUIVALENT = {
    "fence WorkerFence.NO_TUNNEL": "it only counts: a lost tunnel without assignments has nobody to end",
    "fence WorkerFence.ALREADY_DRAINING": "draining twice is draining",
    "rejection unknown-tunnel": "heard() asks a second time whether the tunnel is bound: its type says it may not be",
    "allow worker voided, tunnel-lost": "a voided assignment loses its tunnel: it stays voided and says nothing",
}

_R, _RT = router_table.Phase, router_table.Trigger
_W, _WT = worker_table.Phase, worker_table.Trigger
_LIVE = (_R.OFFERED, _R.ACCEPTED, _R.STREAMING)
_PLANS = (_RT.PLAN_RANKED, _RT.PLAN_BLOCKED, _RT.PLAN_IMPOSSIBLE)
_ANSWERS = (_RT.REPLY_ACCEPTED, _RT.REPLY_DECLINED, _RT.OFFER_TIMEOUT)
# Events that can reach a request in this phase, and must not: of all other pairs another fence stops the event before.
# (A stream that has begun is never impossible: such a plan counts as blocked.)
ROUTER_KEPT_OUT = [
    *(
        (phase, trigger)
        for phase in (_R.WAITING, *_LIVE)
        for trigger in _PLANS
        if (phase, trigger) != (_R.STREAMING, _RT.PLAN_IMPOSSIBLE)
    ),
    *((phase, trigger) for phase in (_R.ACCEPTED, _R.STREAMING) for trigger in _ANSWERS),
]
_LATE = (
    _WT.FETCH_STARTED,
    _WT.RESTORED,
    _WT.RESTORE_FAILED,
    _WT.LANE_GRANTED,
    _WT.PREFILLED,
    _WT.TOKENS,
    _WT.FINISHED,
    _WT.RUN_FAILED,
)
WORKER_KEPT_OUT = [
    *((_W.FENCED, trigger) for trigger in _LATE),
    *((_W.ENDING, trigger) for trigger in (_WT.PREFILLED, _WT.TOKENS, _WT.FINISHED, _WT.RUN_FAILED)),
    *((phase, cause) for phase in (_W.VOIDED, _W.ENDING, _W.FENCED) for cause in (_WT.CANCEL, _WT.TUNNEL_LOST)),
]


class Without(Fence):
    """A fence with one guard missing."""

    def __init__(self, missing: FenceName) -> None:
        super().__init__()
        self.missing = missing

    def stops(self, name: FenceName, condition: bool, event: object) -> bool:
        return name is not self.missing and super().stops(name, condition, event)


@dataclass(frozen=True)
class Mutant:
    """One. `kind`: fence, rejection, drop (a row) or allow (a pair that is no row); `name` is unique."""

    kind: str
    name: str
    index: int

    def run(self, schedule: Schedule) -> Failure | None:
        """A schedule on the mutant."""
        with self.applied():
            return World(schedule, *self.fences()).run()

    def fences(self) -> tuple[Fence | None, Fence | None]:
        """Of the router and the worker."""
        if self.kind != "fence":
            return None, None
        missing = _FENCES[self.index]
        return (Without(missing), None) if isinstance(missing, RouterFence) else (None, Without(missing))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While this is open, the mutant is the controller."""
        if self.kind == "rejection":
            with _unguarded(list(Rejection)[self.index]):
                yield
            return
        tables: tuple[dict, dict] = (router_table.TABLE, worker_table.TABLE)  # type: ignore[type-arg]
        saved = [dict(table) for table in tables]
        if self.kind == "drop":
            table, key = _ROWS[self.index]
            del tables[table][key]
        elif self.kind == "allow":
            table, key = _PAIRS[self.index]
            tables[table][key] = frozenset((_R, _W)[table])
        try:
            yield
        finally:
            for table_, before in zip(tables, saved, strict=True):
                table_.clear()
                table_.update(before)


_FENCES: list[FenceName] = [name for name in (*RouterFence, *WorkerFence) if name not in COUNTS_ONLY]
_ROWS = [*((0, key) for key in router_table.TABLE), *((1, key) for key in worker_table.TABLE)]
_PAIRS = [*((0, key) for key in ROUTER_KEPT_OUT), *((1, key) for key in WORKER_KEPT_OUT)]


def mutants() -> list[Mutant]:
    """All."""
    found = [Mutant("fence", f"fence {name}", index) for index, name in enumerate(_FENCES)]
    found += [Mutant("rejection", f"rejection {one.value}", index) for index, one in enumerate(Rejection)]
    found += [Mutant("drop", f"drop {_row(*row)}", index) for index, row in enumerate(_ROWS)]
    found += [Mutant("allow", f"allow {_row(*pair)}", index) for index, pair in enumerate(_PAIRS)]
    return found


def _row(table: int, key: tuple[router_table.Phase | worker_table.Phase, router_table.Trigger | worker_table.Trigger]):
    return f"{('router', 'worker')[table]} {key[0].value}, {key[1].value}"


@contextmanager
def _unguarded(missing: Rejection) -> Iterator[None]:
    """The registry without one of its rejections."""
    rejection, opened = Registry._rejection, Registry.opened

    def lenient(self: Registry, bound: tuple[str, int] | None, heartbeat: Heartbeat) -> Rejection | None:
        found = rejection(self, bound, heartbeat)
        return None if found is missing else found

    def welcoming(self: Registry, tunnel: int, worker: str, now_ms: float, epoch: int = 0) -> list[DiscoveryEffect]:
        if missing is Rejection.KNOWN_TUNNEL:
            self._tunnels.pop(tunnel, None)
        if missing is Rejection.OLD_EPOCH:
            self._newest.pop(worker, None)
        return opened(self, tunnel, worker, now_ms, epoch)

    discovery.Registry._rejection = lenient  # type: ignore[method-assign]
    discovery.Registry.opened = welcoming  # type: ignore[method-assign]
    try:
        yield
    finally:
        discovery.Registry._rejection = rejection  # type: ignore[method-assign]
        discovery.Registry.opened = opened  # type: ignore[method-assign]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the first seed that shows it and the invariant it breaks; -1 = none did."""

    mutant: Mutant
    seed: int
    invariant: str
    tried: int


def hunt(mutant: Mutant, start: int, seeds: int) -> Verdict:
    """Tries seeds until an invariant breaks."""
    for seed in range(start, start + seeds):
        failure = mutant.run(generate(seed))
        if failure is not None:
            return Verdict(mutant, seed, failure.invariant, seed - start + 1)
    return Verdict(mutant, -1, "", seeds)
