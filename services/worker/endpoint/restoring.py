"""Restores under way: one task each, off the device loop; a restore that fails costs time, never the request.

A restore that ends early has brought [.., boundary) of the full-attention groups, but windowed groups only near the end
it was planned for. So it is planned again for the boundary it reached, which loads no more than that boundary's
windows, until one plan succeeds or nothing is left; then the rest is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from libs.continuation.tenancy import owner
from libs.controller.catalog_facts import Node
from libs.controller.protocol import AssignmentId, Offer, Tier, TierTokens
from libs.controller.worker_events import Quiesced, RestoreDone, RestoreFailed, WorkerEvent
from libs.service import telemetry
from libs.service.logs import get_logger
from services.worker.handlers import LandedNode, NodeFill, RestoreEnd, RestoreOutcome, RestorePlan, Restorer
from services.worker.pages.pool import PagePool

log = get_logger(__name__)


@dataclass(slots=True)
class _Restore:
    stop: asyncio.Event
    compute: int
    """Tokens behind the chain."""
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    tiers: dict[int, Tier] = field(default_factory=dict)
    """By end of a landed node."""
    bytes: Counter[Tier] = field(default_factory=Counter)


class Restoring:
    """Plans come from the pool's reservation; news go to the machine through `feed`."""

    def __init__(self, pool: PagePool, restorer: Restorer, feed: Callable[[WorkerEvent], None]) -> None:
        self._pool, self._restorer, self._feed = pool, restorer, feed
        self._nodes: dict[AssignmentId, tuple[Node, ...]] = {}
        self._running: dict[AssignmentId, _Restore] = {}
        self.ends: Counter[RestoreEnd] = Counter()
        self.late = 0

    def reserved(self, assignment: AssignmentId, nodes: tuple[Node, ...]) -> None:
        """What the reservation found worth restoring."""
        if nodes:
            self._nodes[assignment] = nodes

    def start(self, offer: Offer, resident: int) -> None:
        """Begins; ends in RestoreDone or RestoreFailed, or in Quiesced after a stop."""
        restore = _Restore(asyncio.Event(), len(offer.request.tokens) - offer.chain[-1].chunk.end)
        self._running[offer.assignment] = restore
        name = f"restore-{offer.assignment.request_id}"
        restore.task = asyncio.get_running_loop().create_task(self._run(offer, resident, restore), name=name)

    def stop(self, assignment: AssignmentId) -> bool:
        """Ends the restore at its next boundary; False where none is running."""
        restore = self._running.get(assignment)
        if restore is None:
            return False
        restore.stop.set()
        return True

    @property
    def running(self) -> Collection[AssignmentId]:
        """Assignments that are being restored."""
        return self._running.keys()

    @property
    def tokens(self) -> list[int]:
        """What each of them will have to compute when its chain is there."""
        return [restore.compute for restore in self._running.values()]

    def forget(self, assignment: AssignmentId) -> None:
        """The reservation is gone."""
        self._nodes.pop(assignment, None)

    async def aclose(self) -> None:
        """Stops all and waits: a page under an upload must not be given away. The restorer bounds each node."""
        restores = list(self._running.values())
        for restore in restores:
            restore.stop.set()
        if tasks := [restore.task for restore in restores if restore.task is not None]:
            await asyncio.wait(tasks)

    async def _run(self, offer: Offer, resident: int, restore: _Restore) -> None:
        assignment, nodes = offer.assignment, self._nodes.pop(offer.assignment, ())
        trace = offer.request.trace
        parent = telemetry.extract(trace.traceparent, trace.tracestate)
        cached, outcome = resident, RestoreOutcome(RestoreEnd.GONE, resident, "the chain does not connect")
        try:
            with telemetry.span("worker.restore", parent=parent) as span:
                if nodes:
                    outcome = await self._bring(offer, nodes, restore)
                    cached = self._pool.restored(assignment, outcome.boundary)
                span.set_attribute("segue.restored_tokens", cached - resident)
        except Exception as error:
            # A bug of ours in the books of this one assignment: it still must end, and can still be computed.
            log.error("a restore broke", request=assignment.request_id, exc_info=error)
            outcome = RestoreOutcome(RestoreEnd.UNAVAILABLE, resident, str(error))
        restored = self._brought(restore, resident, cached)
        del self._running[assignment]
        if restore.stop.is_set():
            self._feed(Quiesced(assignment))
        elif cached > resident and cached >= offer.chain[-1].chunk.end:
            self._feed(RestoreDone(assignment, cached, restored))
        else:
            self._feed(RestoreFailed(assignment, cached, restored, f"{outcome.end.value}: {outcome.detail}"))

    async def _bring(self, offer: Offer, nodes: tuple[Node, ...], restore: _Restore) -> RestoreOutcome:
        """Plans and runs for ever shorter boundaries, until one is reached; `nodes` is not empty."""
        while True:
            outcome = await self._attempt(offer, nodes, restore)
            self.ends[outcome.end] += 1
            # Strictly fewer each time, so that this ends.
            nodes = tuple(node for node in nodes[:-1] if node.chunk.end <= outcome.boundary)
            if outcome.end in (RestoreEnd.DONE, RestoreEnd.STOPPED) or not nodes:
                return outcome

    async def _attempt(self, offer: Offer, nodes: tuple[Node, ...], restore: _Restore) -> RestoreOutcome:
        fills = self._pool.plan_restore(offer.assignment, nodes)
        by_end = {fill.node.chunk.end: fill for fill in fills}
        plan = RestorePlan(
            offer.assignment,
            offer.fingerprint,
            owner(offer.request.tenant_salt),
            nodes[-1].chunk.end,
            fills,
            (time.monotonic() - restore.began) * 1e3,
        )

        def landed(node: LandedNode) -> None:
            self._landed(by_end[node.end], node, restore)

        try:
            return await self._restorer.restore(plan, landed, restore.stop)
        except Exception as error:
            log.error("a restore broke", request=offer.assignment.request_id, exc_info=error)
            return RestoreOutcome(RestoreEnd.UNAVAILABLE, nodes[0].chunk.start, str(error))

    def _landed(self, fill: NodeFill, node: LandedNode, restore: _Restore) -> None:
        if not self._pool.landed(node.assignment, fill):
            self.late += 1
            return
        restore.tiers.setdefault(node.end, node.tier)
        restore.bytes[node.tier] += node.bytes

    def _brought(self, restore: _Restore, resident: int, cached: int) -> tuple[TierTokens, ...]:
        """Tokens that count, by the tier their node came from."""
        tokens: Counter[Tier] = Counter()
        start = resident
        for end in sorted(restore.tiers):
            if end <= cached:
                tokens[restore.tiers[end]] += end - start
                start = end
        return tuple(TierTokens(tier, count, restore.bytes[tier]) for tier, count in sorted(tokens.items()))
