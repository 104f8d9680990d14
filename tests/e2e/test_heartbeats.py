"""A real worker's heartbeats at a real router, over two tunnels whose connections are broken one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from libs.contracts.segue.v1 import catalog_pb2
from libs.controller.discovery import DiscoveryEffect, Observed, Registry
from libs.controller.protocol import Heartbeat
from libs.controller.wire_fields import to_proto
from tests.fixtures.fault_proxy import FaultProxy
from tests.router.rig import eventually
from tests.router.rig import running as router_running
from tests.worker.rig import EPOCH
from tests.worker.rig import running as worker_running

LOSSES = 4


class Listener:
    """Every heartbeat that reaches the registry, by the tunnel it came on, and whether it counted."""

    def __init__(self, registry: Registry) -> None:
        self.beats: list[tuple[int, Heartbeat, bool]] = []
        self._heard = registry.heard
        registry.heard = self.heard  # type: ignore[method-assign]

    def heard(self, tunnel: int, heartbeat: Heartbeat, now_ms: float) -> Sequence[DiscoveryEffect]:
        effects = self._heard(tunnel, heartbeat, now_ms)
        self.beats.append((tunnel, heartbeat, any(isinstance(effect, Observed) for effect in effects)))
        return effects

    def tunnels(self) -> list[int]:
        """In the order in which they carried heartbeats, each stretch once."""
        carriers = [tunnel for tunnel, _, _ in self.beats]
        return carriers[:1] + [after for before, after in pairwise(carriers) if after != before]


async def test_heartbeats_come_once_through_the_loss_of_each_elected_tunnel() -> None:
    async with worker_running(heartbeat_s=0.02) as worker:
        host, _, port = worker.target.rpartition(":")
        async with FaultProxy(host, int(port)) as proxy, router_running(pool_flap_s=0) as rig:
            listener = Listener(rig.router.observatory.registry)
            model = to_proto(worker.model)
            assert isinstance(model, catalog_pb2.Model)
            rig.catalog.names["m"] = [model]
            await rig.catalog.put(
                catalog_pb2.Endpoint(
                    worker="w", epoch=EPOCH, address=proxy.address, family="ipv4", models=[worker.model.fingerprint]
                )
            )
            for losses in range(LOSSES + 1):
                await eventually(lambda: rig.metric("pool_writers", contour="active") == 2, "two tunnels")
                carried = len(listener.beats)
                await eventually(lambda since=carried: len(listener.beats) >= since + 5, "heartbeats")  # type: ignore[misc]
                assert len(listener.tunnels()) >= losses
                if losses < LOSSES:
                    proxy.reset(oldest=1)
                    await eventually(lambda: proxy.accepted == 3 + losses, "dialled again")  # noqa: B023
            numbers = [heartbeat.sequence for _, heartbeat, _ in listener.beats]
            assert all(after > before for before, after in pairwise(numbers)), "one came twice, or late"
            assert all(counted for _, _, counted in listener.beats)
            assert not rig.router.observatory.registry.rejected
            # No tunnel that has lost its part comes back to it; what is first heard on a new one is everything.
            carriers = listener.tunnels()
            assert len(set(carriers)) == len(carriers) >= LOSSES
            for (before, _, _), (tunnel, heartbeat, _) in pairwise(listener.beats):
                assert heartbeat.snapshot or tunnel == before
            assert rig.metric("workers") == 1
            for loss in ("process", "silence", "retired"):
                assert rig.metric("worker_losses_total", loss=loss) == 0
