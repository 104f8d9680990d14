"""Chunk facts: asked once, for what is not known, within a budget; and what a restore's offer carries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from libs.continuation.chain import plan, root
from libs.controller.protocol import DeclineReason, ErrorDelivery, OfferReply, Resident, StatusCode, Tier, TierCost
from tests.router.fake_catalog import FINGERPRINT
from tests.router.fake_worker import Job
from tests.router.rig import Rig, eventually, request, running

OBJECTS = (TierCost(Tier.OBJECT, 1.0, 1_000_000.0), TierCost(Tier.GPU, 0.1, 1_000_000.0))
PROMPT = tuple(range(600))  # two chunks, a tail of 80, 7 left over, one pending


async def with_tiers(rig: Rig) -> None:
    from dataclasses import replace

    for worker in rig.workers:
        worker.beat = replace(worker.beat, tiers=OBJECTS)
        worker.say()
    views = rig.router.observatory.fleet.views
    await eventually(lambda: all(view.costs for view in views().values()), "tier costs")


async def ask(rig: Rig, tokens: Sequence[int] = PROMPT) -> Job:
    stream = await rig.ingress.submit(request(len(tokens), 2, tokens=tuple(tokens)))
    job = await rig.worker.next()
    job.run()
    await stream.completed(2)
    return job


async def test_what_is_durable_is_restored_by_the_nodes_of_the_offer() -> None:
    async with running(None) as rig:
        await with_tiers(rig)
        nodes = rig.catalog.publish(PROMPT[:-1])
        job = await ask(rig)
        candidate = job.offer.candidate
        assert (candidate.tier, candidate.cached_tokens, candidate.cached_bytes) == (Tier.OBJECT, 592, 3_000)
        assert [node.chunk.hash for node in job.offer.chain] == [node.chunk.hash for node in nodes]
        assert [receipt.key for node in job.offer.chain for receipt in node.chunk.receipts] == [
            node.chunk.hash for node in nodes
        ]
        assert candidate.prefix_hash == nodes[-1].chunk.hash
        # All is known now: the catalog is not asked again.
        await ask(rig)
        assert len(rig.catalog.lookups) == 1
        assert rig.metric("lookups_total", answer="in_time") == 1
        assert rig.metric("facts") == 3


async def test_a_conversation_that_goes_on_where_it_was_asks_nobody() -> None:
    async with running(None) as rig:
        chain = plan(root(FINGERPRINT, "00" * 32), PROMPT[:-1])
        rig.worker.resident = (Resident(chain.chunks[-1].hash, 512, Tier.GPU, FINGERPRINT),)
        rig.worker.say()
        await eventually(lambda: len(rig.router.observatory.fleet.index) == 1, "residency")
        assert (await ask(rig)).offer.candidate.tier is Tier.GPU
        assert rig.catalog.lookups == []
        assert rig.metric("lookups_total", answer="covered") == 1


async def test_where_the_pages_prove_gone_the_catalog_is_asked_and_another_place_found() -> None:
    async with running(None) as rig:
        nodes = rig.catalog.publish(PROMPT[:512])
        rig.worker.resident = (Resident(nodes[1].chunk.hash, 512, Tier.GPU, FINGERPRINT),)
        await with_tiers(rig)
        stream = await rig.ingress.submit(request(600, 2, tokens=PROMPT))
        job = await rig.worker.next()
        assert job.offer.candidate.tier is Tier.GPU and rig.catalog.lookups == []
        rig.worker.resident = ()
        job.decline(DeclineReason.PREFIX_GONE)
        job = await rig.worker.next()
        assert job.offer.candidate.tier is Tier.OBJECT and len(rig.catalog.lookups) == 1
        job.run()
        assert (await stream.completed(2)).served.attempts == 2, "the boundary that proved gone is not tried again"


async def test_a_decline_in_the_name_of_another_process_says_nothing_of_this_ones_pages() -> None:
    async with running(None) as rig:
        chain = plan(root(FINGERPRINT, "00" * 32), PROMPT[:-1])
        rig.worker.resident = (Resident(chain.chunks[-1].hash, 512, Tier.GPU, FINGERPRINT),)
        rig.worker.say()
        index = rig.router.observatory.fleet.index
        await eventually(lambda: len(index) == 1, "residency")
        stream = await rig.ingress.submit(request(600, 2, tokens=PROMPT))
        job = await rig.worker.next()
        assert job.offer.candidate.tier is Tier.GPU
        for epoch in (2, 1):
            job.send(OfferReply(job.offer.assignment, epoch, False, DeclineReason.PREFIX_GONE, "by script"))
            if epoch == 2:
                await eventually(lambda: rig.fenced("wrong-epoch") == 1, "the stranger's word, fenced")
                assert len(index) == 1
        await eventually(lambda: len(index) == 0, "its own")
        (await rig.worker.next()).run()
        await stream.completed(2)


async def test_only_the_unknown_suffix_is_asked_for() -> None:
    async with running(None) as rig:
        await with_tiers(rig)
        nodes = rig.catalog.publish(PROMPT[:512])
        await ask(rig)
        await ask(rig, (*PROMPT, *range(300)))
        first, second = rig.catalog.lookups
        assert (first.after, first.start, len(first.tokens)) == ("", 0, 599)
        assert (second.after, second.start, len(second.tokens)) == (nodes[1].chunk.hash, 512, 899 - 512)


async def test_a_late_answer_is_not_waited_for_and_not_lost() -> None:
    async with running(None, lookup_budget_ms=20) as rig:
        await with_tiers(rig)
        rig.catalog.publish(PROMPT[:-1])
        rig.catalog.lookup_gate.clear()
        job = await ask(rig)
        assert (job.offer.candidate.tier, job.offer.chain) == (Tier.NONE, ())
        assert rig.metric("lookups_total", answer="late") == 1
        rig.catalog.lookup_gate.set()
        await eventually(lambda: len(rig.router.lookups.cache) == 3, "remembered")
        assert (await ask(rig)).offer.candidate.tier is Tier.OBJECT
        assert len(rig.catalog.lookups) == 1


async def test_without_the_catalog_it_is_computed() -> None:
    async with running(None) as rig:
        await with_tiers(rig)
        await ask(rig, (1, 2, 3))  # the name is known from here on
        rig.catalog.publish(PROMPT[:-1])
        await rig.catalog.stop()
        assert (await ask(rig)).offer.candidate.tier is Tier.NONE
        assert rig.metric("lookups_total", answer="failed") == 1


async def test_facts_old_enough_are_asked_for_anew_and_forgotten_if_gone() -> None:
    async with running(None) as rig:
        await with_tiers(rig)
        rig.catalog.publish(PROMPT[:512])
        await ask(rig, PROMPT[:513])
        assert len(rig.router.lookups.cache) == 2
        gone = list(rig.catalog.chunks)[1]
        del rig.catalog.chunks[gone]
        cache = rig.router.lookups.cache
        cache._nodes = {key: (node, heard - 60_000) for key, (node, heard) in cache._nodes.items()}
        job = await ask(rig, PROMPT[:513])
        assert job.offer.candidate.cached_tokens == 256
        assert rig.catalog.lookups[-1].start == 0 and len(cache) == 1


async def test_a_declined_stale_prefix_falls_back_to_a_lower_tier_of_the_same_worker() -> None:
    from libs.controller.protocol import Resident
    from tests.router.fake_catalog import FINGERPRINT

    async with running(None) as rig:
        nodes = rig.catalog.publish(PROMPT[:512])
        rig.worker.resident = (Resident(nodes[1].chunk.hash, 512, Tier.GPU, FINGERPRINT),)
        await with_tiers(rig)
        stream = await rig.ingress.submit(request(600, 2, tokens=PROMPT))
        job = await rig.worker.next()
        assert job.offer.candidate.tier is Tier.GPU and job.offer.chain == ()
        job.decline(DeclineReason.PREFIX_GONE)
        job = await rig.worker.next()
        assert job.offer.candidate.tier is Tier.OBJECT and len(job.offer.chain) == 2
        job.run()
        end = await stream.completed(2)
        assert (end.served.worker, end.served.attempts, end.served.tier) == ("w0", 2, Tier.OBJECT)
        assert end.usage.cached_tokens == 512


async def test_a_second_worker_is_not_needed_to_learn_a_name() -> None:
    async with running(Job.run, names_refresh_s=0.05) as rig:
        end = await (await rig.ingress.submit(request(model="later"))).end()
        assert isinstance(end, ErrorDelivery) and end.code is StatusCode.NOT_FOUND
        rig.catalog.names["later"] = rig.catalog.names["m"]
        asked = rig.metric("names_asked_total")
        await eventually(lambda: rig.metric("names_asked_total") > asked + 1, "looked at again")
        await (await rig.ingress.submit(request(model="later"))).completed(4)
        # And a name that goes is gone.
        del rig.catalog.names["later"]
        asked = rig.metric("names_asked_total")
        await eventually(lambda: rig.metric("names_asked_total") > asked + 2, "looked at again")
        await asyncio.sleep(0)
        gone = await (await rig.ingress.submit(request(model="later"))).end()
        assert isinstance(gone, ErrorDelivery) and gone.code is StatusCode.NOT_FOUND
