"""Bindings and permits: one active route per conn_id, everything given back, cleanup that cannot be lost."""

import asyncio

import pytest

from libs.tunnel import (
    ChannelLimits,
    Closed,
    CloseReason,
    Registry,
    Route,
    TooManyRoutesError,
    TunnelEntry,
    never_merge,
)
from libs.tunnel.route import Permit
from tests.tunnel.harness import LIMIT_S, memory, until

DONE = Closed(CloseReason.DONE)


class Owner:
    """Stands for a tunnel where only the id is asked for."""

    def __init__(self, entry: TunnelEntry) -> None:
        self.tunnel_id = entry.tunnel_id


def lease(registry: Registry, entry: TunnelEntry, conn_id: int | None = None) -> Route:
    number = registry.next_conn_id() if conn_id is None else conn_id
    permit = registry.lease()
    return Route(number, Owner(entry), ChannelLimits(), never_merge, 1000, permit)  # type: ignore[arg-type]


def attached(registry: Registry) -> TunnelEntry:
    entry = registry.new_entry(0.0)
    registry.attach(entry)
    return entry


async def test_one_active_route_per_conn_id() -> None:
    async with Registry() as registry:
        one, two = attached(registry), attached(registry)
        route = lease(registry, one, 7)
        registry.bind(one, route)
        second = lease(registry, one, 7)
        with pytest.raises(KeyError):
            registry.bind(one, second)
        second.permit.release()
        # Another peer's process may use the same number.
        other = lease(registry, two, 7)
        registry.bind(two, other)
        assert registry.snapshot().routes == 2
        registry.drop(one, route, DONE, False, 1.0)
        registry.drop(two, other, DONE, False, 1.0)
        await registry.wait_rest(LIMIT_S)


async def test_conn_ids_and_tunnel_ids_are_never_reused() -> None:
    async with Registry() as registry:
        assert len({registry.next_conn_id() for _ in range(1000)} - {0}) == 1000
        first = attached(registry)
        registry.detach(first, DONE, 0.0)
        assert attached(registry).tunnel_id != first.tunnel_id


async def test_drop_is_synchronous_and_idempotent_cleanup_follows() -> None:
    async with Registry() as registry:
        entry = attached(registry)
        route = lease(registry, entry)
        told: list[Closed] = []
        route.on_closed = lambda _route, closed: told.append(closed)
        registry.bind(entry, route)
        assert registry.drop(entry, route, DONE, False, 1.0)
        held = registry.snapshot()
        assert (held.routes, held.bindings, held.permits, held.cleanups) == (0, 1, 1, 1)
        assert entry.routes == {} and entry.idle_since == 1.0
        assert not registry.drop(entry, route, Closed(CloseReason.CANCELLED), False, 2.0)
        await registry.wait_rest(LIMIT_S)
        assert told == [DONE]
        held = registry.snapshot()
        assert (held.routes, held.bindings, held.permits, held.cleanups) == (0, 0, 0, 0)


async def test_a_held_binding_lock_delays_unbinding_and_binding_but_not_the_drop() -> None:
    async with memory() as pair:
        registry = pair.dialing.registry
        near, _ = await pair.open()
        async with registry.binding_lock:
            near.close()
            opening = asyncio.create_task(pair.dialing.tunnel.open(b"x"))
            for _ in range(5):
                await asyncio.sleep(0)
            held = registry.snapshot()
            assert (held.routes, held.bindings, held.permits) == (0, 1, 1)
            assert not opening.done()
        second = await opening
        second.close()
        await registry.wait_rest(LIMIT_S)


async def test_cancelling_an_open_that_waits_for_the_lock_leaks_nothing() -> None:
    async with memory() as pair:
        registry = pair.dialing.registry
        async with registry.binding_lock:
            opening = [asyncio.create_task(pair.dialing.tunnel.open(b"x")) for _ in range(10)]
            await asyncio.sleep(0)
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
        pair.dialing.assert_rest()
        near, _ = await pair.open()
        near.close()


async def test_losing_a_tunnel_ends_each_of_its_routes_once() -> None:
    async with Registry() as registry:
        lost, kept = attached(registry), attached(registry)
        told: list[int] = []
        routes = [lease(registry, lost) for _ in range(1000)]
        other = lease(registry, kept)
        for route in routes:
            route.on_closed = lambda route, _closed: told.append(route.conn_id)
            registry.bind(lost, route)
        registry.bind(kept, other)
        registry.drop(lost, routes[0], DONE, False, 1.0)
        for _ in range(2):
            registry.detach(lost, Closed(CloseReason.PEER_LOST), 2.0)
        await until(lambda: registry.snapshot().permits == 1)
        assert sorted(told) == sorted(route.conn_id for route in routes)
        assert not any(tunnel_id == lost.tunnel_id for tunnel_id, _ in registry.bindings)
        assert registry.counters.routes_closed == {"done": 1, "peer_lost": 999}
        with pytest.raises(KeyError, match="gone"):
            registry.bind(lost, other)
        registry.drop(kept, other, DONE, False, 3.0)


async def test_an_owner_that_raises_costs_nobody_a_permit() -> None:
    async with Registry() as registry:
        entry = attached(registry)

        def fail(_route: Route, _closed: Closed) -> None:
            raise ValueError("planted")

        told: list[int] = []
        for index in range(10):
            route = lease(registry, entry)
            route.on_closed = fail if index % 2 else (lambda route, _closed: told.append(route.conn_id))
            registry.bind(entry, route)
        registry.detach(entry, DONE, 0.0)
        await registry.wait_rest(LIMIT_S)
        assert len(told) == 5 and registry.counters.handler_errors == 5


async def test_no_ceiling_means_none() -> None:
    async with Registry(max_connections=0) as registry:
        entry = attached(registry)
        for _ in range(5000):
            registry.bind(entry, lease(registry, entry))
        registry.detach(entry, DONE, 0.0)
        await registry.wait_rest(LIMIT_S)


async def test_a_ceiling_keeps_headroom_for_cleanup() -> None:
    async with Registry(max_connections=2, cleanup_headroom=2) as registry:
        entry = attached(registry)
        async with registry.binding_lock:
            # Cleanup cannot go on: closed routes still hold their permits.
            for _ in range(4):
                route = lease(registry, entry)
                registry.bind(entry, route)
                registry.drop(entry, route, DONE, False, 0.0)
            assert registry.snapshot().permits == 4
            with pytest.raises(TooManyRoutesError):
                registry.lease()
        await registry.wait_rest(LIMIT_S)
        for _ in range(2):
            registry.bind(entry, lease(registry, entry))
        with pytest.raises(TooManyRoutesError):
            registry.lease()
        registry.detach(entry, DONE, 0.0)
        assert registry.counters.too_many_routes == 2


async def test_leaving_the_registry_finishes_what_is_left() -> None:
    told: list[int] = []
    async with Registry() as registry:
        entry = attached(registry)
        for _ in range(600):
            route = lease(registry, entry)
            route.on_closed = lambda route, _closed: told.append(route.conn_id)
            registry.bind(entry, route)
        registry.detach(entry, DONE, 0.0)
    assert len(told) == 600
    held = registry.snapshot()
    assert (held.routes, held.bindings, held.permits, held.cleanups) == (0, 0, 0, 0)
    with pytest.raises(RuntimeError):
        registry.lease()


def test_a_permit_is_given_back_once() -> None:
    count: list[int] = []
    permit = Permit(lambda: count.append(1))
    permit.release()
    permit.release()
    assert count == [1]
