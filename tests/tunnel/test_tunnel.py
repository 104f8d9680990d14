"""Two tunnels in memory: routes, closes, corruption, the window, the end."""

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from libs.tunnel import (
    ChannelFullError,
    Closed,
    CloseReason,
    Degraded,
    FrameKind,
    HealthLimits,
    PayloadTooLargeError,
    RouteClosedError,
    TooManyRoutesError,
    TunnelClosedError,
    TunnelConfig,
)
from libs.tunnel.frames import decode, encode, encode_u64
from tests.tunnel.harness import FAST, LIMIT_S, End, memory, until

CALM = TunnelConfig(ping_interval_s=60, ping_jitter_s=0, ack_delay_s=0.01, goodbye_s=0.3)


async def test_payloads_in_order_both_ways_and_a_quiet_end() -> None:
    async with memory() as pair:
        near, far = await pair.open(b"first")
        for index in range(500):
            near.post(b"up%d" % index)
            far.post(b"down%d" % index)
            if index % 25 == 0:
                await asyncio.sleep(0)
                while len(near.inbound):
                    await near.receive()
                while len(far.inbound):
                    await far.receive()
        far.close(CloseReason.DONE)
        received = [payload async for payload in near]
        assert received[-1] == b"down499"
        assert near.closed == Closed(CloseReason.DONE, "", by_peer=True)
        await until(lambda: near.conn_id in pair.dialing.closes)
        assert [c.reason for c in pair.dialing.closes[near.conn_id]] == [CloseReason.DONE]


async def test_close_is_idempotent_and_told_once() -> None:
    async with memory() as pair:
        near, far = await pair.open()
        near.close(CloseReason.CANCELLED, "client left")
        near.close(CloseReason.DONE)
        with pytest.raises(RouteClosedError) as caught:
            await far.receive(LIMIT_S)
        assert caught.value.closed == Closed(CloseReason.CANCELLED, "client left", by_peer=True)
        far.close()
        with pytest.raises(RouteClosedError):
            far.try_send(b"x")
        for end in (pair.dialing, pair.accepting):
            await end.registry.wait_rest(LIMIT_S)
            assert [c.reason for c in end.closes[near.conn_id]] == [CloseReason.CANCELLED]


async def test_what_was_sent_before_a_close_arrives_before_it() -> None:
    async with memory() as pair:
        near, far = await pair.open()
        other, _ = await pair.open()
        for index in range(20):
            far.try_send(b"%d" % index)
        far.close(CloseReason.DONE)
        other.try_send(b"x")
        assert [payload async for payload in near] == [b"%d" % index for index in range(20)]


async def test_iteration_never_ends_quietly_without_done() -> None:
    async with memory() as pair:
        near, far = await pair.open()
        far.try_send(b"some")
        far.close(CloseReason.CANCELLED)
        iterator = aiter(near)
        assert await anext(iterator) == b"some"
        with pytest.raises(RouteClosedError):
            await anext(iterator)


async def test_deadlines() -> None:
    async with memory() as pair:
        near, far = await pair.open()
        with pytest.raises(TimeoutError):
            await near.receive(0.02)
        far.try_send(b"late")
        assert await near.receive(LIMIT_S) == b"late"
        with pytest.raises(TimeoutError):
            await near.receive(0.02)


async def test_control_messages_have_no_route() -> None:
    async with memory() as pair:
        pair.accepting.tunnel.try_control(b"heartbeat")
        async with asyncio.timeout(LIMIT_S):
            assert await pair.dialing.controls.get() == b"heartbeat"
        assert pair.dialing.registry.snapshot().routes == 0


async def test_one_iteration_is_one_frame() -> None:
    async with memory(CALM) as pair:
        routes = [await pair.open() for _ in range(16)]
        sent = pair.accepting.registry.counters.frames_sent
        for _, far in routes:
            far.post(b"delta")
        for near, _ in routes:
            await near.receive(LIMIT_S)
        assert pair.accepting.registry.counters.frames_sent == sent + 1


async def test_first_delivered_tells_a_lost_offer() -> None:
    async with memory(CALM) as pair:
        near, _ = await pair.open()
        await until(lambda: near.first_delivered)
        pair.dialing_carrier.flowing.clear()
        lost = await pair.dialing.tunnel.open(b"never leaves")
        assert not lost.first_delivered
        pair.dialing_carrier.cancel()
        with pytest.raises(RouteClosedError):
            await lost.receive(LIMIT_S)
        assert near.first_delivered and not lost.first_delivered
        pair.dialing_carrier.flowing.set()


class TestUnbound:
    async def test_unknown_conn_id_is_answered_once(self) -> None:
        async with memory(CALM) as pair:
            for _ in range(10):
                pair.accepting.tunnel.writer.try_send(999, b"stray")
            counters = pair.dialing.registry.counters
            await until(lambda: counters.no_route == 10)
            marker, _ = await pair.open()
            assert closes(pair.dialing_carrier.written) == [(999, CloseReason.NO_ROUTE)]
            marker.close()

    async def test_a_closed_route_is_told_apart_and_not_answered_again(self) -> None:
        async with memory(CALM) as pair:
            near, _ = await pair.open()
            # The peer has not heard of the close yet when it sends these.
            pair.dialing_carrier.flowing.clear()
            near.close(CloseReason.CANCELLED)
            for _ in range(5):
                pair.accepting.tunnel.writer.try_send(near.conn_id, b"delta")
            counters = pair.dialing.registry.counters
            await until(lambda: counters.channel_closed == 5)
            pair.dialing_carrier.flowing.set()
            await pair.accepting.registry.wait_rest(LIMIT_S)
            assert counters.no_route == 0
            assert closes(pair.dialing_carrier.written) == [(near.conn_id, CloseReason.CANCELLED)]

    async def test_an_old_conn_id_opens_no_route(self) -> None:
        config = dataclasses.replace(CALM, tombstones=1)
        async with memory(config) as pair:
            first, _ = await pair.open()
            second, _ = await pair.open()
            first.close()
            second.close()
            await pair.accepting.registry.wait_rest(LIMIT_S)
            pair.dialing.tunnel.writer.try_send(first.conn_id, b"late")
            await until(lambda: pair.accepting.registry.counters.no_route == 1)
            assert pair.accepting.registry.counters.routes_opened == 2
            assert pair.accepting.accepted.empty()

    async def test_a_failing_accept_handler_ends_its_route_only(self) -> None:
        async with memory(CALM) as pair:
            good, _ = await pair.open()
            handler = pair.accepting.accept

            def fail(*_: object) -> None:
                raise ValueError("planted")

            object.__setattr__(pair.accepting.tunnel._handlers, "accept", fail)
            bad = await pair.dialing.tunnel.open(b"x")
            with pytest.raises(RouteClosedError) as caught:
                await bad.receive(LIMIT_S)
            assert caught.value.closed.reason is CloseReason.CANCELLED
            object.__setattr__(pair.accepting.tunnel._handlers, "accept", handler)
            assert pair.accepting.registry.counters.handler_errors == 1 and good.closed is None

    async def test_the_ceiling_refuses_with_its_reason(self) -> None:
        async with memory(CALM, max_connections=2) as pair:
            first, _ = await pair.open()
            await pair.open()
            third = await pair.dialing.tunnel.open(b"x")
            with pytest.raises(RouteClosedError) as caught:
                await third.receive(LIMIT_S)
            assert caught.value.closed.reason is CloseReason.RESOURCE_EXHAUSTED
            assert pair.accepting.registry.counters.too_many_routes == 1
            first.close()
            await until(lambda: pair.accepting.registry.snapshot().permits == 1)
            await pair.open()


def closes(frames: list[bytes]) -> list[tuple[int, CloseReason]]:
    found = []
    for data in frames:
        frame = decode(data, 1 << 24, 1 << 16)
        if frame.kind is FrameKind.CLOSE:
            found += [(conn_id, CloseReason(payload[1])) for conn_id, payload in frame.items if conn_id]
    return found


def flip_payload(data: bytes) -> list[bytes]:
    return [data.replace(b"precious", b"preciouS")]


def drop_frame(data: bytes) -> list[bytes]:
    return [] if b"precious" in data else [data]


def replay(data: bytes) -> list[bytes]:
    return [data, data] if b"precious" in data else [data]


def garbage(data: bytes) -> list[bytes]:
    return [b"\xff" * 9] if b"precious" in data else [data]


class Swap:
    """Sends each marked frame behind the one after it."""

    def __init__(self) -> None:
        self.held: bytes | None = None

    def __call__(self, data: bytes) -> list[bytes]:
        if self.held is not None:
            held, self.held = self.held, None
            return [data, held]
        if b"precious" in data:
            self.held = data
            return []
        return [data]


class TestCorruption:
    @pytest.mark.parametrize(
        ("edit", "label"),
        [
            (flip_payload, "checksum"),
            (drop_frame, "gap"),
            (replay, "replay"),
            (Swap(), "gap"),
            (garbage, "undecodable"),
        ],
    )
    async def test_closes_the_tunnel_and_delivers_nothing_of_it(
        self, edit: Callable[[bytes], list[bytes]], label: str
    ) -> None:
        async with memory(CALM) as pair:
            near, far = await pair.open()
            bystander, _ = await pair.open()
            pair.accepting_carrier.edit = edit
            far.try_send(b"precious")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            far.try_send(b"after")
            async with asyncio.timeout(LIMIT_S):
                assert (await pair.dialing.run).reason is CloseReason.CORRUPT
            delivered = near.inbound.take_all()
            # A replayed frame was good the first time; nothing else of a bad frame, nor after it, arrives.
            assert delivered == ([b"precious"] if label == "replay" else [])
            assert pair.dialing.registry.counters.corrupt == {label: 1}
            for route in (near, bystander):
                assert route.closed is not None and route.closed.reason is CloseReason.CORRUPT
            # The peer is told, and ends too.
            async with asyncio.timeout(LIMIT_S):
                assert (await pair.accepting.run) == Closed(
                    CloseReason.CORRUPT, pair.dialing.lost[0].detail, by_peer=True
                )
            await pair.dialing.registry.wait_rest(LIMIT_S)
            assert {conn_id: len(ends) for conn_id, ends in pair.dialing.closes.items()} == {
                near.conn_id: 1,
                bystander.conn_id: 1,
            }

    async def test_plant_without_the_checksum_the_damage_is_delivered(self) -> None:
        """What the test above would not see if the check were gone."""
        async with memory(CALM, verify=lambda _items, _crc: None) as pair:
            near, far = await pair.open()
            pair.accepting_carrier.edit = flip_payload
            far.try_send(b"precious")
            assert await near.receive(LIMIT_S) == b"preciouS"

    @pytest.mark.parametrize("seq", [0, 10_000])
    async def test_an_impossible_acknowledgement_is_a_protocol_error(self, seq: int) -> None:
        async with memory(CALM) as pair:
            near, _ = await pair.open()
            await until(lambda: near.first_delivered)
            writer = pair.accepting.tunnel.writer
            writer.ack(lambda: seq)
            async with asyncio.timeout(LIMIT_S):
                assert (await pair.dialing.run).reason is CloseReason.PROTOCOL


class TestSending:
    async def test_a_full_command_channel_refuses_and_degrades(self) -> None:
        config = dataclasses.replace(CALM, command_items=4)
        async with memory(config) as pair:
            near, far = await pair.open()
            pair.dialing_carrier.flowing.clear()
            near.try_send(b"in flight")
            await until(lambda: pair.dialing.tunnel.writer.write_started is not None)
            for _ in range(4):
                near.try_send(b"x")
            with pytest.raises(ChannelFullError):
                near.try_send(b"x")
            with pytest.raises(ChannelFullError):
                await pair.dialing.tunnel.open(b"offer")
            held = pair.dialing.registry.snapshot()
            assert (held.routes, held.bindings, held.permits) == (1, 1, 1)
            assert pair.dialing.tunnel.health.reasons == {Degraded.CHANNEL_FULL}
            assert pair.dialing.registry.counters.degraded == {"channel_full": 1}
            with pytest.raises(TimeoutError):
                await near.send(b"x", 0.02)
            waiting = asyncio.create_task(near.send(b"waited", LIMIT_S))
            pair.dialing_carrier.flowing.set()
            await waiting
            received: list[bytes] = []
            while not received or received[-1] != b"waited":
                received.append(await far.receive(LIMIT_S))

    async def test_the_window_bounds_what_is_unacknowledged(self) -> None:
        config = dataclasses.replace(CALM, window_frames=8, ack_every=4)
        async with memory(config) as pair:
            near, far = await pair.open()
            await until(lambda: pair.dialing.tunnel.writer.window.unacked_frames == 0)
            # Acknowledgements are lost in both senses: none arrives any more.
            pair.accepting.tunnel.schedule_ack = lambda at_once: None  # type: ignore[method-assign]
            written = len(pair.dialing_carrier.written)
            for index in range(40):
                near.try_send(b"%d" % index)
                await asyncio.sleep(0.001)
            window = pair.dialing.tunnel.writer.window
            assert window.unacked_frames == 8 and not window.has_room()
            assert len(pair.dialing_carrier.written) == written + 8
            # Pings pass a full window.
            pair.dialing.tunnel.writer.ping(encode_u64(1))
            await until(lambda: len(pair.dialing_carrier.written) == written + 9)
            del pair.accepting.tunnel.schedule_ack
            pair.accepting.tunnel.schedule_ack(True)
            received: list[bytes] = []
            while len(received) < 40:
                received.append(await far.receive(LIMIT_S))
            assert received == [b"%d" % index for index in range(40)]

    async def test_a_payload_too_large_is_refused_before_anything_is_bound(self) -> None:
        async with memory() as pair:
            with pytest.raises(PayloadTooLargeError):
                await pair.dialing.tunnel.open(b"x" * FAST.max_frame_bytes)
            pair.dialing.assert_rest()

    async def test_large_payloads_are_split_over_frames(self) -> None:
        config = dataclasses.replace(CALM, max_frame_bytes=4096, max_items=8, command_bytes=1 << 20)
        async with memory(config) as pair:
            near, far = await pair.open()
            payloads = [bytes([index]) * (index * 90) for index in range(40)]
            for payload in payloads:
                near.try_send(payload)
            received: list[bytes] = []
            while len(received) < len(payloads):
                received.append(await far.receive(LIMIT_S))
            assert received == payloads
            assert max(map(len, pair.dialing_carrier.written)) <= 4096

    async def test_an_oversized_frame_is_a_protocol_error(self) -> None:
        async with memory(CALM) as pair:
            huge = encode(FrameKind.DATA, 1, [(1, b"x" * CALM.max_frame_bytes)])
            pair.accepting_carrier.edit = lambda data: [huge]
            pair.accepting.tunnel.try_control(b"x")
            async with asyncio.timeout(LIMIT_S):
                assert (await pair.dialing.run).reason is CloseReason.PROTOCOL


class TestEnd:
    @pytest.mark.parametrize("closer", ["dialing", "accepting"])
    async def test_an_orderly_close_flushes_and_reaches_the_peer(self, closer: str) -> None:
        async with memory(CALM) as pair:
            near, far = await pair.open()
            this, other = (pair.dialing, pair.accepting) if closer == "dialing" else (pair.accepting, pair.dialing)
            sender, receiver = (near, far) if closer == "dialing" else (far, near)
            for index in range(10):
                sender.try_send(b"%d" % index)
            this.tunnel.close(CloseReason.RETIRED, "generation 2")
            with pytest.raises(TunnelClosedError):
                this.tunnel.try_control(b"x")
            async with asyncio.timeout(LIMIT_S):
                assert await this.run == Closed(CloseReason.RETIRED, "generation 2")
                assert await other.run == Closed(CloseReason.RETIRED, "generation 2", by_peer=True)
            received: list[bytes] = []
            with pytest.raises(RouteClosedError) as caught:
                while True:
                    received.append(await receiver.receive(LIMIT_S))
            assert received == [b"%d" % index for index in range(10)]
            assert caught.value.closed.reason is CloseReason.RETIRED

    async def test_a_slow_carrier_still_takes_what_was_accepted(self) -> None:
        async with memory(CALM) as pair:
            near, far = await pair.open()
            pair.dialing_carrier.flowing.clear()
            for index in range(10):
                near.try_send(b"%d" % index)
            pair.dialing.tunnel.close(CloseReason.RETIRED)
            for _ in range(10):
                await asyncio.sleep(0)
            pair.dialing_carrier.flowing.set()
            received: list[bytes] = []
            with pytest.raises(RouteClosedError) as caught:
                while True:
                    received.append(await far.receive(LIMIT_S))
            assert received == [b"%d" % index for index in range(10)]
            assert caught.value.closed.reason is CloseReason.RETIRED

    async def test_a_stuck_carrier_cannot_hold_the_end_up(self) -> None:
        async with memory(CALM) as pair:
            near, _ = await pair.open()
            pair.dialing_carrier.flowing.clear()
            near.try_send(b"x")
            started = asyncio.get_running_loop().time()
            pair.dialing.tunnel.close(CloseReason.RETIRED)
            async with asyncio.timeout(LIMIT_S):
                await pair.dialing.run
            assert asyncio.get_running_loop().time() - started < 5 * CALM.goodbye_s

    async def test_cancelling_run_releases_everything(self) -> None:
        async with memory(CALM) as pair:
            routes = [await pair.open() for _ in range(50)]
            consumers = [asyncio.create_task(near.receive()) for near, _ in routes]
            await asyncio.sleep(0)
            pair.dialing.run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pair.dialing.run
            results = await asyncio.gather(*consumers, return_exceptions=True)
            assert all(isinstance(result, RouteClosedError) for result in results)
            await pair.dialing.registry.wait_rest(LIMIT_S)
            assert_one_close_each(pair.dialing, [near.conn_id for near, _ in routes], CloseReason.SHUTDOWN)
            async with asyncio.timeout(LIMIT_S):
                await pair.accepting.run
            await pair.accepting.registry.wait_rest(LIMIT_S)
            assert_one_close_each(pair.accepting, [near.conn_id for near, _ in routes], CloseReason.PEER_LOST)

    async def test_opening_on_an_ended_tunnel_binds_nothing(self) -> None:
        async with memory(CALM) as pair:
            pair.dialing.tunnel.close()
            with pytest.raises(TunnelClosedError):
                await pair.dialing.tunnel.open(b"x")
            pair.dialing.assert_rest()

    async def test_a_silent_peer_is_lost_after_the_pong_limit(self) -> None:
        config = dataclasses.replace(
            FAST, ping_interval_s=0.02, ping_jitter_s=0.01, health=HealthLimits(pong_timeout_s=0.1)
        )
        async with memory(config) as pair:
            near, _ = await pair.open()
            pair.dialing_carrier.edit = lambda data: []
            pair.accepting_carrier.edit = lambda data: []
            async with asyncio.timeout(LIMIT_S):
                assert (await pair.dialing.run).reason is CloseReason.PEER_LOST
            assert near.closed is not None and near.closed.reason is CloseReason.PEER_LOST

    async def test_a_stalled_send_degrades_and_ends(self) -> None:
        async with memory() as pair:
            pair.dialing_carrier.flowing.clear()
            await until(lambda: Degraded.SEND_STALLED in pair.dialing.tunnel.health.reasons)
            async with asyncio.timeout(LIMIT_S):
                assert (await pair.dialing.run).reason is CloseReason.PEER_LOST
            assert pair.dialing.registry.counters.degraded["send_stalled"] == 1

    async def test_an_idle_open_route_lives_on(self) -> None:
        async with memory() as pair:
            near, far = await pair.open()
            pings = pair.dialing.registry.counters.frames_sent
            await until(lambda: pair.dialing.registry.counters.frames_sent > pings + 20)
            assert near.closed is None
            far.try_send(b"still here")
            assert await near.receive(LIMIT_S) == b"still here"


def assert_one_close_each(end: End, conn_ids: list[int], reason: CloseReason) -> None:
    assert {conn_id: [c.reason for c in ends] for conn_id, ends in end.closes.items()} == {
        conn_id: [reason] for conn_id in conn_ids
    }


async def test_the_context_manager_closes_by_outcome() -> None:
    async with memory(CALM) as pair:
        near, far = await pair.open()
        with pytest.raises(ValueError, match="planted"):
            async with near:
                raise ValueError("planted")
        with pytest.raises(RouteClosedError) as caught:
            await far.receive(LIMIT_S)
        assert caught.value.closed.reason is CloseReason.CANCELLED
        near, far = await pair.open()
        async with near:
            pass
        assert [payload async for payload in far] == []


async def test_a_dialing_ceiling_refuses_before_binding() -> None:
    async with memory(CALM) as pair:
        pair.dialing.registry.max_connections = 1
        near, _ = await pair.open()
        with pytest.raises(TooManyRoutesError):
            await pair.dialing.tunnel.open(b"x")
        near.close()
