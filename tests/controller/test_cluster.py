"""The two machines together, under random schedules with every kind of fault, and proof that the checks can fail."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.controller import router_table, worker_table
from libs.controller.errors import ControllerBugError
from libs.controller.fences import Fence, FenceName, RouterFence, WorkerFence
from libs.controller.knobs import RouterKnobs, WorkerKnobs
from libs.controller.protocol import CompletedDelivery
from tests.controller import cluster
from tests.fixtures.hash_seeds import printed

# Named in counts only (nothing to remove), or idempotent: draining twice is draining.
NOT_GUARDS = {
    RouterFence.UNKNOWN_REQUEST,
    RouterFence.USAGE_MISMATCH,
    WorkerFence.UNKNOWN_ASSIGNMENT,
    WorkerFence.NO_TUNNEL,
    WorkerFence.ALREADY_DRAINING,
}


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.06, 0.25]), st.booleans())
def test_every_schedule_keeps_the_invariants(seed: int, faults: float, reorder: bool) -> None:
    cluster.run(seed, faults, reorder=reorder)


def test_without_faults_everything_completes_in_one_attempt_per_decline() -> None:
    done = cluster.run(7, faults=0.0, reorder=False, worker_knobs=WorkerKnobs())
    completed = done.outcomes().get("CompletedDelivery", 0)
    assert completed >= 4  # the harness plans an impossible request now and then, and its devices may fail
    assert all(counts >= 1 for counts in done.outcomes().values())


def test_overload_with_a_short_queue_ends_every_request() -> None:
    knobs = RouterKnobs(queue=2, queue_per_tenant=1)
    outcomes = Counter[str]()
    for seed in range(25):
        outcomes.update(cluster.run(seed, 0.05, 14, workers=1, knobs=knobs).outcomes())
    assert outcomes["ErrorDelivery RESOURCE_EXHAUSTED"] > 0
    assert outcomes["CompletedDelivery"] > 0


def test_every_transition_of_both_tables_is_reached() -> None:
    router: set[tuple[object, object]] = set()
    worker: set[tuple[object, object]] = set()
    for seed in range(160):
        done = cluster.run(seed, 0.1)
        router |= {(before, trigger) for before, trigger, _ in done.router.reached}
        for one in done.workers.values():
            worker |= {(before, trigger) for before, trigger, _ in one.machine.reached}
        for machine in done.ended:
            worker |= {(before, trigger) for before, trigger, _ in machine.reached}
    completed = router_table.Trigger.RESULT_COMPLETED
    # A completed result without a single token: see test_router.
    directed = {(router_table.Phase.OFFERED, completed), (router_table.Phase.ACCEPTED, completed)}
    assert set(router_table.TABLE) - router <= directed
    assert set(worker_table.TABLE) == worker


class Without(Fence):
    """A machine with one guard taken away."""

    def __init__(self, missing: FenceName) -> None:
        super().__init__()
        self.missing = missing

    def stops(self, name: FenceName, condition: bool, event: object) -> bool:
        return name is not self.missing and super().stops(name, condition, event)


@pytest.mark.parametrize("name", [*RouterFence, *WorkerFence], ids=lambda name: f"{type(name).__name__}-{name.value}")
def test_a_missing_guard_is_noticed(name: FenceName) -> None:
    if name in NOT_GUARDS:
        pytest.skip("counts only, or idempotent")
    router = Without(name) if isinstance(name, RouterFence) else None
    worker = Without(name) if isinstance(name, WorkerFence) else None
    for seed in range(150):
        try:
            cluster.run(seed, 0.1, router_fence=router, worker_fence=worker)
        except (AssertionError, ControllerBugError, KeyError):
            return
    pytest.fail(f"no schedule noticed that {name} is missing")


def test_the_checker_notices_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from libs.controller.router_state import RequestState

    monkeypatch.setattr(RequestState, "delivered", property(lambda self: len(self.generated)))
    with pytest.raises(AssertionError):
        for seed in range(40):
            cluster.run(seed)


def test_streams_survive_several_workers() -> None:
    served = Counter[int]()
    for seed in range(60):
        for terminals in cluster.run(seed, 0.1).terminals.values():
            served.update(len(set(d.served.workers)) for d in terminals if isinstance(d, CompletedDelivery))
    assert served[2] > 0 and served[3] > 0, served


def trace_digest() -> str:
    digest = hashlib.sha256()
    for seed in (1, 2, 3):
        for line in cluster.run(seed, 0.1).trace:
            digest.update(line.encode())
    return digest.hexdigest()


def test_traces_do_not_depend_on_the_hash_seed() -> None:
    code = "from tests.controller.test_cluster import trace_digest; print(trace_digest())"
    assert printed(code, ("0", "1", "4242")) == {trace_digest()}
