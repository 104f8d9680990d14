"""A slow consumer pays alone: its route is merged, then dropped with a reason; nobody else waits."""

import asyncio
import dataclasses
import time

import pytest

from libs.tunnel import (
    ChannelFullError,
    ChannelLimits,
    Closed,
    CloseReason,
    Counters,
    Health,
    Route,
    RouteClosedError,
    TunnelConfig,
    never_merge,
)
from libs.tunnel.writer import Writer
from tests.tunnel.carriers import pair
from tests.tunnel.harness import FAST, LIMIT_S, concatenate, memory, until

SMALL = ChannelLimits(max_items=16, max_bytes=4096, high_items=8, high_bytes=3000, congested_s=0.15)
CONFIG = TunnelConfig(ping_interval_s=60, ping_jitter_s=0, ack_delay_s=0.01, goodbye_s=0.5, route=SMALL)


async def consume(route: Route, into: list[bytes], pause_s: float = 0.0) -> None:
    async for payload in route:
        into.append(payload)
        if pause_s:
            await asyncio.sleep(pause_s)


async def test_a_stopped_consumer_is_dropped_alone_and_at_once_when_nothing_fits() -> None:
    async with memory(CONFIG) as pair:
        stopped, stopped_far = await pair.open()
        live = [await pair.open() for _ in range(20)]
        received: list[list[bytes]] = [[] for _ in live]
        consumers = [asyncio.create_task(consume(near, into)) for (near, _), into in zip(live, received, strict=True)]
        for index in range(60):
            if stopped_far.closed is None:
                stopped_far.post(b"%d" % index)
            for _, far in live:
                far.post(b"%d" % index)
            await asyncio.sleep(0.001)
        for _, far in live:
            far.close(CloseReason.DONE)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*consumers)
        assert all(into == [b"%d" % index for index in range(60)] for into in received)
        assert stopped.closed is not None and stopped.closed.reason is CloseReason.RESOURCE_EXHAUSTED
        # The consumer learns it; the peer learns it and stops; the user's handler was told; each once.
        with pytest.raises(RouteClosedError) as caught:
            await stopped.receive()
        assert caught.value.closed.reason is CloseReason.RESOURCE_EXHAUSTED
        assert stopped_far.closed is not None
        assert stopped_far.closed.reason is CloseReason.RESOURCE_EXHAUSTED and stopped_far.closed.by_peer
        assert pair.dialing.dropped == [(stopped.conn_id, CloseReason.RESOURCE_EXHAUSTED)]
        assert pair.accepting.dropped == []
        await pair.dialing.registry.wait_rest(LIMIT_S)
        assert [len(ends) for ends in pair.dialing.closes.values()] == [1] * 21
        assert pair.dialing.registry.counters.routes_closed == {"resource_exhausted": 1, "done": 20}


async def test_a_burst_is_absorbed_by_merging_without_loss() -> None:
    async with memory(CONFIG, merge=concatenate) as pair:
        near, far = await pair.open()
        for _ in range(100):
            far.post(b"0123456789")
        far.close(CloseReason.DONE)
        await until(lambda: near.closed is not None)
        received: list[bytes] = []
        await consume(near, received)
        assert b"".join(received) == b"0123456789" * 100
        assert len(received) <= SMALL.max_items


async def test_a_slow_but_steady_consumer_is_merged_and_kept() -> None:
    async with memory(CONFIG, merge=concatenate) as pair:
        near, far = await pair.open()
        received: list[bytes] = []
        consumer = asyncio.create_task(consume(near, received, pause_s=0.01))
        for index in range(400):
            far.post(b"%04d" % index)
            await asyncio.sleep(0.001)
        far.close(CloseReason.DONE)
        async with asyncio.timeout(LIMIT_S):
            await consumer
        assert b"".join(received) == b"".join(b"%04d" % index for index in range(400))
        assert len(received) < 400


async def test_congestion_that_lasts_drops_even_when_nothing_more_comes() -> None:
    async with memory(CONFIG) as pair:
        near, far = await pair.open()
        for _ in range(SMALL.high_items + 1):
            far.post(b"x")
        await until(lambda: near.inbound.congested_since is not None)
        started = time.monotonic()
        await until(lambda: near.closed is not None)
        assert near.closed is not None and near.closed.reason is CloseReason.RESOURCE_EXHAUSTED
        assert time.monotonic() - started >= SMALL.congested_s / 2
        assert len(near.inbound) == 0


async def test_a_quiet_queue_below_the_watermark_is_never_dropped() -> None:
    async with memory(CONFIG) as pair:
        near, far = await pair.open()
        for _ in range(SMALL.high_items):
            far.post(b"x")
        await asyncio.sleep(SMALL.congested_s * 3)
        assert near.closed is None
        assert [await near.receive(LIMIT_S) for _ in range(SMALL.high_items)] == [b"x"] * SMALL.high_items


async def test_bytes_are_bounded_too() -> None:
    async with memory(CONFIG, merge=concatenate) as pair:
        near, far = await pair.open()
        for _ in range(10):
            far.post(b"x" * 1000)
        await until(lambda: near.closed is not None)
        assert near.closed is not None and near.closed.reason is CloseReason.RESOURCE_EXHAUSTED


class TestPost:
    """Outbound: a command channel that is full must not stall whoever posts."""

    CONFIG = dataclasses.replace(FAST, command_items=4, route=SMALL)
    # Whoever is slow here is a busy machine, and nobody expires for it.
    CALM = dataclasses.replace(CONFIG, route=dataclasses.replace(SMALL, congested_s=LIMIT_S))

    async def test_merges_while_the_carrier_is_stuck_and_loses_nothing(self) -> None:
        async with memory(self.CALM, merge=concatenate) as pair:
            near, far = await pair.open()
            other_near, other_far = await pair.open()
            pair.accepting_carrier.flowing.clear()
            for index in range(100):
                far.post(b"%02d" % index)
                other_far.post(b"%02d" % (99 - index))
            far.close(CloseReason.DONE)
            pair.accepting_carrier.flowing.set()
            received: list[bytes] = []
            async with asyncio.timeout(LIMIT_S):
                await consume(near, received)
            assert b"".join(received) == b"".join(b"%02d" % index for index in range(100))
            other_far.close(CloseReason.DONE)
            received = []
            async with asyncio.timeout(LIMIT_S):
                await consume(other_near, received)
            assert b"".join(received) == b"".join(b"%02d" % (99 - index) for index in range(100))

    async def test_past_its_own_bounds_the_route_alone_is_dropped(self) -> None:
        async with memory(self.CALM, merge=never_merge) as pair:
            near, far = await pair.open()
            bystander_near, bystander_far = await pair.open()
            pair.accepting_carrier.flowing.clear()
            bystander_far.post(b"first")
            posted = 0
            with pytest.raises(RouteClosedError) as caught:
                while posted < 1000:
                    far.post(b"x")
                    posted += 1
            assert posted <= self.CALM.command_items + SMALL.max_items + 1
            assert caught.value.closed.reason is CloseReason.RESOURCE_EXHAUSTED
            bystander_far.post(b"second")
            pair.accepting_carrier.flowing.set()
            assert await bystander_near.receive(LIMIT_S) == b"first"
            assert await bystander_near.receive(LIMIT_S) == b"second"
            await until(lambda: near.closed is not None)
            assert (
                near.closed is not None and near.closed.reason is CloseReason.RESOURCE_EXHAUSTED and near.closed.by_peer
            )
            assert pair.accepting.dropped == [(far.conn_id, CloseReason.RESOURCE_EXHAUSTED)]

    async def test_order_holds_between_try_send_and_post(self) -> None:
        async with memory(self.CALM, merge=concatenate) as pair:
            near, far = await pair.open()
            expected = bytearray()
            received: list[bytes] = []
            consumer = asyncio.create_task(consume(near, received))
            for index in range(300):
                if index % 50 == 10:
                    pair.accepting_carrier.flowing.clear()
                if index % 50 == 40:
                    pair.accepting_carrier.flowing.set()
                    await asyncio.sleep(0)
                far.post(b"%03d" % index)
                expected += b"%03d" % index
            far.close(CloseReason.DONE)
            async with asyncio.timeout(LIMIT_S):
                await consumer
            assert b"".join(received) == bytes(expected)


async def test_the_writer_never_waits_for_a_stopped_consumer() -> None:
    """With a carrier that holds one frame, a reader that waited for the stopped route would stop everything."""
    async with memory(CONFIG, depth=1) as pair:
        stopped, stopped_far = await pair.open()
        near, far = await pair.open()
        for index in range(100):
            if stopped_far.closed is None:
                stopped_far.post(b"x")
            far.post(b"%d" % index)
            assert await near.receive(LIMIT_S) == b"%d" % index
        assert stopped.closed is not None
        assert stopped.closed == Closed(CloseReason.RESOURCE_EXHAUSTED, stopped.closed.detail)


def test_a_waiting_sender_is_woken_when_half_of_the_channel_is_free() -> None:
    """Not for each payload that leaves: a sender faster than its tunnel would wait, fill one place and wait again."""
    config = dataclasses.replace(TunnelConfig(), command_items=8, max_items=1)
    carrier, _ = pair()
    writer = Writer(carrier, config, Counters(), Health(config.health), lambda: 0.0)
    for _ in range(8):
        writer.try_send(1, b"x")
    with pytest.raises(ChannelFullError):
        writer.try_send(1, b"x")
    woken = []
    while writer.waiting_items:
        assert writer._next() is not None
        woken.append(writer._space.is_set())
    assert woken == [False] * 3 + [True] * 5
