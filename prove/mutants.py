"""The controller with one guard taken away: every fence, every rejection of the discovery registry, every reason for
which a worker declines before it reserves, every row of the two transition tables, and every row that is kept out of
them although its event can arrive.

A mutant is applied in this process for as long as it is tried; all of them are values, so that they can be named,
listed and sent to other processes.

A run is a function of its schedule and the controller, so a mutant's run is the honest one, step by step, until the
guard it lacks has something to say. Hence one honest run of a seed tells which mutants the seed can show (`shown_by`),
and only those need be tried on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from libs.controller import discovery, router_actions, router_table, worker, worker_table
from libs.controller.discovery import DiscoveryEffect, Registry, Rejection
from libs.controller.fences import Fence, FenceName, RouterFence, WorkerFence
from libs.controller.protocol import DeclineReason, Heartbeat
from libs.controller.worker import WorkerMachine
from libs.controller.worker_events import OfferReceived
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
        for phase in (_R.WAITING, _R.HELD, *_LIVE)
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
    """One. `kind`: fence, rejection, decline, drop (a row) or allow (a pair that is no row); `name` is unique."""

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
        if self.kind == "decline":
            with _unrefused(_DECLINES[self.index]):
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
# The pool's own two are no choices: without pages or prefix there is nothing to run on.
_DECLINES = [
    one
    for one in DeclineReason
    if one not in (DeclineReason.UNSPECIFIED, DeclineReason.INSUFFICIENT_PAGES, DeclineReason.PREFIX_GONE)
]
_ROWS = [*((0, key) for key in router_table.TABLE), *((1, key) for key in worker_table.TABLE)]
_PAIRS = [*((0, key) for key in ROUTER_KEPT_OUT), *((1, key) for key in WORKER_KEPT_OUT)]


def mutants(kind: str = "") -> list[Mutant]:
    """All, or all of a kind."""
    found = [Mutant("fence", f"fence {name}", index) for index, name in enumerate(_FENCES)]
    found += [Mutant("rejection", f"rejection {one.value}", index) for index, one in enumerate(Rejection)]
    found += [Mutant("decline", f"decline {one.name}", index) for index, one in enumerate(_DECLINES)]
    found += [Mutant("drop", f"drop {_row(*row)}", index) for index, row in enumerate(_ROWS)]
    found += [Mutant("allow", f"allow {_row(*pair)}", index) for index, pair in enumerate(_PAIRS)]
    return [one for one in found if kind in ("", one.kind)]


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


@contextmanager
def _unrefused(missing: DeclineReason) -> Iterator[None]:
    """The worker without one of its reasons."""
    refusal = WorkerMachine._refusal

    def lenient(self: WorkerMachine, event: OfferReceived) -> tuple[DeclineReason, str] | None:
        found = refusal(self, event)
        return None if found is not None and found[0] is missing else found

    WorkerMachine._refusal = lenient  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkerMachine._refusal = refusal  # type: ignore[method-assign]


class _Asked(dict):  # type: ignore[type-arg]
    """A transition table that remembers which pairs it was asked for and does not have."""

    def __init__(self, table: dict) -> None:  # type: ignore[type-arg]
        super().__init__(table)
        self.refused: set[object] = set()

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        if not found:
            self.refused.add(key)
        return found


@dataclass(frozen=True)
class Honest:
    """A seed's run on the controller as it is: what it broke ("" = nothing), and which mutants could show there."""

    seed: int
    broken: str
    shows: frozenset[str]


def shown_by(seed: int) -> Honest:
    """Runs a seed and notes which guards had something to say."""
    asked = (_Asked(router_table.TABLE), _Asked(worker_table.TABLE))
    world = World(generate(seed))
    router_actions.TABLE, worker.TABLE = asked
    try:
        failure = world.run()
    finally:
        router_actions.TABLE, worker.TABLE = router_table.TABLE, worker_table.TABLE
    spoke = {name for fence in (world.router_fence, world.worker_fence) for _, name in fence.counts}
    reached = [
        {(before, trigger) for before, trigger, _ in counts}
        for counts in (world.coverage.router_reached, world.coverage.worker_reached)
    ]
    names = [one.name for index, one in enumerate(mutants("fence")) if _FENCES[index] in spoke]
    names += [
        one.name for one, said in zip(mutants("rejection"), Rejection, strict=True) if world.coverage.rejected[said]
    ]
    names += [one.name for one, why in zip(mutants("decline"), _DECLINES, strict=True) if world.coverage.declines[why]]
    names += [one.name for one, (table, key) in zip(mutants("drop"), _ROWS, strict=True) if key in reached[table]]
    names += [
        one.name for one, (table, key) in zip(mutants("allow"), _PAIRS, strict=True) if key in asked[table].refused
    ]
    return Honest(seed, failure.invariant if failure is not None else "", frozenset(names))


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the first seed that shows it and the invariant it breaks; -1 = none did. `runs`: of so
    many seeds, those left out that cannot show it."""

    mutant: Mutant
    seed: int
    invariant: str
    runs: int


def hunt(mutant: Mutant, seeds: Sequence[int]) -> Verdict:
    """Tries seeds until an invariant breaks."""
    for count, seed in enumerate(seeds, 1):
        failure = mutant.run(generate(seed))
        if failure is not None:
            return Verdict(mutant, seed, failure.invariant, count)
    return Verdict(mutant, -1, "", len(seeds))
