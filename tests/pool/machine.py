"""The pool's core under random events, every retry and recovery strategy on, its invariants checked at each step."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.pool.events import (
    BeginShutdown,
    CommitGeneration,
    DrainWorker,
    End,
    HealthChanged,
    Identified,
    SetPolicy,
    SwapGeneration,
    Tick,
)
from libs.pool.generation import GenerationKey
from libs.pool.knobs import FloorMode, NoCoverage, PickMode, PoolPolicy, StaleMode
from libs.pool.model import CellTarget, Endpoint, WorkerTarget
from tests.pool.invariants import Watch
from tests.pool.world import Session, World, endpoint

# Every strategy on, every time short: much happens in few steps.
BUSY = PoolPolicy(
    outage_mode=True,
    cell_refill=True,
    shadow_writers=1,
    shadow_rotation_s=20,
    probes=True,
    probe_interval_s=5,
    replace_degraded_s=3,
    fast_retries=1,
    quarantine_failures=3,
    quarantine_s=5,
    flap_s=5,
    idle_s=5,
    recovery_grace_s=5,
    drain_ttl_s=5,
    force_close_s=10,
    drain_threshold=3,
    stale_ttl_s=5,
    pending_ttl_s=30,
    reinit_interval_s=40,
    vanish_grace_s=10,
    map_unsettled_s=2,
    reconnect_max_s=2,
)
# Endpoints of which some share cells, some are alone in one, and one worker is reached both ways.
ENDPOINTS = (
    endpoint(0, "A"),
    endpoint(1, "A", "B"),
    endpoint(2, "B"),
    endpoint(3, "C"),
    endpoint(0, "A", host="[::1]"),
    endpoint(4, "A", "C"),
)
WORKERS = st.sampled_from([f"w{index}" for index in range(5)])
INDEXES = st.sampled_from(range(len(ENDPOINTS)))


class PoolMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(listed=st.sets(INDEXES, min_size=2))
    def start(self, listed: set[int]) -> None:
        self.world = World(BUSY)
        self.watch = Watch(self.world)
        self.incarnations = [1] * len(ENDPOINTS)
        self.keys: list[GenerationKey] = []
        self.over = False
        self.read(listed)
        self.world.run(0.5)

    # --- the map ---

    def listed(self, indexes: set[int]) -> list[Endpoint]:
        return [replace(ENDPOINTS[index], incarnation=self.incarnations[index]) for index in sorted(indexes)]

    def read(self, indexes: set[int]) -> None:
        self.world.read(*self.listed(indexes))

    @rule(indexes=st.sets(INDEXES))
    def map_read(self, indexes: set[int]) -> None:
        self.read(indexes)

    @rule(indexes=st.sets(INDEXES, min_size=3))
    def map_settles(self, indexes: set[int]) -> None:
        self.read(indexes)
        self.world.run(1)

    @rule()
    def map_is_empty(self) -> None:
        self.read(set())

    @rule(index=INDEXES)
    def process_replaced(self, index: int) -> None:
        """The old process is gone, its tunnels with it; a new one is listed."""
        self.incarnations[index] += 1
        key = ENDPOINTS[index].key
        self.world.fail(key)
        self.world.up[key] = True
        self.read({i for i, e in enumerate(ENDPOINTS) if any(e.key == m.key for m in self.world.map)} | {index})

    # --- the network ---

    @rule(index=INDEXES, up=st.booleans())
    def endpoint_changes(self, index: int, up: bool) -> None:
        self.world.fail(ENDPOINTS[index].key, up)

    @rule(data=st.data(), end=st.sampled_from([End.LOST, End.LOST, End.IDLE, End.LEAVING]))
    def writer_ends(self, data: st.DataObject, end: End) -> None:
        if self.world.tunnels:
            self.world.end(data.draw(st.sampled_from(sorted(self.world.tunnels))), end)

    @rule(data=st.data())
    def dial_given_up(self, data: st.DataObject) -> None:
        if self.world.dials:
            self.world.give_up(data.draw(st.sampled_from(sorted(self.world.dials))))

    @rule(data=st.data(), sick=st.booleans())
    def health(self, data: st.DataObject, sick: bool) -> None:
        if self.world.tunnels:
            writer = data.draw(st.sampled_from(sorted(self.world.tunnels)))
            self.world.feed(HealthChanged(writer, frozenset({"ping_slow"} if sick else ())))

    @rule(data=st.data())
    def identified(self, data: st.DataObject) -> None:
        if self.world.tunnels:
            writer = data.draw(st.sampled_from(sorted(self.world.tunnels)))
            self.world.feed(Identified(writer, self.world.tunnels[writer].endpoint.incarnation))

    # --- time ---

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.5, 2.0, 7.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    # --- operators ---

    @rule()
    def swap(self) -> None:
        self.world.feed(SwapGeneration())

    @rule(index=INDEXES, mode=st.sampled_from([StaleMode.TTL, StaleMode.ALWAYS]), ratio=st.sampled_from([0.0, 0.5]))
    def swap_over_a_hole(self, index: int, mode: StaleMode, ratio: float) -> None:
        """An endpoint takes no new tunnels while its old ones stand: a commit that may goes without it."""
        self.world.up[ENDPOINTS[index].key] = False
        self.world.feed(SetPolicy(replace(self.world.core.policy, min_fresh_ratio=ratio, stale_mode=mode)))
        self.world.feed(SwapGeneration())
        self.world.run(1)

    @rule(worker=WORKERS, drained=st.booleans())
    def drain(self, worker: str, drained: bool) -> None:
        self.world.feed(DrainWorker(worker, drained=drained))

    @rule(
        change=st.fixed_dictionaries(
            {},
            optional={
                "floor_mode": st.sampled_from(FloorMode),
                "stale_mode": st.sampled_from(StaleMode),
                "pick_mode": st.sampled_from(PickMode),
                "no_coverage": st.sampled_from(NoCoverage),
                "close_covered": st.booleans(),
                "writers_per_endpoint": st.integers(1, 3),
                "survivability_min": st.integers(1, 2),
                "writers_max": st.sampled_from([0, 4]),
                "min_fresh_ratio": st.sampled_from([0.0, 0.5, 0.8, 1.0]),
                "cell_refill": st.booleans(),
                "shadow_writers": st.integers(0, 2),
                "probes": st.booleans(),
                "replace_degraded_s": st.sampled_from([0.0, 3.0]),
            },
        )
    )
    def policy(self, change: dict[str, object]) -> None:
        self.world.feed(SetPolicy(replace(self.world.core.policy, **change)))  # type: ignore[arg-type]

    @rule(automatic=st.booleans())
    def commits_are_held_up(self, automatic: bool) -> None:
        """The shell waits for the guard, or was cancelled on the way to it."""
        self.world.auto_commit = automatic
        self.keys += [ready.commit for ready in self.world.ready if ready.commit is not None][-3:]

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def late_commit(self, data: st.DataObject) -> None:
        self.world.feed(CommitGeneration(data.draw(st.sampled_from(self.keys))))

    # --- routes ---

    @rule(times=st.integers(1, 4), worker=WORKERS, cell=st.sampled_from(["", "A", "B", "C"]))
    def bind(self, times: int, worker: str, cell: str) -> None:
        for _ in range(times):
            self.world.bind(CellTarget(cell) if cell else WorkerTarget(worker))

    def chosen(self, data: st.DataObject) -> Session | None:
        live = [session for session in self.world.sessions if session.route.closed is None]
        return live[data.draw(st.integers(0, len(live) - 1))] if live else None

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        session = self.chosen(data)
        if session is not None:
            self.world.consume(session)
            self.world.finish(session)

    @rule(data=st.data())
    def consumer_stops(self, data: st.DataObject) -> None:
        session = self.chosen(data)
        if session is not None:
            session.stopped = True

    @rule(tokens=st.sampled_from([1, 5, 40]), rests=st.booleans())
    def iterations(self, tokens: int, rests: bool) -> None:
        """A token for every open route, each iteration one frame for each tunnel; consumers keep up, or rest at first,
        or stand still for good."""
        for number in range(tokens):
            live = [session for session in self.world.sessions if session.route.closed is None]
            self.world.deliver((session, bytes([number])) for session in live)
            for session in live:
                if not rests or number == min(tokens, 7) - 1 or number > 7:
                    self.world.consume(session)

    @rule(worker=WORKERS)
    def flood(self, worker: str) -> None:
        """Three at one worker: one consumer stops, one rests and comes back, one keeps up; tokens for all."""
        bound = [self.world.bind(WorkerTarget(worker)) for _ in range(3)]
        sessions = [session for session in bound if session is not None]
        if len(sessions) < 3:
            return
        sessions[0].stopped = True
        for number in range(45):
            self.world.deliver((session, bytes([number])) for session in sessions)
            for session in sessions[1 if number % 12 == 11 else 2 :]:
                self.world.consume(session)
        assert sessions[0].route.closed is not None
        # Who rests comes back before any time passes: one that does not has stopped.
        for session in sessions[1:]:
            self.world.consume(session)

    @rule(seconds=st.sampled_from([0.0, 0.02]))
    def cancels_take_time(self, seconds: float) -> None:
        self.world.cancel_s = seconds

    @precondition(lambda self: not self.over)
    @rule(grace=st.sampled_from([0.0, 5.0]), sure=st.integers(0, 9))
    def shutdown(self, grace: float, sure: int) -> None:
        if not sure:
            self.over = True
            self.world.feed(BeginShutdown(grace))
            assert self.world.bind(CellTarget("A")) is None

    # --- what must hold ---

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.settle()
        self.watch.bindings()
        self.watch.counts()
        self.watch.no_dangling()
        self.watch.tokens()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        try:
            for session in world.sessions:
                session.stopped = False
                world.consume(session)
                world.finish(session)
            world.assert_rest()
            if self.over:
                world.run(60)
                assert not world.records
                assert world.ready[-1].released or any(ready.released for ready in world.ready)
            else:
                self.recovers()
        finally:
            world.close()

    def recovers(self) -> None:
        """With everything well again, the pool comes back to what its map and policy ask for."""
        world = self.world
        world.auto_commit = True
        for key in list(world.up):
            world.up[key] = True
        for worker in range(5):
            world.feed(DrainWorker(f"w{worker}", drained=False))
        world.feed(SetPolicy(replace(BUSY, floor_mode=FloorMode.STATIC, reinit_interval_s=0, shadow_writers=0)))
        self.read(set(range(len(ENDPOINTS))))
        world.run(60)
        world.feed(Tick())
        assert world.core.readiness.ready
        assert world.core.books.generations.pending is None
        for entry in ENDPOINTS:
            sick = any(record.degraded for record in world.active(entry.key))
            assert len(world.active(entry.key)) >= 2 or sick
        world.assert_rest()
