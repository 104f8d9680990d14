"""Traffic to the workers runs on the tunnel pool (libs.pool): what is the router's about it.

The endpoint map goes in, one cell for each model of a worker in its zone. Tunnels that come and go, and what their
control routes say, go to the observatory. An assignment is bound to the process that the policy chose, over whichever
of its tunnels. A worker that this router must not offer to (an operator drains it, so that its tunnels take no new
routes) is withheld from the policy; what runs there goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from libs.controller import catalog_facts
from libs.controller.merging import merge_deltas
from libs.pool.effects import Notice, Warn
from libs.pool.hooks import Hooks, Loss, Writer
from libs.pool.knobs import PoolPolicy
from libs.pool.model import Cell, Endpoint, WorkerTarget
from libs.pool.pool import TunnelPool
from libs.pool.readiness import Readiness
from libs.service.channel import open_channel
from libs.service.logs import get_logger
from libs.service.transport import Transport
from libs.tunnel import Carrier, Registry, Route, TunnelConfig
from libs.tunnel.grpc_carrier import dial
from services.router.observatory import Observatory

SERVICE = "segue.v1.Worker"
ROUTER_KEY = "segue-router"
"""Metadata of an Attach call: this process's id, which makes all its tunnels to a worker one pair."""

# What an operator should look at; the rest happens in every rollout.
_WARNINGS = frozenset({Notice.ENDPOINT_LAPSED, Notice.EMPTY_MAP_REFUSED, Notice.DRAIN_TTL, Notice.COMMIT_LEFT_MISSING})

log = get_logger(__name__)


class WorkerPool:
    """See the module. `pool` is entered and left by its owner."""

    def __init__(
        self,
        transport: Transport,
        registry: Registry,
        observatory: Observatory,
        policy: PoolPolicy,
        *,
        router_id: str,
        crashed: Callable[[BaseException], None],
        readiness: Callable[[Readiness], None],
        config: TunnelConfig | None = None,
    ) -> None:
        self._transport = transport
        self._observatory = observatory
        self._metadata = ((ROUTER_KEY, router_id),)
        hooks = Hooks(
            merge=merge_deltas,
            on_control=observatory.control,
            on_writer_up=self._up,
            on_writer_lost=self._lost,
            on_warning=self._warned,
            on_readiness=readiness,
            crashed=crashed,
        )
        self.pool = TunnelPool(registry, self._dial, hooks, policy, config=config)
        self._addresses: dict[str, list[str]] = {}

    def observe(self, endpoints: Sequence[catalog_facts.Endpoint], revision: int) -> None:
        """The endpoint map as the catalog has it now."""
        self._addresses.clear()
        for endpoint in endpoints:
            self._addresses.setdefault(endpoint.worker, []).append(endpoint.address)
        self.pool.observe([pooled(endpoint) for endpoint in endpoints], revision)

    async def bind(self, worker: str, epoch: int, payload: bytes) -> Route:
        """A route to that process, its first payload on the way. Raises what TunnelPool.bind does."""
        return await self.pool.bind(WorkerTarget(worker, epoch), payload)

    def takes(self, worker: str) -> bool:
        """Whether an assignment for the worker would find a tunnel."""
        return self.pool.takes(WorkerTarget(worker))

    def addresses(self, worker: str) -> Sequence[str]:
        """Where the endpoint map says that the worker listens, but for what an operator has taken out of use."""
        drained = self.pool.drained(worker)
        return [address for address in self._addresses.get(worker, ()) if address not in drained]

    @asynccontextmanager
    async def _dial(self, endpoint: Endpoint) -> AsyncIterator[Carrier]:
        # With mutual TLS the worker has to prove that it is the one it claims to be, wherever it listens.
        server_name = endpoint.worker if self._transport.mutual else ""
        channel = open_channel(endpoint.address, self._transport, server_name=server_name)
        try:
            yield dial(channel, endpoint.address, SERVICE, metadata=self._metadata)
        finally:
            await channel.close(None)

    def _up(self, writer: Writer) -> None:
        endpoint = writer.endpoint
        log.info("worker connected", worker=endpoint.worker, address=endpoint.address, writer=writer.writer)
        self._observatory.up(writer.tunnel, endpoint.worker, endpoint.address, endpoint.incarnation)

    def _lost(self, writer: Writer, loss: Loss) -> None:
        say, what = (log.info, "tunnel retired") if loss.orderly else (log.warning, "worker disconnected")
        say(
            what,
            worker=writer.endpoint.worker,
            writer=writer.writer,
            reason=loss.closed.reason.label,
            detail=loss.closed.detail,
        )
        self._observatory.lost(writer.tunnel, loss.orderly)

    def _warned(self, warning: Warn) -> None:
        say = log.warning if warning.kind in _WARNINGS else log.info
        say("tunnel pool", notice=warning.kind.value, about=warning.about)
        # What the warning is about is happening just now.
        asyncio.get_running_loop().call_soon(self._observatory.withhold)


def pooled(endpoint: catalog_facts.Endpoint) -> Endpoint:
    """A worker of the map as an endpoint of the pool."""
    cells = tuple(cell_of(fingerprint, endpoint.zone) for fingerprint in endpoint.models)
    return Endpoint(endpoint.worker, endpoint.address, cells, endpoint.epoch, endpoint.family)


def cell_of(fingerprint: str, zone: str) -> Cell:
    """How a cell is spelled: as in the setting `pool_required_cells`."""
    return f"{fingerprint}@{zone}"
