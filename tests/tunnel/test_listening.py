"""A listener is a consumer without a task: nothing lost, doubled or out of order, the end told once."""

import asyncio
from collections.abc import Callable

import pytest

from libs.tunnel import CloseReason, Route, RouteClosedError, TunnelConfig
from tests.tunnel.harness import LIMIT_S, concatenate, memory, until

CONFIG = TunnelConfig(ping_interval_s=60, ping_jitter_s=0, ack_delay_s=0.01, goodbye_s=0.5)


class Heard:
    """What a listener was called with."""

    def __init__(self, route: Route, then: Callable[[list[bytes]], None] = lambda _payloads: None) -> None:
        self.route, self.calls, self._then = route, list[list[bytes]](), then
        route.listen(self)

    def __call__(self, payloads: list[bytes]) -> None:
        self.calls.append(payloads)
        self._then(payloads)

    @property
    def whole(self) -> bytes:
        return b"".join(payload for call in self.calls for payload in call)

    @property
    def over(self) -> bool:
        return bool(self.calls) and not self.calls[-1]


async def test_everything_is_heard_once_and_then_the_end() -> None:
    async with memory(CONFIG, merge=concatenate) as pair:
        routes = [await pair.open() for _ in range(8)]
        heard = [Heard(near) for near, _ in routes]
        for number in range(100):
            for _, far in routes:
                far.post(b"%02d" % number)
            if number % 7 == 0:
                await asyncio.sleep(0)
        for _, far in routes:
            far.close(CloseReason.DONE)
        await until(lambda: all(one.over for one in heard))
        for one in heard:
            assert one.whole == b"".join(b"%02d" % number for number in range(100))
            assert [bool(call) for call in one.calls].count(False) == 1
        await pair.dialing.registry.wait_rest(LIMIT_S)


async def test_who_listens_after_a_wait_that_was_over_hears_what_comes_first() -> None:
    async with memory(CONFIG) as pair:
        near, far = await pair.open()
        with pytest.raises(TimeoutError):
            await near.receive(0.01)
        heard = Heard(near)
        far.post(b"x")
        await until(lambda: heard.whole == b"x")


async def test_the_lanes_of_a_frame_are_heard_in_one_turn() -> None:
    async with memory(CONFIG) as pair:
        routes = [await pair.open() for _ in range(8)]
        turns, turn = list[int](), 0
        for near, _ in routes:
            Heard(near, lambda payloads: turns.append(turn) if payloads else None)
        for _, far in routes:
            far.post(b"x")
        while len(turns) < len(routes):
            await asyncio.sleep(0)
            turn += 1
        assert len(set(turns)) == 1


async def test_what_came_before_the_listener_is_heard_and_what_comes_after_it_waits() -> None:
    async with memory(CONFIG) as pair:
        near, far = await pair.open()
        far.post(b"early")
        await until(lambda: len(near.inbound))
        first = Heard(near, lambda _payloads: near.hush())
        await until(lambda: first.calls)
        far.post(b"late")
        assert await near.receive(LIMIT_S) == b"late"
        assert first.calls == [[b"early"]]
        second = Heard(near)
        far.close(CloseReason.DONE)
        await until(lambda: second.over)
        late = Heard(near)
        await until(lambda: late.over)
        assert second.calls == late.calls == [[]]


async def test_one_consumer_of_either_kind() -> None:
    async with memory(CONFIG) as pair:
        near, far = await pair.open()
        Heard(near)
        with pytest.raises(RuntimeError, match="consumer already"):
            near.listen(print)
        with pytest.raises(RuntimeError, match="consumer already"):
            await near.receive(LIMIT_S)
        waiting = asyncio.create_task(far.receive(LIMIT_S))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="consumer already"):
            far.listen(print)
        near.close(CloseReason.CANCELLED)
        with pytest.raises(RouteClosedError):
            await waiting


async def test_a_lost_tunnel_is_heard_behind_what_had_come() -> None:
    async with memory(CONFIG) as pair:
        near, far = await pair.open()
        far.post(b"last")
        await until(lambda: len(near.inbound))
        pair.dialing.run.cancel()
        heard = Heard(near)
        await until(lambda: heard.over)
        assert heard.calls == [[b"last"], []]


async def test_a_listener_that_fails_ends_its_route_alone() -> None:
    def fail(_payloads: list[bytes]) -> None:
        raise ValueError("planted")

    async with memory(CONFIG) as pair:
        (near, far), (other, other_far) = await pair.open(), await pair.open()
        failing, well = Heard(near, fail), Heard(other)
        far.post(b"x")
        other_far.post(b"y")
        await until(lambda: near.closed is not None and well.calls)
        assert near.closed is not None and near.closed.reason is CloseReason.CANCELLED
        assert failing.calls == [[b"x"]] and well.calls == [[b"y"]] and other.closed is None
        assert pair.dialing.registry.counters.handler_errors == 1
