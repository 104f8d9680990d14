"""The registry: what is delayed, foreign or old changes nothing; a lost tunnel is not a lost worker."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.controller.discovery import AskSnapshot, Elect, Forgotten, Observed, Registry, Rejection, RoutesEnded
from libs.controller.protocol import Heartbeat
from libs.controller.router_events import Loss, WorkerUnavailable


def beat(sequence: int, epoch: int = 1, worker: str = "w", **kw: object) -> Heartbeat:
    return Heartbeat(worker, epoch, sequence, **kw)  # type: ignore[arg-type]


def kinds(effects: list[object]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_the_first_tunnel_is_elected_and_a_snapshot_comes_first() -> None:
    r = Registry()
    assert r.opened(1, "w", 0) == [Elect(1, 1), AskSnapshot(1)]
    assert kinds(r.heard(1, beat(1), 1)) == ["AskSnapshot", "Observed"]
    effects = r.heard(1, beat(2, snapshot=True), 2)
    assert effects == [Observed(beat(2, snapshot=True), True, True)]
    assert r.heard(1, beat(3), 3) == [Observed(beat(3), False, True)]


def test_a_gap_resets_residency_until_a_snapshot_comes() -> None:
    r = Registry()
    r.opened(1, "w", 0)
    r.heard(1, beat(1, snapshot=True), 1)
    effects = r.heard(1, beat(3), 2)
    assert effects == [AskSnapshot(1), Observed(beat(3), True, False)]
    assert kinds(r.heard(1, beat(4), 3)) == ["AskSnapshot", "Observed"]
    assert r.heard(1, beat(5, snapshot=True), 4) == [Observed(beat(5, snapshot=True), True, True)]


def test_delayed_foreign_and_unreadable_heartbeats_are_counted_and_change_nothing() -> None:
    r = Registry()
    r.opened(1, "w", 0)
    r.heard(1, beat(5, epoch=3, snapshot=True), 1)
    for tunnel, value, reason in (
        (9, beat(6, 3), Rejection.UNKNOWN_TUNNEL),
        (1, beat(6, 3, "other"), Rejection.OTHER_WORKER),
        (1, beat(6, 2), Rejection.OLD_EPOCH),
        (1, beat(5, 3), Rejection.OLD_SEQUENCE),
        (1, beat(4, 3), Rejection.OLD_SEQUENCE),
        (1, beat(6, 3, version=2), Rejection.UNKNOWN_VERSION),
    ):
        before = r.rejected[reason]
        assert r.heard(tunnel, value, 2) == []
        assert r.rejected[reason] == before + 1
    record = r.record("w")
    assert record is not None and record.sequence == 5 and record.heard_ms == 1


def test_losing_one_of_two_tunnels_ends_its_routes_and_elects_the_other() -> None:
    r = Registry()
    r.opened(1, "w", 0, epoch=1)
    assert r.opened(2, "w", 0, epoch=1) == []
    r.heard(1, beat(1, snapshot=True), 1)
    assert r.closed(1, 2) == [RoutesEnded(1), Elect(2, 2), AskSnapshot(2)]
    assert r.tunnel_to("w", 1) == 2
    assert r.closed(2, 3) == [Forgotten("w", 1), WorkerUnavailable("w", 1, Loss.PROCESS)]
    assert r.record("w") is None and r.tunnel_to("w", 1) is None


def test_an_orderly_close_is_no_loss() -> None:
    r = Registry()
    r.opened(1, "w", 0, epoch=1)
    assert r.closed(1, 1, orderly=True)[-1] == WorkerUnavailable("w", 1, Loss.RETIRED)


def test_a_new_process_replaces_the_old_and_the_old_tunnel_cannot_undo_it() -> None:
    r = Registry()
    r.opened(1, "w", 0, epoch=1)
    r.heard(1, beat(1, snapshot=True), 1)
    effects = r.opened(2, "w", 2, epoch=2)
    assert effects[:2] == [Forgotten("w", 1), WorkerUnavailable("w", 1, Loss.PROCESS)]
    r.heard(2, beat(1, epoch=2, snapshot=True), 3)
    assert r.heard(1, beat(2, epoch=1), 4) == []
    assert r.closed(1, 5) == [RoutesEnded(1)]
    record = r.record("w")
    assert record is not None and record.epoch == 2 and record.tunnels == [2]


def test_a_stale_map_is_corrected_by_the_first_heartbeat() -> None:
    r = Registry()
    r.opened(1, "w", 0, epoch=1)
    effects = r.heard(1, beat(1, epoch=2, snapshot=True), 1)
    assert WorkerUnavailable("w", 1, Loss.PROCESS) in effects
    record = r.record("w")
    assert record is not None and record.epoch == 2 and record.tunnels == [1] and record.elected == 1
    assert r.closed(1, 2)[-1] == WorkerUnavailable("w", 2, Loss.PROCESS)


def test_a_tunnel_opened_under_an_old_epoch_joins_the_process_it_turns_out_to_lead_to() -> None:
    r = Registry()
    r.opened(1, "w", 0, 1)
    r.opened(2, "w", 0, 1)
    r.heard(1, beat(1, 2, snapshot=True), 1)  # the map was behind
    assert r.joined(2, 2) == [] and r.joined(2, 2) == []
    record = r.record("w")
    assert record is not None and (record.epoch, record.tunnels, record.elected) == (2, [1, 2], 1)
    # So the loss of the one that spoke is no loss of the process.
    assert r.closed(1, 2) == [RoutesEnded(1), Elect(2, 3), AskSnapshot(2)]
    for tunnel, epoch in ((9, 2), (2, 1), (2, 3)):
        assert r.joined(tunnel, epoch) == []
    assert r.record("w") is record and record.tunnels == [2]


def test_silence_is_a_loss_once_and_speech_brings_it_back() -> None:
    r = Registry()
    r.opened(1, "w", 0, epoch=1)
    r.heard(1, beat(1, snapshot=True), 1_000)
    assert r.tick(5_999) == []
    assert r.tick(6_000) == [Forgotten("w", 1), WorkerUnavailable("w", 1, Loss.SILENCE)]
    assert r.tick(7_000) == []
    assert kinds(r.heard(1, beat(2), 8_000)) == ["AskSnapshot", "Observed"]


def test_a_tunnel_that_is_up_but_never_speaks_expires() -> None:
    r = Registry()
    r.opened(1, "w", 0, epoch=1)
    assert r.tick(5_000)[-1] == WorkerUnavailable("w", 1, Loss.SILENCE)


class RegistryMachine(RuleBasedStateMachine):
    """Random tunnels and heartbeats: a known process never vanishes without a word, epochs only grow."""

    def __init__(self) -> None:
        super().__init__()
        self.r = Registry()
        self.now = 0.0
        self.tunnels = 0
        self.open: dict[int, str] = {}
        self.newest: dict[str, int] = {}
        self.known: Counter[tuple[str, int]] = Counter()
        self.sequences: dict[tuple[str, int], int] = {}

    def take(self, effects: list[object]) -> None:
        for effect in effects:
            match effect:
                case Observed(value, _, _):
                    key = (value.worker, value.epoch)
                    assert value.epoch >= self.newest.get(value.worker, 0)
                    assert value.sequence > self.sequences.get(key, 0)
                    self.newest[value.worker] = value.epoch
                    self.sequences[key] = value.sequence
                    self.known[key] = 1
                case WorkerUnavailable(worker, epoch, _):
                    self.known[worker, epoch] = 0
                    self.sequences.pop((worker, epoch), None)

    @rule(worker=st.sampled_from("ab"), epoch=st.integers(0, 3))
    def up(self, worker: str, epoch: int) -> None:
        self.tunnels += 1
        self.open[self.tunnels] = worker
        self.take(self.r.opened(self.tunnels, worker, self.now, epoch))  # type: ignore[arg-type]

    @rule(choice=st.integers(0, 99), orderly=st.booleans())
    def down(self, choice: int, orderly: bool) -> None:
        if self.open:
            tunnel = sorted(self.open)[choice % len(self.open)]
            del self.open[tunnel]
            self.take(self.r.closed(tunnel, self.now, orderly))  # type: ignore[arg-type]

    @rule(choice=st.integers(0, 99), epoch=st.integers(1, 3), sequence=st.integers(1, 9), snapshot=st.booleans())
    def speak(self, choice: int, epoch: int, sequence: int, snapshot: bool) -> None:
        if self.open:
            tunnel = sorted(self.open)[choice % len(self.open)]
            value = beat(sequence, epoch, self.open[tunnel], snapshot=snapshot)
            self.take(self.r.heard(tunnel, value, self.now))  # type: ignore[arg-type]

    @rule(ms=st.integers(1, 6_000))
    def wait(self, ms: int) -> None:
        self.now += ms
        self.take(self.r.tick(self.now))  # type: ignore[arg-type]

    @invariant()
    def bound(self) -> None:
        for record in self.r.records():
            assert record.tunnels, "a worker without a tunnel"
            assert record.elected in record.tunnels
            assert all(self.open.get(tunnel) == record.worker for tunnel in record.tunnels)
        live = {(record.worker, record.epoch) for record in self.r.records() if not record.silent}
        for key, count in self.known.items():
            assert not count or key in live, f"{key} vanished without a word"


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_pause_of_the_router_itself_is_no_silence_of_its_workers() -> None:
    r = Registry()
    r.opened(1, "w", 0)
    r.heard(1, beat(1, snapshot=True), 1_000)
    for now in (1_500, 2_000, 2_500):
        assert r.tick(now) == []
    # Stopped for a minute. The heartbeats of that time are read after the timer has fired.
    assert r.tick(62_500) == []
    assert kinds(r.heard(1, beat(2), 62_501)) == ["Observed"]
    # A worker that is silent while the router runs is still found, and not much later.
    last = 62_500
    while not (found := r.tick(last)):
        last += 500
        assert last < 70_000
    assert found == [Forgotten("w", 1), WorkerUnavailable("w", 1, Loss.SILENCE)] and last - 62_501 < 5_500
