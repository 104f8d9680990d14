"""The router, put together: start in order, serve, leave in order.

Ready while the tunnel pool is: every cell of the endpoint map has a live tunnel, or as many as policy demands. At the
end: not ready, no new requests → running ones finish within the grace → what still runs is
handed back to its ingress by closing its tunnel → the pool shuts down, which cancels what is left there →
decisions that still wait are appended, for at most two seconds.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass

from libs.contracts.segue.v1 import router_pb2_grpc
from libs.controller.catalog_facts import Endpoint
from libs.controller.facts import FactCache
from libs.controller.fleet import Fleet
from libs.controller.router import RouterMachine
from libs.controller.router_effects import SendOffer
from libs.controller.router_events import CapacityFreed
from libs.controller.router_table import Phase
from libs.controller.wire import TunnelCodec
from libs.service.channel import open_channel
from libs.service.lifecycle import Service
from libs.service.logs import get_logger
from libs.tunnel import Registry, TunnelConfig
from libs.tunnel.grpc_carrier import with_attach
from services.router import exports, views
from services.router.assignments import Assignments
from services.router.attach import AttachServer
from services.router.clock import now_ms
from services.router.decision_batches import DecisionBatches
from services.router.decisions import Decisions
from services.router.direct_calls import DirectCalls
from services.router.endpoint_map import EndpointMap
from services.router.lookups import Lookups
from services.router.metrics import RouterMetrics
from services.router.names import Names
from services.router.observatory import Observatory
from services.router.planner import Planner
from services.router.pool_calls import PoolCalls
from services.router.readiness import Readiness
from services.router.requests import Requests
from services.router.servicer import RouterServicer
from services.router.settings import RouterSettings
from services.router.shell import Ports, Shell
from services.router.spans import RequestSpans
from services.router.uncovered import Uncovered
from services.router.worker_pool import WorkerPool

SERVICE = "segue.v1.Router"

_POOL_WITHIN_S = 3.0
"""Longest time at the start that the pool is waited for before the router serves without."""
_HAND_BACK_S = 1.0
"""Kept of the grace to close tunnels in order."""
_APPEND_S = 2.0
"""Longest time at the end for decisions that still wait."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Router:
    """The running parts."""

    shell: Shell
    requests: Requests
    assignments: Assignments
    observatory: Observatory
    workers: WorkerPool
    attach: AttachServer
    endpoints: EndpointMap
    lookups: Lookups
    uncovered: Uncovered
    direct: DirectCalls
    decisions: Decisions
    batches: DecisionBatches
    spans: RequestSpans
    servicer: RouterServicer
    upstream: Registry
    downstream: Registry

    async def drain(self, seconds: float) -> None:
        """Ends what runs, or hands it back, within that time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        try:
            self.servicer.draining = True
            self.attach.drain()
            # A machine that broke its contract ends nothing any more.
            patience = 0.0 if self.shell.stopped else max(0.0, seconds - _HAND_BACK_S)
            if not await self.requests.at_rest(patience):
                log.warning("handing back what still runs", requests=len(self.requests))
            self.attach.close()
            await self._close_pool(max(0.0, deadline - loop.time()))
            await self.batches.flush(min(_APPEND_S, max(0.0, deadline - loop.time())))
        finally:
            self.shell.stop()

    async def _close_pool(self, within_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.workers.pool.shutdown(0.0)


async def build(settings: RouterSettings, service: Service) -> None:
    """For libs.service.lifecycle.main. Raises CatalogAbsentError."""
    await assemble(settings, service)


async def assemble(settings: RouterSettings, service: Service, tunnel_config: TunnelConfig | None = None) -> Router:
    """Builds and starts every part, and waits until it is ready. Raises CatalogAbsentError."""
    metrics = RouterMetrics(service.metrics.registry)
    upstream = await service.enter(Registry(max_connections=settings.max_requests))
    downstream = await service.enter(Registry())
    catalog = open_channel(settings.catalog, service.transport)
    service.on_close("catalog", lambda: catalog.close(None))

    machine = RouterMachine(settings.router_knobs())
    shell = Shell(machine, lambda error: service.stop("the router machine's contract is broken", error))
    fleet, codec, spans = Fleet(), TunnelCodec(), RequestSpans()
    requests = Requests(shell.feed, spans, metrics)
    observatory = Observatory(
        settings.discovery_knobs(),
        fleet,
        codec,
        shell.feed,
        waiting=lambda: machine.waiting,
        awaited=lambda: machine.awaited,
        identify=lambda tunnel, epoch: workers.pool.identify(tunnel, epoch),
        takes=lambda worker: workers.takes(worker),
    )
    router_id = secrets.token_hex(8)
    readiness = Readiness(service)
    workers = WorkerPool(
        service.transport,
        downstream,
        observatory,
        settings.pool_policy(),
        router_id=router_id,
        crashed=lambda error: service.stop("the tunnel pool's contract is broken", error),
        readiness=readiness.changed,
        config=tunnel_config,
    )
    await service.enter(workers.pool)
    direct = DirectCalls(service.transport, workers.addresses)
    assignments = Assignments(codec, fleet, spans, shell.feed, workers.bind, direct, service.spawn, observatory.order)

    batches = DecisionBatches(catalog, router_id, settings.decisions_queue, settings.decisions_interval_s)
    decisions = Decisions(settings.decisions_kept, metrics, batches)

    def look_again() -> None:
        """Whoever waits may have become possible."""
        shell.feed(CapacityFreed(max(1, machine.waiting)))

    names = Names(
        catalog,
        settings.names_refresh_s,
        service.spawn,
        changed=look_again,
    )

    def apply(endpoints: tuple[Endpoint, ...], revision: int) -> None:
        observatory.listed(endpoints)
        workers.observe(endpoints, revision)
        names.refresh()
        uncovered.changed()

    endpoints = EndpointMap(catalog, settings.catalog, apply)
    lookups = Lookups(catalog, FactCache(settings.fact_knobs()), metrics, service.spawn)
    uncovered = Uncovered(
        lambda: workers.pool.policy,
        lambda: [one for one in endpoints.endpoints if one.address in workers.addresses(one.worker)],
        wake=look_again,
        live=lambda request_id: machine.phase(request_id) is not Phase.DONE,
    )
    planner = Planner(
        names, lookups, fleet, shell.feed, service.spawn, spans, metrics, settings.lookup_budget_ms / 1_000, uncovered
    )

    def offer(effect: SendOffer) -> None:
        metrics.offers.inc()
        if requests.resumed(effect.offer.assignment.request_id, len(effect.offer.request.tokens)):
            metrics.resumes.inc()
        assignments.offer(effect)

    shell.ports = Ports(
        plan=planner.plan,
        offer=offer,
        cancel=assignments.cancel,
        close=assignments.close,
        deliver=requests.deliver,
        record=decisions.record,
        account=lambda effect: fleet.account(effect, now_ms()),
    )
    attach = AttachServer(upstream, requests, service.spawn, tunnel_config)
    servicer = RouterServicer(
        machine,
        shell.feed,
        requests,
        planner,
        lambda: views.workers(observatory.registry, fleet, endpoints.endpoints, endpoints.revision),
        PoolCalls(workers, observatory, uncovered),
    )
    router = Router(
        shell, requests, assignments, observatory, workers, attach, endpoints, lookups, uncovered, direct, decisions,
        batches, spans, servicer, upstream, downstream,
    )  # fmt: skip
    exports.export(router, names, service.metrics, metrics)

    register = with_attach(router_pb2_grpc.add_RouterServicer_to_server, SERVICE, attach.serve)
    service.add(servicer, register, SERVICE)
    service.on_drain(router.drain)
    service.spawn(endpoints.run(), "endpoint map")
    service.spawn(names.run(), "served names")
    service.spawn(observatory.run(), "silent workers")
    service.spawn(batches.run(), "decisions")
    await service.start()
    await endpoints.first(settings.catalog_wait_s)
    if endpoints.endpoints:
        await workers.pool.wait_ready(_POOL_WITHIN_S)
    service.spawn(readiness.run(), "readiness")
    await readiness.told()
    return router
