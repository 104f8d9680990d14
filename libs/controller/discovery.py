"""The discovery registry: which worker processes there are, as their tunnels and heartbeats say. Pure.

Theory of operation
===================

A *pair* is this router and one worker process (worker id, epoch). A pair may have several tunnels; exactly one of
them is *elected* to carry its heartbeats. Heartbeats are numbered once per pair, without gaps; the worker sends them
on the tunnel of the highest term it has heard.

- A heartbeat counts only if its tunnel is bound to the worker, its epoch is the newest known for the worker and its
sequence
  is above the last one: what is delayed or comes from an old process changes nothing.
- It is bound to the exact tunnel that carried it. A tunnel of an old epoch can neither remove nor replace a newer one's
  routes: losing it ends what runs on it and no more.
- Resident prefixes travel as changes. After a gap, on a new pair and after an election the registry asks for a
snapshot;
  until it comes the pair's residency is unknown, not stale.
- A worker is unavailable when the epoch's last tunnel is gone (a lost process, at once), when its heartbeats expire
  (silence), or when a newer epoch shows up (the old process is gone). An orderly close is a retirement.

The endpoint map and its grace period belong to the pool; the registry only keeps `listed` for display.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from libs.controller.knobs import DISCOVERY_KNOBS, DiscoveryKnobs
from libs.controller.protocol import Heartbeat
from libs.controller.router_events import Loss, WorkerUnavailable


@dataclass(frozen=True, slots=True)
class Elect:
    """Send `ElectTunnel(term)` on this tunnel."""

    tunnel: int
    term: int


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Send `SnapshotRequest` on this tunnel."""

    tunnel: int


@dataclass(frozen=True, slots=True)
class Observed:
    """An accepted heartbeat: the residency index and the policy's observations take it. `reset`: forget what was known
    of this worker's resident prefixes first. `apply_resident` is False while a snapshot is awaited."""

    heartbeat: Heartbeat
    reset: bool
    apply_resident: bool


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The worker process is gone: forget its observations and residency."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RoutesEnded:
    """A tunnel is gone, its worker process is not: feed `RouteDropped` for each of this tunnel's routes."""

    tunnel: int


DiscoveryEffect = Elect | AskSnapshot | Observed | Forgotten | RoutesEnded | WorkerUnavailable


class Rejection(Enum):
    """Why a heartbeat or a tunnel event changed nothing."""

    UNKNOWN_TUNNEL = "unknown-tunnel"
    OTHER_WORKER = "other-worker"
    OLD_EPOCH = "old-epoch"
    OLD_SEQUENCE = "old-sequence"
    UNKNOWN_VERSION = "unknown-version"
    KNOWN_TUNNEL = "known-tunnel"


@dataclass(slots=True)
class WorkerRecord:
    """What is known of one worker process."""

    worker: str
    epoch: int
    tunnels: list[int]  # in the order they opened
    elected: int | None = None
    sequence: int = 0
    heard_ms: float = 0.0
    heartbeat: Heartbeat | None = None
    awaiting_snapshot: bool = True
    silent: bool = False


class Registry:
    """See the module. Times in ms on the caller's monotonic clock; tunnels are the shell's numbers, never reused."""

    def __init__(self, knobs: DiscoveryKnobs = DISCOVERY_KNOBS) -> None:
        self.knobs = knobs
        self.rejected: Counter[Rejection] = Counter()
        self._workers: dict[str, WorkerRecord] = {}  # the newest epoch's
        self._tunnels: dict[int, tuple[str, int]] = {}  # tunnel -> (worker, epoch); epoch 0 until heard
        self._newest: dict[str, int] = {}  # highest epoch heard or dialled, also of workers now gone
        self._listed: set[str] = set()
        self._terms = 0
        self._ticked_ms: float | None = None

    # --- what a shell may read ---

    def record(self, worker: str) -> WorkerRecord | None:
        """The worker's newest process, if a tunnel or heartbeat of it is known."""
        return self._workers.get(worker)

    def records(self) -> tuple[WorkerRecord, ...]:
        """All, by worker id."""
        return tuple(self._workers[name] for name in sorted(self._workers))

    def listed(self, worker: str) -> bool:
        """Whether the worker is in the current endpoint map."""
        return worker in self._listed

    def tunnel_to(self, worker: str, epoch: int) -> int | None:
        """A tunnel to that process: the elected one, else the oldest; None if there is none."""
        record = self._workers.get(worker)
        if record is None or record.epoch != epoch or not record.tunnels:
            return None
        return record.elected if record.elected is not None else record.tunnels[0]

    # --- events ---

    def set_listed(self, workers: frozenset[str]) -> None:
        """The current endpoint map's workers."""
        self._listed = set(workers)

    def opened(self, tunnel: int, worker: str, now_ms: float, epoch: int = 0) -> list[DiscoveryEffect]:
        """A tunnel to `worker` is up. `epoch` as the endpoint map had it; 0 = its first heartbeat will tell."""
        if tunnel in self._tunnels:
            self.rejected[Rejection.KNOWN_TUNNEL] += 1
            return []
        record = self._workers.get(worker)
        if 0 < epoch < self._newest.get(worker, 0):
            # A stale map led to a process that has been replaced: the tunnel is known, but gets no part in the pair.
            self._tunnels[tunnel] = (worker, epoch)
            self.rejected[Rejection.OLD_EPOCH] += 1
            return []
        out: list[DiscoveryEffect] = []
        if epoch == 0 and record is not None:
            epoch = record.epoch
        if record is None or epoch > record.epoch:
            record = self._replace(worker, epoch, now_ms, out)
        self._tunnels[tunnel] = (worker, epoch)
        record.tunnels.append(tunnel)
        if record.elected is None:
            self._elect(record, out)
        return out

    def joined(self, tunnel: int, epoch: int) -> list[DiscoveryEffect]:
        """A tunnel opened under another epoch is now known to lead to the worker's newest process, which is this."""
        worker, before = self._tunnels.get(tunnel, ("", 0))
        record = self._workers.get(worker)
        if record is None or record.epoch != epoch or before >= epoch or tunnel in record.tunnels:
            return []
        self._tunnels[tunnel] = (worker, epoch)
        record.tunnels.append(tunnel)
        out: list[DiscoveryEffect] = []
        if record.elected is None:
            self._elect(record, out)
        return out

    def closed(self, tunnel: int, now_ms: float, orderly: bool = False) -> list[DiscoveryEffect]:
        """A tunnel is gone; `orderly` if it was retired and not lost."""
        bound = self._tunnels.pop(tunnel, None)
        if bound is None:
            self.rejected[Rejection.UNKNOWN_TUNNEL] += 1
            return []
        worker, epoch = bound
        record = self._workers.get(worker)
        if record is None or record.epoch != epoch or tunnel not in record.tunnels:
            self.rejected[Rejection.OLD_EPOCH] += 1
            return [RoutesEnded(tunnel)]
        record.tunnels.remove(tunnel)
        if not record.tunnels:
            del self._workers[worker]
            loss = Loss.RETIRED if orderly else Loss.PROCESS
            return [Forgotten(worker, epoch), WorkerUnavailable(worker, epoch, loss)]
        out: list[DiscoveryEffect] = [RoutesEnded(tunnel)]
        if record.elected == tunnel:
            self._elect(record, out)
        return out

    def heard(self, tunnel: int, heartbeat: Heartbeat, now_ms: float) -> list[DiscoveryEffect]:
        """A heartbeat arrived on a tunnel."""
        bound = self._tunnels.get(tunnel)
        rejection = self._rejection(bound, heartbeat)
        if rejection is not None or bound is None:
            self.rejected[rejection or Rejection.UNKNOWN_TUNNEL] += 1
            return []
        out: list[DiscoveryEffect] = []
        record = self._workers.get(heartbeat.worker)
        if record is None or heartbeat.epoch > record.epoch:
            # The tunnel leads to a newer process than the map said.
            if record is not None and tunnel in record.tunnels:
                record.tunnels.remove(tunnel)
            record = self._replace(heartbeat.worker, heartbeat.epoch, now_ms, out)
        if tunnel not in record.tunnels:
            self._tunnels[tunnel] = (heartbeat.worker, heartbeat.epoch)
            record.tunnels.append(tunnel)
        if record.elected is None:
            self._elect(record, out)
        gap = heartbeat.sequence != record.sequence + 1
        reset = heartbeat.snapshot or gap
        if heartbeat.snapshot:
            record.awaiting_snapshot = False
        elif gap or record.awaiting_snapshot:
            record.awaiting_snapshot = True
            out.append(AskSnapshot(tunnel))
        record.sequence = heartbeat.sequence
        record.heard_ms, record.silent = now_ms, False
        record.heartbeat = heartbeat
        out.append(Observed(heartbeat, reset, not record.awaiting_snapshot))
        return out

    def tick(self, now_ms: float) -> list[DiscoveryEffect]:
        """Expires silent workers; call it at least once per heartbeat interval.

        Time in which this process itself stood still (stopped, swapped out, starved) is no silence of the workers:
        their heartbeats lie unread. What a pause between two ticks exceeds that interval by counts for nobody.
        """
        out: list[DiscoveryEffect] = []
        paused_ms = 0.0 if self._ticked_ms is None else now_ms - self._ticked_ms - self.knobs.heartbeat_ms
        self._ticked_ms = now_ms
        if paused_ms > 0:
            for record in self._workers.values():
                record.heard_ms = min(now_ms, record.heard_ms + paused_ms)
        for name in sorted(self._workers):
            record = self._workers[name]
            if not record.silent and now_ms - record.heard_ms >= self.knobs.expiry_ms:
                # Its tunnels stay: should it speak again, it is welcome, with a snapshot first.
                record.silent, record.awaiting_snapshot, record.heartbeat = True, True, None
                out += [Forgotten(name, record.epoch), WorkerUnavailable(name, record.epoch, Loss.SILENCE)]
        return out

    # --- parts ---

    def _rejection(self, bound: tuple[str, int] | None, heartbeat: Heartbeat) -> Rejection | None:
        if bound is None:
            return Rejection.UNKNOWN_TUNNEL
        if heartbeat.version != 1:
            return Rejection.UNKNOWN_VERSION
        worker, epoch = bound
        if heartbeat.worker != worker:
            return Rejection.OTHER_WORKER
        record = self._workers.get(worker)
        if heartbeat.epoch < max(self._newest.get(worker, 0), epoch):
            return Rejection.OLD_EPOCH
        if record is not None and heartbeat.epoch == record.epoch and heartbeat.sequence <= record.sequence:
            return Rejection.OLD_SEQUENCE
        return None

    def _replace(self, worker: str, epoch: int, now_ms: float, out: list[DiscoveryEffect]) -> WorkerRecord:
        """A new process's record; the old one, if any, is a lost process. (Epochs follow each other only so.)"""
        old = self._workers.get(worker)
        self._newest[worker] = max(epoch, self._newest.pop(worker, 0))
        if len(self._newest) > self.knobs.workers_remembered:
            del self._newest[next(iter(self._newest))]
        if old is not None and old.epoch > 0:
            out += [Forgotten(worker, old.epoch), WorkerUnavailable(worker, old.epoch, Loss.PROCESS)]
        record = WorkerRecord(worker, epoch, [], heard_ms=now_ms)
        if old is not None and old.epoch == 0:
            # Tunnels that waited to hear their epoch: they led to this process.
            record.tunnels, record.elected = old.tunnels, old.elected
            for tunnel in old.tunnels:
                self._tunnels[tunnel] = (worker, epoch)
        self._workers[worker] = record
        return record

    def _elect(self, record: WorkerRecord, out: list[DiscoveryEffect]) -> None:
        """The oldest tunnel carries the heartbeats from now on; a snapshot comes first."""
        self._terms += 1
        record.elected = record.tunnels[0]
        record.awaiting_snapshot = True
        out += [Elect(record.elected, self._terms), AskSnapshot(record.elected)]
