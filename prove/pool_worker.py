"""A pool's tunnels to a worker of ours, in this process: what it holds for an assignment, and the heartbeats on several
tunnels of one router, with the worker's own sender and the router's registry of who is elected.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from libs.controller.discovery import AskSnapshot, DiscoveryEffect, Elect, Observed
from libs.controller.discovery import Registry as Discovery
from libs.controller.merging import merge_deltas
from libs.controller.protocol import ElectTunnel, Heartbeat, SnapshotRequest
from libs.controller.wire import TunnelCodec
from libs.pool.hooks import Hooks, Loss, Writer
from libs.pool.knobs import PoolPolicy
from libs.pool.model import Endpoint, WorkerTarget
from libs.pool.pool import TunnelPool
from libs.service.channel import open_channel
from libs.service.transport import Transport
from libs.tunnel import Carrier, Closed, CloseReason, Registry, Route, Tunnel, TunnelClosedError
from libs.tunnel.grpc_carrier import dial
from tests.worker import rig as worker_rig

ROUTER = "router-1"


@dataclass
class Hearing:
    """What the router's end has heard. `taken`: accepted heartbeats, as (tunnel, sequence)."""

    pool: TunnelPool = field(init=False)
    discovery: Discovery = field(default_factory=Discovery)
    codec: TunnelCodec = field(default_factory=TunnelCodec)
    tunnels: dict[int, Tunnel] = field(default_factory=dict)
    heard: list[tuple[int, int]] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)
    elections: Counter[int] = field(default_factory=Counter)

    @property
    def elected(self) -> int | None:
        """The tunnel that carries them now."""
        record = self.discovery.record("w")
        return record.elected if record is not None else None

    def up(self, writer: Writer) -> None:
        """The pool has a tunnel."""
        self.tunnels[writer.tunnel.tunnel_id] = writer.tunnel
        self._obey(self.discovery.opened(writer.tunnel.tunnel_id, "w", _ms()))

    def lost(self, writer: Writer, loss: Loss) -> None:
        """The pool has lost it."""
        del self.tunnels[writer.tunnel.tunnel_id]
        self._obey(self.discovery.closed(writer.tunnel.tunnel_id, _ms(), loss.orderly))

    def control(self, tunnel: Tunnel, payload: bytes) -> None:
        """A heartbeat came on it."""
        beat = self.codec.decode(payload)
        assert isinstance(beat, Heartbeat)
        self.heard.append((tunnel.tunnel_id, beat.sequence))
        effects = self.discovery.heard(tunnel.tunnel_id, beat, _ms())
        if any(isinstance(effect, Observed) for effect in effects):
            self.taken.append((tunnel.tunnel_id, beat.sequence))
        self._obey(effects)

    def _obey(self, effects: list[DiscoveryEffect]) -> None:
        for effect in effects:
            match effect:
                case Elect(tunnel, term):
                    self.elections[tunnel] += 1
                    self._say(tunnel, self.codec.encode(ElectTunnel(term)))
                case AskSnapshot(tunnel):
                    self._say(tunnel, self.codec.encode(SnapshotRequest()))

    def _say(self, tunnel: int, payload: bytes) -> None:
        # One that is ending is about to be told lost.
        with suppress(TunnelClosedError):
            self.tunnels[tunnel].try_control(payload)


def _ms() -> float:
    return time.monotonic() * 1000.0


@asynccontextmanager
async def dialled(endpoint: Endpoint) -> AsyncIterator[Carrier]:
    """As a router dials."""
    channel = open_channel(endpoint.address, Transport())
    try:
        yield dial(channel, endpoint.address, worker_rig.SERVICE, metadata=[("segue-router", ROUTER)])
    finally:
        await channel.close()


class Bound:
    """What stands for a tunnel where routes are to be the pool's."""

    def __init__(self, pool: TunnelPool) -> None:
        self._pool = pool

    async def open(self, first_payload: bytes) -> Route:
        """A route to the worker, over whichever tunnel."""
        return await self._pool.bind(WorkerTarget("w"), first_payload)


@asynccontextmanager
async def offering(policy: PoolPolicy) -> AsyncIterator[tuple[worker_rig.Running, worker_rig.Router, list[int]]]:
    """A worker, a router's end of a pool's routes to it, and the conn_ids of the routes that were dropped here."""
    dropped: list[int] = []
    async with worker_rig.running(lanes=4, echo_pages=4_096) as worker, Registry() as registry:
        hooks = Hooks(merge=merge_deltas, on_route_dropped=lambda conn_id, _reason: dropped.append(conn_id))
        async with TunnelPool(registry, dialled, hooks, policy) as pool:
            pool.observe([Endpoint("w", worker.target, ("A",))], 1)
            assert await pool.wait_ready(30)
            router = worker_rig.Router(worker)
            router.tunnel = Bound(pool)  # type: ignore[assignment]
            yield worker, router, dropped


@asynccontextmanager
async def hearing(policy: PoolPolicy) -> AsyncIterator[Hearing]:
    """A worker that beats, and a pool that has several tunnels to it."""
    async with worker_rig.running(heartbeat_s=0.03) as worker, Registry() as registry:
        found = Hearing()
        hooks = Hooks(on_control=found.control, on_writer_up=found.up, on_writer_lost=found.lost)
        async with TunnelPool(registry, dialled, hooks, policy) as pool:
            found.pool = pool
            pool.observe([Endpoint("w", worker.target, ("A",))], 1)
            yield found


async def break_elected(found: Hearing) -> None:
    """The elected tunnel is lost, as when its connection breaks; until another is elected."""
    elected = found.elected
    assert elected is not None
    found.tunnels[elected]._end(Closed(CloseReason.PEER_LOST, "its connection broke"))
    async with asyncio.timeout(30):
        while found.elected in (elected, None):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
