"""What a restore may lose: whatever happens, and whenever it is given up, the bound on the whole holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.continuation.layout import LayerSpec, Layout
from libs.controller.catalog_facts import Chunk, Node
from libs.controller.protocol import AssignmentId, PrefillCost
from services.worker.handlers import GroupPages, NodeFill, RestorePlan
from services.worker.restore.budget import Budget, compute_ms, usable_ends

FULL = Layout.from_layers([LayerSpec(0, None, 1, 16, "float32")])
MIXED = Layout.from_layers([LayerSpec(0, 512, 1, 16, "float32"), LayerSpec(1, None, 1, 16, "float32")])
PREFILL = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4).map(
    lambda costs: [PrefillCost(512 * 2**index, cost) for index, cost in enumerate(costs)]
)


def plan_of(layout: Layout, chunks: int, start: int = 0) -> RestorePlan:
    """Chunks from `start` on; windowed groups only where the end needs them."""
    end = (start + chunks) * 256
    nodes = []
    for index in range(start, start + chunks):
        low, high = 256 * index, 256 * (index + 1)
        fills = [
            GroupPages(group.name, max(low, end - (group.window or end)), high, tuple(range(16)))
            for group in layout.groups
            if not group.window or high > end - group.window
        ]
        node = Node(Chunk(f"{index:064x}", "00" * 32, low, high))
        nodes.append(NodeFill(node, tuple(range(256)), tuple(fills)))
    return RestorePlan(AssignmentId("r", 1), "ab" * 32, "cd" * 16, end, tuple(nodes))


@given(PREFILL, st.integers(0, 40), st.integers(1, 20))
def test_computing_is_priced_chunk_by_chunk(prefill, start, chunks) -> None:
    whole = compute_ms(prefill, 256 * start, 256 * (start + chunks))
    parts = [compute_ms(prefill, 256 * index, 256 * (index + 1)) for index in range(start, start + chunks)]
    assert abs(whole - sum(parts)) < 1e-6 * max(1.0, whole)
    assert compute_ms([], 0, 1_000) == 0.0


def test_a_boundary_counts_where_the_windows_reach_back_to_it() -> None:
    assert usable_ends(plan_of(FULL, 5), FULL) == {256 * (index + 1) for index in range(5)}
    assert usable_ends(plan_of(MIXED, 5), MIXED) == {1280}
    # All of it lies within the window: every boundary can be continued from.
    assert usable_ends(plan_of(MIXED, 2), MIXED) == {256, 512}


@given(
    prefill=PREFILL,
    chunks=st.integers(1, 20),
    mixed=st.booleans(),
    landing=st.lists(st.floats(0.1, 5_000.0), min_size=20, max_size=20),
    dies_at=st.integers(0, 20),
)
def test_waiting_and_then_computing_the_rest_is_within_the_bound(prefill, chunks, mixed, landing, dies_at) -> None:
    """Plays a restore whose nodes take `landing` ms each and whose sources say nothing more from `dies_at` on."""
    layout = MIXED if mixed else FULL
    plan = plan_of(layout, chunks)
    budget, usable = Budget.of(plan, prefill, 300.0, 0.1), usable_ends(plan, layout)
    now, reached = 0.0, 0
    for index, node in enumerate(plan.nodes):
        allowed = budget.allowed_ms(reached)
        assert allowed is not None
        arrives = float("inf") if index >= dies_at else now + landing[index]
        if arrives > allowed:
            now = max(now, allowed)
            break
        now = arrives
        if node.node.chunk.end in usable:
            reached = node.node.chunk.end
    rest = compute_ms(prefill, reached, plan.boundary)
    recompute = compute_ms(prefill, 0, plan.boundary)
    assert now + rest <= recompute + max(300.0, 0.1 * recompute) + 1e-6


def test_a_budget_that_forgets_the_windows_is_found() -> None:
    """Planted: every landed node pays, also those that cannot be continued from; then the bound breaks."""
    plan = plan_of(MIXED, 20)
    prefill = [PrefillCost(1 << 20, 1.0)]
    budget = Budget.of(plan, prefill, 300.0, 0.1)
    too_many = {node.node.chunk.end for node in plan.nodes}
    assert too_many > usable_ends(plan, MIXED)
    waited = budget.allowed_ms(max(too_many - {plan.boundary}))
    assert waited is not None and waited + compute_ms(prefill, 0, plan.boundary) > 1.1 * budget.whole_ms + 300.0


def test_nothing_measured_nothing_limited() -> None:
    budget = Budget.of(plan_of(FULL, 3), [], 300.0, 0.1)
    assert budget.allowed_ms(0) is None and budget.worth(1e9)


def test_what_is_expected_to_take_longer_is_not_worth_it() -> None:
    budget = Budget.of(plan_of(FULL, 4), [PrefillCost(1 << 20, 1.0)], 300.0, 0.1)
    assert budget.whole_ms == 1_024.0 and budget.worth(1_324.0) and not budget.worth(1_325.0)
