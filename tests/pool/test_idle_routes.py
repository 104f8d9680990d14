"""An open route without traffic, over whole tunnels: ten minutes and more do not end it, its two ends do."""

import asyncio

import pytest

from libs.pool.knobs import PoolPolicy
from libs.pool.model import WorkerTarget
from libs.tunnel import CloseReason, Route, RouteClosedError
from tests.pool.logical import Both, in_memory, logically


async def ten_minutes(policy: PoolPolicy) -> int:
    """An idle route of ten minutes that still carries both ways; how many frames its worker sent meanwhile."""
    loop = asyncio.get_running_loop()
    async with in_memory(policy) as both:
        near = await both.pool.bind(WorkerTarget("w0"), b"x")
        far = await accepted(both)
        began, frames = loop.time(), both.registry.counters.frames_received
        await asyncio.sleep(600)
        assert loop.time() - began >= 600
        assert near.closed is None, f"it ended: {near.closed}"
        assert far.closed is None, f"it ended: {far.closed}"
        far.post(b"down")
        assert await near.receive(1) == b"down"
        near.try_send(b"up")
        assert await far.receive(1) == b"up"
        frames = both.registry.counters.frames_received - frames
        near.close()
        await at_rest(both)
    return frames


async def accepted(both: Both) -> Route:
    """The worker's end of the route that was just bound."""
    async with asyncio.timeout(1):
        while not both.accepted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return both.accepted.pop()


async def at_rest(both: Both) -> None:
    """Nothing is held at either end."""
    for registry in (both.registry, both.far):
        await registry.wait_rest(5)
        held = registry.snapshot()
        assert (held.routes, held.bindings, held.permits) == (0, 0, 0)


@pytest.mark.parametrize("policy", [PoolPolicy(reinit_interval_s=0), PoolPolicy(reinit_interval_s=900)])
def test_ten_minutes_without_traffic(policy: PoolPolicy) -> None:
    # Both tunnels ping each other all the time: a pong and a ping every eight seconds or so.
    assert logically(lambda: ten_minutes(policy)) > 2 * 600 / 10


@pytest.mark.parametrize("side", ["request", "delivery"])
def test_either_end_ends_it(side: str) -> None:
    async def play() -> None:
        async with in_memory(PoolPolicy(reinit_interval_s=0)) as both:
            near = await both.pool.bind(WorkerTarget("w0"), b"x")
            far = await accepted(both)
            await asyncio.sleep(600)
            ended, other = (near, far) if side == "request" else (far, near)
            ended.close(CloseReason.CANCELLED)
            with pytest.raises(RouteClosedError) as caught:
                await other.receive(5)
            assert caught.value.closed.reason is CloseReason.CANCELLED
            await at_rest(both)

    logically(play)
