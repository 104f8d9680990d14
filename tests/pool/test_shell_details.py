"""The pool's shell in memory: what tunnels tell it, what it tells its user, live reconfiguration."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from libs.pool.hooks import Hooks
from libs.pool.knobs import PickMode, PoolPolicy
from libs.pool.model import Endpoint, WorkerTarget
from libs.pool.pool import TunnelPool
from libs.pool.readiness import Readiness, State
from libs.tunnel import Carrier, ChannelFullError, Degraded, Handlers, Registry, Side, Tunnel, TunnelConfig
from tests.pool.rig import CALM
from tests.tunnel.carriers import MemoryCarrier, pair
from tests.tunnel.harness import FAST, LIMIT_S

QUIET = replace(CALM, keepalive_s=30)


@dataclass
class Memory:
    """A pool whose tunnels end in this process."""

    pool: TunnelPool
    registry: Registry
    carriers: list[MemoryCarrier] = field(default_factory=list)
    told: list[Readiness] = field(default_factory=list)
    down: bool = False

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # type: ignore[operator]  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@asynccontextmanager
async def memory(policy: PoolPolicy, config: TunnelConfig = FAST) -> AsyncIterator[Memory]:
    made: Memory
    async with Registry() as far, Registry() as registry:

        @asynccontextmanager
        async def dial(_endpoint: Endpoint) -> AsyncIterator[Carrier]:
            if made.down:
                raise OSError("nobody there")
            near, other = pair()
            made.carriers.append(near)
            peer = Tunnel(other, far, Side.ACCEPTING, Handlers(accept=lambda _route, _payload: None), FAST)
            running = asyncio.create_task(peer.run())
            try:
                yield near
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        hooks = Hooks(on_readiness=lambda readiness: made.told.append(readiness))
        pool = TunnelPool(registry, dial, hooks, policy, config=config, chance=random.Random(1))
        made = Memory(pool, registry)
        async with pool:
            pool.observe([Endpoint("w0", "memory:1", ("A",))], 1)
            await made.until(lambda: len(pool.writers()) == policy.writers_per_endpoint)
            yield made


async def test_readiness_is_told() -> None:
    async with memory(QUIET) as made:
        assert [readiness.state for readiness in made.told] == [State.STARTING, State.READY]
        assert await made.pool.wait_ready(LIMIT_S)
        await made.pool.shutdown(0.1)
        assert made.told[-1].state is State.CLOSING
        assert not await made.pool.wait_ready(0.01)


async def test_a_full_writer_passes_the_bind_on() -> None:
    config = replace(FAST, command_items=1)
    async with memory(replace(QUIET, pick_mode=PickMode.ROUND_ROBIN), config) as made:
        # Round robin: every other bind comes to the stopped one first, whose channel the first of them fills.
        made.carriers[0].flowing.clear()
        routes = []
        for _ in range(6):
            routes.append(await made.pool.bind(WorkerTarget("w0"), b"x"))
            await asyncio.sleep(0.01)
        made.carriers[1].flowing.clear()
        routes.append(await made.pool.bind(WorkerTarget("w0"), b"x"))
        with pytest.raises(ChannelFullError):
            await made.pool.bind(WorkerTarget("w0"), b"x")
        assert len({route.tunnel_id for route in routes}) == 2
        for route in routes:
            route.close()
        await made.registry.wait_rest(LIMIT_S)
        assert made.pool.status().pool.bound == 0


async def test_a_degraded_writer_is_seen_and_taken_last() -> None:
    async with memory(QUIET) as made:
        sick, well = made.pool.writers()
        sick.tunnel.health.mark(Degraded.PING_SLOW)
        await made.until(lambda: made.pool.status().pool.degraded == {"ping_slow": 1})
        for _ in range(10):
            route = await made.pool.bind(WorkerTarget("w0"), b"x")
            assert route.tunnel_id == well.tunnel.tunnel_id
            route.close()
        await made.registry.wait_rest(LIMIT_S)


async def test_knobs_of_a_tunnel_reach_live_ones() -> None:
    async with memory(QUIET) as made:
        made.pool.set_policy(replace(QUIET, keepalive_s=0.02, keepalive_jitter_s=0, route_items=16, max_connections=5))
        writer = made.pool.writers()[0]
        assert writer.tunnel.config.ping_interval_s == 0.02
        assert writer.tunnel.config.route.max_items == 16
        assert made.registry.max_connections == 5
        before = writer.tunnel.health.last_rtt
        await made.until(lambda: writer.tunnel.health.last_rtt != before)
        with pytest.raises(ValueError, match="frame limits"):
            writer.tunnel.reconfigure(replace(writer.tunnel.config, max_items=1))


async def test_a_hook_that_raises_costs_nobody_a_tunnel() -> None:
    async with memory(QUIET) as made:

        def raises(_readiness: Readiness) -> None:
            raise ZeroDivisionError

        made.pool._hooks = replace(made.pool._hooks, on_readiness=raises)
        await made.pool.shutdown(0.1)
        assert made.registry.counters.handler_errors >= 1
        assert not made.pool.writers()


async def test_a_probe_brings_a_quarantined_endpoint_back() -> None:
    policy = replace(
        QUIET,
        outage_mode=False,
        quarantine_failures=2,
        quarantine_s=1000,
        fast_retries=0,
        reconnect_min_s=0.01,
        reconnect_max_s=0.01,
        probe_interval_s=0.01,
    )
    async with memory(policy) as made:
        made.down = True
        for carrier in made.carriers:
            carrier.cancel()
        await made.until(lambda: made.pool.status().pool.quarantined == 1)
        await made.until(lambda: made.pool.status().pool.probes >= 1)
        assert not made.pool.writers()
        made.down = False
        await made.until(lambda: len(made.pool.writers()) == 2)
        assert made.pool.status().pool.quarantined == 0
