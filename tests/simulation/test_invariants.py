"""Each invariant has a planted bug that breaks it, and honest runs break none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from libs.controller.discovery import Registry, Rejection
from libs.controller.protocol import AssignmentId
from libs.controller.router_actions import RouterActions
from libs.controller.router_state import RequestState
from libs.controller.worker import WorkerMachine
from libs.controller.worker_events import TokensDrawn
from libs.controller.worker_state import AssignmentState
from libs.simulation import runtime, worker_node
from libs.simulation.fuzz import run_seed, summarise
from libs.simulation.generate import generate
from libs.simulation.pages import PagePool, State
from libs.simulation.schedule import Ask, Schedule, Settings, WorkerSpec
from libs.simulation.storage import Catalog
from libs.simulation.world import World

Plant = Callable[[pytest.MonkeyPatch], None]


def ends_twice(patch: pytest.MonkeyPatch) -> None:
    honest = RouterActions._end

    def end(self: RouterActions, state: RequestState, delivery: object) -> None:
        honest(self, state, delivery)  # type: ignore[arg-type]
        self._out.append(self._out[-1])

    patch.setattr(RouterActions, "_end", end)


def draws_anew(patch: pytest.MonkeyPatch) -> None:
    honest = WorkerMachine._tokens

    def tokens(self: WorkerMachine, state: AssignmentState, event: TokensDrawn) -> None:
        honest(self, state, replace(event, tokens=tuple(token + self.epoch for token in event.tokens)))

    patch.setattr(WorkerMachine, "_tokens", tokens)


def forgets_to_cancel(patch: pytest.MonkeyPatch) -> None:
    honest = RouterActions._over

    def over(self: RouterActions, *arguments: object, **named: object) -> None:
        honest(self, *arguments, **{**named, "cancel": False})  # type: ignore[arg-type]

    patch.setattr(RouterActions, "_over", over)


def frees_twice(patch: pytest.MonkeyPatch) -> None:
    honest = PagePool.release

    def release(self: PagePool, assignment: AssignmentId) -> None:
        spare = list(self.leases[assignment].spare)
        honest(self, assignment)
        for page in spare[:1]:
            self.state[page] = State.RESERVED
            self._move(page, State.FREE)

    patch.setattr(PagePool, "release", release)


def evicts_what_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PagePool, "_evictable", lambda self: [p for p in range(self.count) if self.state[p] is State.RESIDENT]
    )


def publishes_too_early(patch: pytest.MonkeyPatch) -> None:
    honest = worker_node.WorkerNode._copied

    def copied(self: worker_node.WorkerNode, node: object, *arguments: object) -> None:
        self.world.publish(node, self.name)
        honest(self, node, *arguments)  # type: ignore[arg-type]

    patch.setattr(worker_node.WorkerNode, "_copied", copied)


def counts_a_page_too_few(patch: pytest.MonkeyPatch) -> None:
    honest = PagePool.needed
    patch.setattr(PagePool, "needed", lambda self, tokens, budget, resident: honest(self, tokens, budget, resident) - 1)


def believes_old_heartbeats(patch: pytest.MonkeyPatch) -> None:
    honest = Registry._rejection

    def rejection(self: Registry, *arguments: object) -> Rejection | None:
        found = honest(self, *arguments)  # type: ignore[arg-type]
        return None if found is Rejection.OLD_SEQUENCE else found

    patch.setattr(Registry, "_rejection", rejection)


def blames_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("libs.controller.router._blame", lambda state: 0.0)


def raises(patch: pytest.MonkeyPatch) -> None:
    def broken(self: runtime.Runtime) -> float:
        raise ZeroDivisionError("planted")

    patch.setattr(runtime.Runtime, "queue_ms", broken)


@pytest.mark.parametrize(
    ("invariant", "plant"),
    [
        ("0", raises),
        ("1", ends_twice),
        ("2", draws_anew),
        ("3", forgets_to_cancel),
        ("4", frees_twice),
        ("5", evicts_what_is_used),
        ("6", publishes_too_early),
        ("7", counts_a_page_too_few),
        ("8", believes_old_heartbeats),
        ("9", blames_nobody),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_planted_bug_breaks_its_invariant(invariant: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    broken = set()
    for seed in range(200):
        schedule = generate(seed)
        if plant is blames_nobody:
            schedule = deadly()
        failure = World(schedule).run()
        if failure is not None:
            broken.add(failure.invariant[0])
            assert failure.tail and failure.step
        if invariant in broken:
            return
        if plant is blames_nobody:
            break
    pytest.fail(f"broke {broken or 'nothing'}")


def deadly() -> Schedule:
    workers = tuple(WorkerSpec(f"w{index}") for index in range(6))
    return Schedule("deadly", Settings(workers, attempts=20), (Ask("killer", 500.0, own=20, deadly=True),))


def test_honest_random_schedules_break_nothing() -> None:
    summary = summarise(run_seed(seed) for seed in range(40))
    assert [(run.seed, run.failure) for run in summary.failures] == []
    assert summary.events_median >= 300 and summary.faults_median >= 3
    assert summary.coverage["router event/Submitted"] >= 40 * 7


def test_at_rest_nothing_is_held_and_everything_has_ended() -> None:
    world = World(generate(3))
    assert world.run() is None
    assert all(call.outcome for call in world.ingress.calls.values())
    assert all(not node.pool.leases for node in world.workers.values())


def test_a_fact_that_a_fault_made_false_is_excused() -> None:
    assert not Catalog().facts
    schedule = replace(generate(1), faults=())
    assert World(schedule).run() is None
