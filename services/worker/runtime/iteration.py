"""The iteration policy: which lanes get how many tokens next. Pure; the device loop obeys.

A lane either decodes (one token pending) or reads its prompt (more than one pending). Rules, in order:

1. free lanes are refilled from the queue, the lowest lane from the front; lanes never move or swap;
2. every decoding lane gets one token;
3. prompts share what is left of the token budget, in order of admission. A multi-lane budget exceeds the number of
   lanes, so a waiting prompt always gets at least one token per iteration beside any number of decoding lanes: prompts
   cannot starve, and no decode is ever skipped;
4. with a single lane, rule 1 alone means that the active decode finishes before a prompt is admitted: nothing
   interleaves.

Orca (Yu et al., OSDI 2022) for iteration-level scheduling, Sarathi-Serve (Agrawal et al., OSDI 2024) for chunked
prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budgets:
    """`lanes` >= 1; `tokens`: rows per iteration, more than `lanes` where there are several. Raises ValueError."""

    lanes: int
    tokens: int

    def __post_init__(self) -> None:
        least = 1 if self.lanes == 1 else self.lanes + 1
        if self.lanes < 1 or self.tokens < least:
            raise ValueError(
                f"{self.lanes} lanes need a budget of at least {least} tokens per iteration: {self.tokens}"
            )


@dataclass(frozen=True, slots=True)
class LaneView:
    """An occupied lane: tokens it has still to feed before its next one can be drawn, and its place in admission
    order.
    """

    lane: int
    pending: int
    admitted: int


@dataclass(frozen=True, slots=True)
class Batch:
    """`refills`: lanes for the first entries of the queue, in order. `prompts`: (lane, tokens), tokens >= 1."""

    refills: tuple[int, ...]
    decodes: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]


def plan(lanes: Sequence[LaneView], queue: Sequence[int], budgets: Budgets) -> Batch:
    """The next batch. `queue`: pending tokens of the waiting jobs, front first. Empty only when there is nothing to
    do.
    """
    taken = {view.lane for view in lanes}
    free = [lane for lane in range(budgets.lanes) if lane not in taken]
    refills = tuple(free[: len(queue)])
    newest = max((view.admitted for view in lanes), default=-1)
    views = [*lanes, *(LaneView(lane, queue[i], newest + 1 + i) for i, lane in enumerate(refills))]
    decodes = tuple(sorted(view.lane for view in views if view.pending == 1))
    left = budgets.tokens - len(decodes)
    prompts: list[tuple[int, int]] = []
    for view in sorted((view for view in views if view.pending > 1), key=lambda view: view.admitted):
        if left == 0:
            break
        share = min(view.pending, left)
        prompts.append((view.lane, share))
        left -= share
    return Batch(refills, decodes, tuple(prompts))
