"""Runs restore plans: fetch ahead, upload in order, land node by node.

Per plan, a feeder asks the provider for the objects in chain order, as far ahead as the byte budget allows, while the
plan's loop uploads what has come. A node lands when all its objects are on the device. Everything that goes wrong with
storage ends the plan at the boundary reached. A cancelled or closed restore still waits for its upload: nothing may
write to a page once `restore` has returned.

A plan that takes so long that computing would have been the better way (`budget`) ends like one whose sources failed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from libs.chunks.tier import TierKind
from libs.continuation.errors import IdentityError
from libs.continuation.layout import Layout
from libs.controller.protocol import PrefillCost, Tier
from libs.service import telemetry
from services.worker.handlers import LandedNode, RestoreEnd, RestoreOutcome, RestorePlan
from services.worker.restore.budget import Budget, usable_ends
from services.worker.restore.needs import ObjectNeed, needs_of
from services.worker.restore.provider import ContentProvider, Ticket
from services.worker.restore.settings import RestoreCounts, RestoreSettings
from services.worker.restore.sources import Localized, NotLocalized
from services.worker.restore.upload import Uploader
from services.worker.restore.whole import WholeRestores

TIERS = {
    TierKind.RAM: Tier.RAM,
    TierKind.SSD: Tier.SSD,
    TierKind.PEER: Tier.PEER,
    TierKind.OBJECT: Tier.OBJECT,
}


class ChunkRestorer:
    """Implements `Restorer`. `used`: told the fingerprint and hash of each chunk that landed; `whole`: what restores
    took.
    """

    def __init__(
        self,
        layout: Layout,
        provider: ContentProvider,
        uploader: Uploader,
        settings: RestoreSettings,
        counts: RestoreCounts,
        prefill: Callable[[], Sequence[PrefillCost]],
        used: Callable[[str, str], None],
        whole: WholeRestores,
    ) -> None:
        self._whole = whole
        self._layout, self._provider, self._uploader, self._counts = layout, provider, uploader, counts
        self._settings, self._prefill, self._used = settings, prefill, used
        self._closing = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def restore(
        self, plan: RestorePlan, landed: Callable[[LandedNode], None], stop: asyncio.Event
    ) -> RestoreOutcome:
        """See `Restorer.restore`."""
        start = plan.nodes[0].node.chunk.start if plan.nodes else plan.boundary
        self._counts.active += 1
        self._idle.clear()
        # Below the caller's span: a restore that ends early is tried again for a shorter boundary.
        span = telemetry.begin("worker.restore.attempt", {"segue.nodes": len(plan.nodes)})
        error: BaseException | None = None
        try:
            outcome = await self._run(plan, start, landed, stop)
            span.set_attributes({"segue.restore.end": outcome.end.value, "segue.boundary": outcome.boundary})
        except BaseException as caught:
            error = caught
            raise
        finally:
            telemetry.finish(span, error)
            self._counts.active -= 1
            if not self._counts.active:
                self._idle.set()
        if outcome.end is RestoreEnd.DONE:
            self._counts.done += 1
        else:
            self._counts.shorter += 1
        return outcome

    async def _run(
        self, plan: RestorePlan, boundary: int, landed: Callable[[LandedNode], None], stop: asyncio.Event
    ) -> RestoreOutcome:
        began, brought = time.monotonic(), Counter[Tier]()
        budget = Budget.of(plan, self._prefill(), self._settings.loss_ms, self._settings.loss_share)
        late = _Late(budget, plan, usable_ends(plan, self._layout))
        async with _Ahead(self._provider, plan, self._layout, (stop, self._closing, late.event)) as ahead:
            with late:
                if budget.whole_ms and not budget.worth(plan.spent_ms + ahead.expected_ms()):
                    self._counts.not_begun += 1
                    return RestoreOutcome(RestoreEnd.UNAVAILABLE, boundary, "computing is expected to be quicker")
                for index, node in enumerate(plan.nodes):
                    if stop.is_set() or self._closing.is_set():
                        return RestoreOutcome(RestoreEnd.STOPPED, boundary)
                    objects = await ahead.node(index)
                    if isinstance(objects, NotLocalized):
                        if objects.end is RestoreEnd.STOPPED and late.event.is_set() and not stop.is_set():
                            self._counts.too_slow += 1
                            return RestoreOutcome(RestoreEnd.UNAVAILABLE, boundary, "computing is quicker by now")
                        return RestoreOutcome(objects.end, boundary, objects.detail)
                    if not await self._upload(objects, ahead.needs[index]):
                        return RestoreOutcome(RestoreEnd.STOPPED, boundary)
                    boundary = node.node.chunk.end
                    found = self._landed(plan, boundary, objects)
                    brought[found.tier] += found.bytes
                    landed(found)
                    late.landed(boundary)
                    self._used(plan.fingerprint, node.node.chunk.hash)
                    ahead.done(index)
        self._whole.observe(brought, (time.monotonic() - began) * 1e3)
        return RestoreOutcome(RestoreEnd.DONE, boundary)

    async def _upload(self, objects: Sequence[Localized], needs: Sequence[ObjectNeed]) -> bool:
        items = [
            (found.opened.view, need.group, need.metadata.start, need.fill)
            for found, need in zip(objects, needs, strict=True)
        ]
        abort = threading.Event()
        upload = self._uploader.start(items, abort)
        try:
            return await asyncio.shield(upload)
        except asyncio.CancelledError:
            abort.set()
            while not upload.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([upload])
            raise

    def _landed(self, plan: RestorePlan, end: int, objects: Sequence[Localized]) -> LandedNode:
        size = 0
        for found in objects:
            moved = found.opened.view.data.nbytes
            size += moved
            match found.kind:
                case TierKind.RAM:
                    self._counts.bytes_ram += moved
                case TierKind.SSD:
                    self._counts.bytes_ssd += moved
                case TierKind.PEER:
                    self._counts.bytes_peer += moved
                case TierKind.OBJECT:
                    self._counts.bytes_object += moved
        self._counts.nodes += 1
        # A node of objects from several tiers was as slow as the slowest.
        tier = max((TIERS[found.kind] for found in objects), default=Tier.UNSPECIFIED)
        return LandedNode(plan.assignment, end, tier, size)

    async def aclose(self) -> None:
        """See `Restorer.aclose`."""
        self._closing.set()
        await self._idle.wait()
        await self._provider.aclose()
        await asyncio.get_running_loop().run_in_executor(None, self._uploader.close)


class _Late:
    """Sets `event` when the plan has taken longer than its budget allows."""

    def __init__(self, budget: Budget, plan: RestorePlan, usable: frozenset[int]) -> None:
        self._budget, self._usable = budget, usable
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time() - plan.spent_ms / 1e3
        self._timer: asyncio.TimerHandle | None = None
        self.event = asyncio.Event()

    def __enter__(self) -> None:
        self.landed(self._budget.start, usable=True)

    def landed(self, end: int, *, usable: bool = False) -> None:
        """A node has landed that ends there: if it can be continued from, it has paid for its time."""
        if not usable and end not in self._usable:
            return
        allowed = self._budget.allowed_ms(end)
        if self._timer is not None:
            self._timer.cancel()
        if allowed is not None:
            self._timer = self._loop.call_at(self._began + allowed / 1e3, self.event.set)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Ahead:
    """The objects of one plan, asked for in order and ahead of their use; leaving it releases every one."""

    def __init__(
        self, provider: ContentProvider, plan: RestorePlan, layout: Layout, stops: Sequence[asyncio.Event]
    ) -> None:
        self._provider, self._plan, self._layout, self._stops = provider, plan, layout, stops
        self.needs: list[tuple[ObjectNeed, ...]] = []
        self._nothing = ""
        self._tickets: list[list[Ticket]] = [[] for _ in plan.nodes]
        self._admitted = [asyncio.Event() for _ in plan.nodes]

    async def __aenter__(self) -> Self:
        self._feeder = asyncio.create_task(self._feed(), name="restore feeder")
        self._stopped = [asyncio.create_task(stop.wait(), name="restore stop") for stop in self._stops]
        return self

    async def _feed(self) -> None:
        directory = self._provider.sources.tiers.directory
        for index, node in enumerate(self._plan.nodes):
            try:
                needs = needs_of(self._plan, node, self._layout, directory)
            except IdentityError as error:
                self._nothing = f"a fact names nothing: {error}"
                self._admitted[index].set()
                return
            self.needs.append(needs)
            self._tickets[index] = await self._provider.admit(needs)
            self._admitted[index].set()
            await asyncio.sleep(0)  # a long chain must not hold up the event loop

    def expected_ms(self) -> float:
        """What bringing the plan's objects should take, as far as prices are known."""
        directory = self._provider.sources.tiers.directory
        with suppress(IdentityError):
            needs = [need for node in self._plan.nodes for need in needs_of(self._plan, node, self._layout, directory)]
            return self._provider.sources.expected_ms(needs)
        return 0.0

    async def node(self, index: int) -> Sequence[Localized] | NotLocalized:
        """Every object of a node in place, or why not; a stop ends the wait."""
        found: list[Localized] = []
        if not await self._unless_stopped(self._admitted[index].wait()):
            return NotLocalized(RestoreEnd.STOPPED, "")
        if index >= len(self.needs):
            return NotLocalized(RestoreEnd.GONE, self._nothing)
        for ticket in self._tickets[index]:
            result = await self._unless_stopped(ticket.localized())
            if result is None:
                return NotLocalized(RestoreEnd.STOPPED, "")
            if isinstance(result, NotLocalized):
                return result
            assert isinstance(result, Localized)
            found.append(result)
        return found

    async def _unless_stopped(self, work: Awaitable[object]) -> object | None:
        task = asyncio.ensure_future(work)
        waited = {task, *self._stopped} | (set() if self._feeder.done() else {self._feeder})
        try:
            while not task.done():
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not done.isdisjoint(self._stopped) and not task.done():
                    return None
                if self._feeder in done:
                    waited.discard(self._feeder)
                    self._feeder.result()
            return task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def done(self, index: int) -> None:
        """The node is on the device: its bytes may go."""
        for ticket in self._tickets[index]:
            ticket.release()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        helpers = [self._feeder, *self._stopped]
        for helper in helpers:
            helper.cancel()
        try:
            await asyncio.gather(*helpers, return_exceptions=True)
        finally:
            for index in range(len(self._tickets)):
                self.done(index)
