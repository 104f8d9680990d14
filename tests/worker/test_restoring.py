"""Restores through the whole endpoint, with a restorer that does what the test says: what counts, what falls back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from libs.continuation.chain import plan, root
from libs.controller.catalog_facts import Chunk, Node
from libs.controller.protocol import DeclineReason, ResultStatus, Tier, TierTokens
from libs.controller.worker_table import Phase
from libs.tunnel import CloseReason
from services.worker.handlers import LandedNode, RestoreEnd, RestoreOutcome, RestorePlan
from services.worker.pages.pool import PagePool
from services.worker.unstored import NoCheckpointer, NoChunks, NoMemory, NoTiers
from tests.worker.rig import SALT, Running, routing, running, until

PROMPT = tuple(range(1_500))


@dataclass
class Scripted:
    """Lands as many nodes as each call's entry says, then ends as it says; None = all of them. May wait before each
    node.
    """

    script: list[tuple[int | None, RestoreEnd]]
    gate: asyncio.Event | None = None
    plans: list[RestorePlan] = field(default_factory=list)
    error: Exception | None = None

    async def restore(
        self, plan: RestorePlan, landed: Callable[[LandedNode], None], stop: asyncio.Event
    ) -> RestoreOutcome:
        self.plans.append(plan)
        count, end = self.script.pop(0)
        boundary = plan.nodes[0].node.chunk.start
        for node in plan.nodes[: count if count is not None else len(plan.nodes)]:
            if stop.is_set():
                return RestoreOutcome(RestoreEnd.STOPPED, boundary)
            if self.gate is not None and len(self.plans) == 1 and node is not plan.nodes[0]:
                await self.gate.wait()
            boundary = node.node.chunk.end
            landed(LandedNode(plan.assignment, boundary, Tier.SSD, 1_000))
        if self.error is not None:
            raise self.error
        return RestoreOutcome(RestoreEnd.STOPPED if stop.is_set() else end, boundary)

    async def aclose(self) -> None:
        if self.gate is not None:
            self.gate.set()


@dataclass
class ByteHandlers:
    restorer: Scripted
    checkpointer: NoCheckpointer
    local: NoChunks = field(default_factory=NoChunks)
    memory: NoMemory = field(default_factory=NoMemory)
    measurements: NoTiers = field(default_factory=NoTiers)

    async def aclose(self) -> None:
        await self.restorer.aclose()


def scripted(restorer: Scripted) -> Callable[[PagePool], ByteHandlers]:
    return lambda pool: ByteHandlers(restorer, NoCheckpointer(pool))


def chain(worker: Running, tokens: tuple[int, ...] = PROMPT, end: int = 1_488, start: int = 0) -> tuple[Node, ...]:
    found = plan(root(worker.model.fingerprint, SALT), tokens[:end])
    return tuple(
        Node(Chunk(node.hash, node.parent, node.start, node.end, tail=node.is_tail))
        for node in found.nodes
        if node.start >= start
    )


async def test_a_whole_restore_counts_by_tier() -> None:
    restorer = Scripted([(None, RestoreEnd.DONE)])
    async with running(scripted(restorer)) as worker, routing(worker) as router:
        exchange = await router.offer(PROMPT, 3, tier=Tier.SSD, cached=1_488, chain=chain(worker))
        usage = (await exchange.finish()).usage
        assert (usage.cached_tokens, usage.restored_tokens, usage.computed_tokens) == (1_488, 1_488, 12)
        assert usage.restored_by_tier == (TierTokens(Tier.SSD, 1_488, 6_000),)
        full, windowed = (
            [part for node in restorer.plans[0].nodes for part in node.fills if part.group == name]
            for name in worker.worker.engine.pool.pages()
        )
        assert sum(len(part.pages) for part in full) == 93
        # Of the windowed group only the objects that hold the window, [976, 1488).
        assert windowed[0].start == 768
        assert sum(len(part.pages) for part in windowed) == 45
        await worker.rest()


async def test_a_restore_that_ends_early_is_planned_again_for_the_boundary_it_reached() -> None:
    restorer = Scripted([(3, RestoreEnd.GONE), (None, RestoreEnd.DONE)])
    async with running(scripted(restorer)) as worker, routing(worker) as router:
        exchange = await router.offer(PROMPT, 3, tier=Tier.OBJECT, cached=1_488, chain=chain(worker))
        usage = (await exchange.finish()).usage
        assert usage.cached_tokens == usage.restored_tokens == 768
        assert usage.computed_tokens == 732
        assert [node.node.chunk.end for node in restorer.plans[1].nodes] == [256, 512, 768]
        again = {part.group for node in restorer.plans[1].nodes for part in node.fills}
        assert len(again) == 1, "what has landed is not loaded again"
        await worker.rest()


@pytest.mark.parametrize("error", [None, RuntimeError("a broken restorer")])
async def test_a_restore_that_brings_nothing_costs_time_and_never_the_request(error: Exception | None) -> None:
    restorer = Scripted([(0, RestoreEnd.UNAVAILABLE)] * 6, error=error)
    async with running(scripted(restorer)) as worker, routing(worker) as router:
        exchange = await router.offer(PROMPT, 3, tier=Tier.OBJECT, cached=1_488, chain=chain(worker))
        result = await exchange.finish()
        assert result.status is ResultStatus.COMPLETED
        assert (result.usage.cached_tokens, result.usage.computed_tokens) == (0, 1_500)
        await worker.rest()


async def test_a_restore_begins_behind_what_is_resident() -> None:
    restorer = Scripted([(None, RestoreEnd.DONE)])
    async with running(scripted(restorer)) as worker, routing(worker) as router:
        await (await router.offer(PROMPT[:700], 3, name="r1")).finish()
        exchange = await router.offer(PROMPT, 3, name="r2", tier=Tier.SSD, cached=1_488, chain=chain(worker, start=512))
        usage = (await exchange.finish()).usage
        assert restorer.plans[0].nodes[0].node.chunk.start == 512
        assert (usage.cached_tokens, usage.restored_tokens) == (1_488, 976)
        await worker.rest()


async def test_a_chain_that_connects_to_nothing_here_is_declined() -> None:
    restorer = Scripted([])
    async with running(scripted(restorer)) as worker, routing(worker) as router:
        exchange = await router.offer(PROMPT, 3, tier=Tier.SSD, cached=1_488, chain=chain(worker, start=512))
        assert (await exchange.accepted()).reason is DeclineReason.PREFIX_GONE


async def test_a_chain_of_other_tokens_is_computed_instead() -> None:
    """Facts that name something else than the prompt (a damaged catalog, a confused router) are never loaded."""
    restorer = Scripted([])
    async with running(scripted(restorer)) as worker, routing(worker) as router:
        wrong = chain(worker, tuple(reversed(PROMPT)))
        exchange = await router.offer(PROMPT, 3, tier=Tier.SSD, cached=1_488, chain=wrong)
        assert (await exchange.finish()).usage.computed_tokens == 1_500
        assert not restorer.plans


@pytest.mark.parametrize("how", ["cancel", "tunnel"])
async def test_giving_up_in_a_restore_waits_for_its_boundary_and_keeps_what_landed(how: str) -> None:
    restorer = Scripted([(None, RestoreEnd.DONE)], gate=asyncio.Event())
    async with running(scripted(restorer)) as worker:
        async with routing(worker) as router:
            exchange = await router.offer(PROMPT[:600], 3, tier=Tier.SSD, cached=592, chain=chain(worker, end=592))
            assert (await exchange.accepted()).accepted
            await until(lambda: bool(restorer.plans))
            if how == "cancel":
                exchange.cancel()
                assert (await exchange.finish()).status is ResultStatus.CANCELLED
            else:
                router.tunnel.close(CloseReason.RETIRED)
                machine = worker.worker.interpreter.machine
                await until(lambda: machine.phase(exchange.offer.assignment) is Phase.FENCED)
            # Fenced, but the node under way still writes to its pages.
            pages = worker.worker.engine.pool.pages()
            assert all(found.reserved + found.loading > 0 for found in pages.values())
            assert restorer.gate is not None
            restorer.gate.set()
            await worker.rest()
        # Two nodes had landed, both within every window: that much is resident.
        fingerprint = worker.model.fingerprint
        residents = worker.worker.engine.pool.changes(None).came
        assert {end for end, _ in residents.values()} >= {256, 512}
        assert all(name == fingerprint for _, name in residents.values())
