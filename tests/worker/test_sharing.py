"""Prefixes shared between requests that meet on one worker: at once, at any boundary, and when the first gives up."""

from __future__ import annotations

import asyncio

import pytest

from libs.continuation.chain import chunks_after
from libs.controller.catalog_facts import Chunk, Node
from libs.controller.protocol import AssignmentId, ResultStatus, Tier
from libs.controller.worker_table import Phase
from services.worker.pages.admission import Wanted
from services.worker.pages.eviction import EvictionReason
from services.worker.pages.pool import PagePool
from services.worker.pages.route import Continuation
from services.worker.pages.sizing import GroupSpec, PageSizes
from tests.worker.pool_device import key
from tests.worker.rig import routing, running, until

DOCUMENT = tuple(range(1_000))
COSTS = {"echo_prefill_ms": 0.1, "step_tokens": 64, "lanes": 4}


async def test_the_same_prompt_at_the_same_time_is_computed_once() -> None:
    async with running(**COSTS) as worker, routing(worker) as router:
        exchanges = [await router.offer((*DOCUMENT, 5 + i), 3, name=f"r{i}") for i in range(3)]
        results = await asyncio.gather(*(exchange.finish() for exchange in exchanges))
        assert [result.usage.computed_tokens for result in results] == [1_001, 233, 233]
        assert [result.usage.cached_tokens for result in results] == [0, 768, 768]
        assert [exchange.tokens for exchange in exchanges] == [[0, 1, 2]] * 3
        await worker.rest()


async def test_an_inflight_prefix_can_be_offered_and_counts() -> None:
    async with running(**COSTS) as worker, routing(worker) as router:
        first = await router.offer(DOCUMENT, 3, name="r1")
        assert (await first.accepted()).accepted
        second = await router.offer((*DOCUMENT, 7), 3, name="r2", tier=Tier.INFLIGHT, cached=768)
        assert (await second.accepted()).accepted
        assert (await second.finish()).usage.cached_tokens == 768
        await first.finish()
        await worker.rest()


async def test_whoever_waits_for_a_prefix_that_is_given_up_computes_the_rest() -> None:
    async with running(**{**COSTS, "echo_prefill_ms": 0.5}) as worker, routing(worker) as router:
        first = await router.offer(DOCUMENT, 3, name="r1")
        second = await router.offer((*DOCUMENT, 7), 3, name="r2")
        await second.accepted()
        machine = worker.worker.interpreter.machine
        await until(lambda: machine.phase(first.offer.assignment) is Phase.PREFILLING)
        await asyncio.sleep(0)
        first.cancel()
        assert (await first.finish()).status is ResultStatus.CANCELLED
        result = await second.finish()
        assert result.status is ResultStatus.COMPLETED
        assert result.usage.cached_tokens + result.usage.computed_tokens == 1_001
        await worker.rest()


async def test_giving_up_while_waiting_for_a_prefix_leaves_nothing() -> None:
    async with running(**{**COSTS, "echo_prefill_ms": 0.5}) as worker, routing(worker) as router:
        first = await router.offer(DOCUMENT, 3, name="r1")
        second = await router.offer((*DOCUMENT, 7), 3, name="r2")
        await second.accepted()
        assert worker.worker.interpreter.machine.phase(second.offer.assignment) is Phase.QUEUED
        second.cancel()
        assert (await second.finish()).status is ResultStatus.CANCELLED
        assert (await first.finish()).status is ResultStatus.COMPLETED
        await worker.rest()


# --- the pool alone ---


def computed(pool: PagePool, number: int, tokens: tuple[int, ...], root: str = "11" * 32, budget: int = 1) -> int:
    """Runs an assignment to its end; returns how many tokens it began with."""
    made = pool.reserve(key(number), Wanted(Continuation("ff", root, ""), tokens, budget), float(number))
    pages = pool.job_pages(key(number))
    pages.begin()
    pages.prepare(len(tokens))
    pages.computed(len(tokens))
    for what in (*pool.progress(key(number)), *pool.release(key(number), float(number))):
        pool.settled(what, durable=True)
    return made.resident


def pool_of(*windows: int, pages: int = 400) -> PagePool:
    return PagePool([GroupSpec(f"w{window}", window, pages) for window in windows], PageSizes(16, 256, 2_048))


@pytest.mark.parametrize("windows", [(0,), (0, 512), (0, 100)])
@pytest.mark.parametrize("length", [255, 256, 257, 300, 512, 700, 1_024, 1_279])
def test_every_boundary_that_is_held_is_found(windows: tuple[int, ...], length: int) -> None:
    pool = pool_of(*windows)
    computed(pool, 1, DOCUMENT[:length] if length < 1_000 else tuple(range(length)))
    tokens = tuple(range(length))
    # The exact end, and a tail's length below it.
    assert pool.lookup(Continuation("ff", "11" * 32, ""), (*tokens, 1), length) == length
    last_tail = length // 16 * 16
    assert pool.lookup(Continuation("ff", "11" * 32, ""), (*tokens[:last_tail], 9, 9), length) == last_tail
    # The last chunk boundary always; earlier ones where the windows still reach.
    chunk = length // 256 * 256
    if chunk and chunk != last_tail:
        assert pool.lookup(Continuation("ff", "11" * 32, ""), (*tokens[: chunk + 3], 9), length) == chunk
    # Another tenant's root, another text: nothing.
    assert pool.lookup(Continuation("ff", "22" * 32, ""), tokens, length) == 0
    assert pool.lookup(Continuation("ff", "11" * 32, ""), tuple(reversed(tokens)), length) == 0


def test_a_hash_alone_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every chunk hashed alike, tokens still decide."""
    monkeypatch.setattr("services.worker.pages.pool.chunk_hashes", lambda root, tokens: ["ab"] * (len(tokens) // 256))
    pool = pool_of(0)
    computed(pool, 1, DOCUMENT[:512])
    assert computed(pool, 2, tuple(reversed(DOCUMENT))[:513]) == 0


def test_a_full_pool_evicts_the_longest_idle_first_and_says_why() -> None:
    pool = pool_of(0, pages=64)
    for number in range(1, 5):
        computed(pool, number, tuple(range(number * 1_000, number * 1_000 + 250)))
    assert pool.pages()["w0"].free == 0
    computed(pool, 9, (*range(1_000, 1_250), *range(12)))  # goes on with the oldest
    (evicted,) = [record for record in pool.evictions.recent if record.reason.value == "capacity"]
    assert (evicted.end, evicted.durable, evicted.pages) == (250, 240, 16)
    assert pool.lookup(Continuation("ff", "11" * 32, ""), tuple(range(2_000, 2_250)), 249) == 0
    assert pool.lookup(Continuation("ff", "11" * 32, ""), tuple(range(1_000, 1_250)), 249) > 0


def test_what_is_not_durable_stays_until_it_is_given_up() -> None:
    pool = pool_of(0, pages=32)
    wanted = Wanted(Continuation("ff", "11" * 32, ""), DOCUMENT[:400], 1)
    pool.reserve(AssignmentId("dirty", 1), wanted, 1.0)
    pages = pool.job_pages(AssignmentId("dirty", 1))
    pages.begin()
    pages.prepare(400)
    pages.computed(400)
    ranges = (*pool.progress(AssignmentId("dirty", 1)), *pool.release(AssignmentId("dirty", 1), 2.0))
    assert [(what.start, what.end, what.tail) for what in ranges] == [(0, 256, False), (256, 400, True)]
    other = Wanted(Continuation("ff", "22" * 32, ""), DOCUMENT[:400], 1)
    with pytest.raises(Exception, match="25 needed, 7 free, 0 evictable"):
        pool.reserve(AssignmentId("other", 1), other, 3.0)
    pool.settled(ranges[0], durable=True)
    pool.settled(ranges[1], durable=False)
    assert pool.pages()["w0"].evictable == 25
    assert pool.reserve(AssignmentId("other", 1), other, 4.0).resident == 0


def test_pages_behind_the_window_are_free_for_others_before_a_long_generation_ends() -> None:
    """Once the spares suffice for all that is left, what falls behind the window is not kept until the end."""
    pool = PagePool([GroupSpec("full", 0, 400), GroupSpec("w32", 32, 100)], PageSizes(16, 256, 64))
    tokens = DOCUMENT[:100]
    pool.reserve(key(1), Wanted(Continuation("ff", "11" * 32, ""), tokens, 4_000), 1.0)
    pages = pool.job_pages(key(1))
    pages.begin()
    end = known = len(tokens)
    seen = []
    while end < 4_099:
        end = min(end + 64, 4_099)
        pages.prepare(end)
        pages.computed(end)
        for what in pool.progress(key(1), (7,) * (end + 1 - known)):
            pool.settled(what, durable=True)
        known = end + 1
        pool.check_integrity()
        seen.append(pool.pages()["w32"].free)
    assert max(seen[:-16]) == seen[0], "spares are kept while there is more to come than spares"
    assert seen[-1] > seen[0] + 10, "most of the spares are free before the release"
    assert pool.evictions.pages[EvictionReason.WINDOW] > 0
    pool.release(key(1), 2.0)


def test_what_a_restore_brought_is_not_written_again_by_who_then_adopts_more() -> None:
    pool, of = PagePool([GroupSpec("full", 0, 400)], PageSizes(16, 256, 2_048)), Continuation("ff", "11" * 32, "")
    nodes = tuple(
        Node(Chunk(node.hash, node.parent, node.start, node.end)) for node in chunks_after(of.root, DOCUMENT[:512])
    )
    pool.reserve(key(1), Wanted(of, DOCUMENT, 1), 1.0)
    pages = pool.job_pages(key(1))
    pages.begin()
    assert pool.reserve(key(2), Wanted(of, DOCUMENT, 1, chain=nodes), 2.0).restore == nodes
    for fill in pool.plan_restore(key(2), nodes):
        assert pool.landed(key(2), fill)
    assert pool.restored(key(2), 512) == 512
    # The device is one iteration ahead of the news: nothing of this is offered yet.
    pages.prepare(800)
    pages.computed(800)
    assert pool.begin(key(2)).start == 768
    assert [(found.start, found.end) for found in pool.progress(key(2))] == [(512, 768)]
    pool.check_integrity()
