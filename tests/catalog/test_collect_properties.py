"""Collection under every order of events, races between any two requests and crashes before any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from libs.service.errors import ServiceError
from tests.catalog.memory import Hook
from tests.catalog.world import DAY_MS, HOUR_MS, STREAMS, World

TENANT = st.integers(0, 1)
STREAM = st.integers(0, len(STREAMS) - 1)
BODY = st.sampled_from([b"a", b"b"])
DEPTH = st.integers(0, 4)
# At which of its requests something else happens, and what: (request, kind, tenant, stream, body).
RACES = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(["publish", "pin", "use", "collect"]), TENANT, STREAM, BODY),
    max_size=3,
)


class CrashError(Exception):
    """The process is gone."""


class Collection(RuleBasedStateMachine):
    """`make`: the world; a planted bug makes another."""

    make: Callable[[], World] = World

    def __init__(self) -> None:
        super().__init__()
        self.world = self.make()
        self.loop = asyncio.new_event_loop()

    def teardown(self) -> None:
        try:
            self.run(self.settled())
        finally:
            self.loop.close()

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def other(self, kind: str, tenant: int, stream: int, body: bytes) -> None:
        world = self.world
        chunks = world.chain(tenant, stream, body)
        if kind == "publish":
            world.upload(tenant, chunks)
            await world.publish(chunks, node="node-a")
        elif kind == "pin":
            await world.pin(chunks[-1].hash)
        elif kind == "use":
            await world.use(chunks[-1].hash)
        else:
            try:
                await world.collect()
            except ServiceError:
                return

    def racing(self, races: list[Any], crash_at: int | None = None) -> Hook:
        count = 0
        running = False

        async def hook() -> None:
            nonlocal count, running
            count += 1
            if crash_at == count:
                raise CrashError
            if running:
                return
            running = True
            for at, *what in races:
                if at == count:
                    await self.other(*what)
                    self.world.check()
            running = False

        return hook

    @rule(tenant=TENANT, stream=STREAM, body=BODY, depth=DEPTH, node=st.sampled_from(["", "node-a"]), races=RACES)
    def publish(self, tenant: int, stream: int, body: bytes, depth: int, node: str, races: list[Any]) -> None:
        chunks = self.world.chain(tenant, stream, body)[: depth + 1]
        self.world.upload(tenant, chunks)
        self.run(self.world.publish(chunks, node, self.racing(races)))

    @rule(tenant=TENANT, stream=STREAM, body=BODY)
    def upload_only(self, tenant: int, stream: int, body: bytes) -> None:
        self.world.upload(tenant, self.world.chain(tenant, stream, body))

    @rule(tenant=TENANT, stream=STREAM, body=BODY, depth=DEPTH, races=RACES)
    def publish_what_was_uploaded(self, tenant: int, stream: int, body: bytes, depth: int, races: list[Any]) -> None:
        """A publisher that uploaded long ago and comes back."""
        chunks = self.world.chain(tenant, stream, body)[: depth + 1]
        self.run(self.world.publish(chunks, "", self.racing(races)))

    @rule(tenant=TENANT, stream=STREAM, depth=DEPTH, kind=st.sampled_from(["pin", "unpin", "use"]))
    def mention(self, tenant: int, stream: int, depth: int, kind: str) -> None:
        chunks = self.world.chain(tenant, stream)
        self.run(getattr(self.world, kind)(chunks[min(depth, len(chunks) - 1)].hash))

    @rule(ms=st.sampled_from([60_000, HOUR_MS, DAY_MS, 4 * DAY_MS, 9 * DAY_MS]))
    def time_passes(self, ms: int) -> None:
        self.world.now_ms += ms

    @rule(claim=st.booleans())
    def directory(self, claim: bool) -> None:
        (self.world.claimed.add if claim else self.world.claimed.discard)("node-a")

    @rule(races=RACES)
    def collect(self, races: list[Any]) -> None:
        self.run(self.world.collect(hook=self.racing(races)))

    @rule(crash_at=st.integers(1, 90), races=RACES)
    def collect_and_crash(self, crash_at: int, races: list[Any]) -> None:
        try:
            self.run(self.world.collect(hook=self.racing(races, crash_at)))
        except CrashError:
            self.world.cluster.expire()

    @rule(tenant=TENANT, include_pinned=st.booleans(), races=RACES)
    def purge(self, tenant: int, include_pinned: bool, races: list[Any]) -> None:
        self.run(self.world.purge(tenant, include_pinned, self.racing(races)))

    @rule()
    def a_dry_run_says_what_a_run_does(self) -> None:
        said = self.run(self.world.collect(dry=True))
        done = self.run(self.world.collect())
        assert sorted(map(str, said)) == sorted(map(str, done))

    @invariant()
    def holds(self) -> None:
        self.world.check()

    async def settled(self) -> None:
        """When everything has rested for long, only what is pinned is left, and its bytes."""
        world = self.world
        for _ in range(4):
            world.now_ms += 9 * DAY_MS
            await world.collect()
            world.check()
        chunks = world.chunks()
        wanted = set()
        for hash in world.pins():
            while hash in chunks:
                wanted.add(hash)
                hash = chunks[hash].parent
        assert set(chunks) == wanted
        assert not world.unnamed()
        left = {key for key in world.cluster.keys if key.startswith(world.keys.of_model("garbage"))}
        assert not left


LIMITS = settings(
    max_examples=80, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def test_nothing_is_lost_and_nothing_is_false() -> None:
    run_state_machine_as_test(Collection, settings=LIMITS)


def test_a_collection_that_ends_before_any_request_is_taken_up_by_the_next() -> None:
    """Every crash point in turn, not a sample."""

    async def world_with_garbage() -> World:
        world = World(claimed={"node-a"})
        for tenant in (0, 1):
            for stream in (0, 1, 3):
                chunks = world.chain(tenant, stream)
                world.upload(tenant, chunks)
                assert await world.publish(chunks, "node-a")
        world.upload(0, world.chain(0, 2, b"b"))
        await world.pin(world.chain(1, 1)[1].hash)
        world.now_ms += 2 * DAY_MS
        await world.use(world.chain(0, 0)[1].hash)
        world.now_ms += 2 * DAY_MS
        await world.collect()
        world.now_ms += 2 * DAY_MS
        world.claimed.clear()
        return world

    async def all_of_it() -> int:
        crash_at = 0
        while True:
            crash_at += 1
            world, count = await world_with_garbage(), 0

            async def hook(at: int = crash_at) -> None:
                nonlocal count
                count += 1
                if count == at:
                    raise CrashError

            try:
                await world.collect(hook=hook)
            except CrashError:
                world.check()
                world.cluster.expire()
                await world.collect()
                world.check()
                world.now_ms += HOUR_MS
                await world.collect()
                assert not world.unnamed()
                world.check()
                continue
            return crash_at

    assert asyncio.run(all_of_it()) > 60
