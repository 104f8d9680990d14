"""How long a restore may take before computing is the better way. Pure.

A restore that fails must not have cost much: whatever it ends with, waiting for it and then computing what it did not
bring may exceed computing everything by at most a *loss*, the larger of a constant and a share of computing everything.
What has landed and can be continued from pays for the time it took; so the time allowed is the loss plus what computing
that part would have cost. A boundary inside the plan can be continued from where its windowed groups reach back far
enough; in a chain that ends in windows that is only its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.continuation.chain import CHUNK_TOKENS
from libs.continuation.layout import Layout
from libs.controller.protocol import PrefillCost
from services.worker.handlers import RestorePlan


def compute_ms(prefill: Sequence[PrefillCost], start: int, end: int) -> float:
    """Computing positions [start, end), chunk by chunk at the cost of its context; 0 where nothing is measured."""
    total = 0.0
    at = start
    while prefill and at < end:
        step = min(end, (at // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        cost = next((cost for cost in prefill if step <= cost.up_to_tokens), prefill[-1])
        total += (step - at) * cost.ms_per_token
        at = step
    return total


def usable_ends(plan: RestorePlan, layout: Layout) -> frozenset[int]:
    """Ends of the plan's nodes from which a continuation can begin once everything before has landed."""
    start = plan.nodes[0].node.chunk.start if plan.nodes else plan.boundary
    loaded: dict[str, int] = {}
    for node in plan.nodes:
        for fill in node.fills:
            loaded[fill.group] = min(loaded.get(fill.group, fill.start), fill.start)
    windows = [(group.window, loaded.get(group.name, plan.boundary)) for group in layout.groups if group.window]
    return frozenset(
        end
        for end in (node.node.chunk.end for node in plan.nodes)
        if all(first <= max(start, end - window) for window, first in windows)
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one plan. `whole_ms` 0: nothing is measured, nothing is limited."""

    prefill: tuple[PrefillCost, ...]
    start: int
    whole_ms: float
    loss_ms: float

    @staticmethod
    def of(plan: RestorePlan, prefill: Sequence[PrefillCost], loss_ms: float, loss_share: float) -> Budget:
        start = plan.nodes[0].node.chunk.start if plan.nodes else plan.boundary
        whole = compute_ms(prefill, start, plan.boundary)
        return Budget(tuple(prefill), start, whole, max(loss_ms, loss_share * whole))

    def allowed_ms(self, usable: int) -> float | None:
        """From the beginning until the restore must have got further than `usable`; None: as long as it takes."""
        return self.loss_ms + compute_ms(self.prefill, self.start, usable) if self.whole_ms else None

    def worth(self, expected_ms: float) -> bool:
        """Whether restoring is expected to end within what computing would take, give or take the loss."""
        return not self.whole_ms or expected_ms <= self.whole_ms + self.loss_ms
