"""Heartbeats over a real tunnel: who gets them, how they are numbered, what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from libs.continuation.chain import plan, root
from libs.controller.discovery import Observed, Registry
from libs.controller.protocol import Tier
from libs.controller.residency import ResidencyIndex
from tests.worker.rig import EPOCH, SALT, routing, running, until

PROMPT = tuple(range(600))


async def test_nothing_is_sent_before_an_election_then_a_snapshot_then_changes() -> None:
    async with running(heartbeat_s=0.05) as worker, routing(worker, "router-a") as router:
        with pytest.raises(TimeoutError):
            await router.beat(within=0.2)
        router.elect()
        first = await router.beat()
        assert (first.sequence, first.snapshot, first.epoch, first.worker) == (1, True, EPOCH, "w")
        second = await router.beat()
        assert (second.sequence, second.snapshot) == (2, False)
        assert second.load.pages.total == 256
        assert second.prefill
        assert second.lanes == 2


async def test_residency_travels_as_changes_that_a_router_can_follow() -> None:
    """The index a router builds from changes equals what a snapshot says, through inflight, arrival and eviction."""
    costs = {"heartbeat_s": 0.02, "echo_prefill_ms": 0.2, "step_tokens": 64, "echo_pages": 100}
    async with running(**costs) as worker, routing(worker, "router-a") as router:
        router.elect()
        await router.beat()
        exchange = await router.offer(PROMPT, 20)
        chain = plan(root(worker.model.fingerprint, SALT), PROMPT)
        seen: set[tuple[str, Tier]] = set()
        await exchange.finish()
        await router.beat()
        await router.beat()
        for beat in router.beats:
            seen |= {(resident.hash, resident.tier) for resident in beat.resident}
        assert (chain.chunks[0].hash, Tier.INFLIGHT) in seen
        assert (chain.chunks[1].hash, Tier.GPU) in seen
        # Something else pushes it out.
        other = await router.offer(tuple(range(5000, 6400)), 20, name="r2")
        assert (await other.accepted()).accepted
        await other.finish()
        await router.beat()
        await router.beat()
        followed = follow(router.beats)
        router.ask_snapshot()
        await until(lambda: router.beats[-1].snapshot)
        names = {resident.hash for beat in router.beats for resident in beat.resident}
        assert held(followed, names) == held(follow(router.beats[-1:]), names)
        assert chain.chunks[0].hash not in held(followed, names)
        assert held(followed, names)


def follow(beats) -> ResidencyIndex:  # type: ignore[no-untyped-def]
    index, registry = ResidencyIndex(), Registry()
    registry.opened(1, "w", 0.0)
    for beat in beats:
        observed = [effect for effect in registry.heard(1, beat, 0.0) if isinstance(effect, Observed)]
        assert observed, "a heartbeat was rejected"
        if observed[0].apply_resident:
            index.apply(beat, 0.0, observed[0].reset)
    return index


def held(index: ResidencyIndex, names: Collection[str]) -> dict[str, set[Tier]]:
    """Of these boundaries. Nothing else is in the index."""
    found = {name: set(index.holders(name)["w"]) for name in names if "w" in index.holders(name)}
    assert index.count("w") == len(found)
    return found


async def test_a_pair_is_numbered_once_over_its_tunnels_and_follows_the_highest_term() -> None:
    async with running(heartbeat_s=0.03) as worker, routing(worker, "router-a") as one:
        one.elect(1)
        await one.beat()
        async with routing(worker, "router-a") as two, routing(worker, "router-b") as other:
            two.elect(2)
            beat = await two.beat()
            assert beat.snapshot
            assert beat.sequence == one.beats[-1].sequence + 1
            one.elect(1)  # an old term, late
            other.elect(1)
            assert (await other.beat()).sequence == 1
            silent = len(one.beats)
            for _ in range(3):
                await two.beat()
            assert len(one.beats) == silent
            sequences = [beat.sequence for beat in (*one.beats, *two.beats)]
            assert sequences == list(range(1, len(sequences) + 1))


async def test_a_result_names_the_heartbeat_before_it_whichever_tunnel_that_took() -> None:
    async with (
        running(heartbeat_s=30.0) as worker,
        routing(worker, "router-a") as one,
        routing(worker, "router-a") as two,
        routing(worker, "router-b") as stranger,
    ):
        one.elect(1)
        await one.beat()
        for other in (one, two):
            heard = len(one.beats)
            exchange = await other.offer(PROMPT, 20, name=f"r{heard}")
            result = await exchange.finish()
            await until(lambda: one.beats[-1].sequence >= result.heartbeat)  # noqa: B023
            told = next(beat for beat in one.beats if beat.sequence == result.heartbeat)
            assert told in one.beats[heard:]
        exchange = await stranger.offer(PROMPT, 20, name="not told")
        assert (await exchange.finish()).heartbeat == 0


async def test_a_router_that_does_not_say_who_it_is_can_follow_a_second_tunnel() -> None:
    async with running(heartbeat_s=0.03) as worker:
        registry = Registry()
        for tunnel in (1, 2):
            async with routing(worker) as router:
                registry.opened(tunnel, "w", 0.0)
                router.elect(tunnel)
                await router.beat()
                await router.beat()
                for beat in router.beats:
                    assert [effect for effect in registry.heard(tunnel, beat, 0.0) if isinstance(effect, Observed)]


async def test_draining_is_told_at_once() -> None:
    async with running(heartbeat_s=30.0) as worker, routing(worker, "router-a") as router:
        router.elect()
        assert not (await router.beat()).draining
        worker.worker.interpreter.drain()
        assert (await router.beat(within=2.0)).draining


async def test_offers_are_answered_quickly_while_heartbeats_and_tokens_flow() -> None:
    loop = asyncio.get_running_loop()
    costs = {"heartbeat_s": 0.01, "lanes": 16, "echo_decode_ms": 2.0, "echo_pages": 2048}
    async with running(**costs) as worker, routing(worker, "router-a") as router:
        router.elect()
        busy = [await router.offer(PROMPT, 150, name=f"busy{i}") for i in range(16)]
        for exchange in busy:
            await exchange.accepted()
        waits = []
        for number in range(30):
            began = loop.time()
            exchange = await router.offer((7,), 1, name=f"r{number}")
            await exchange.accepted()
            waits.append(loop.time() - began)
        assert sorted(waits)[len(waits) * 9 // 10] < 0.1
