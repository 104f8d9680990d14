"""A worker process: build the engine, open storage, answer, warm up, register, serve; and leave in that order reversed.

Health is NOT_SERVING until the worker is warm and registered. A signal turns it not ready, then drains: no new offers,
running ones end within the grace period, what only this worker holds is published, the endpoint is deregistered; then
the tunnels, the runtime and storage are closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass

from libs.contracts.segue.v1 import worker_pb2_grpc
from libs.service.channel import open_channel
from libs.service.lifecycle import Service
from libs.service.logs import get_logger
from libs.tunnel.grpc_carrier import with_attach
from services.worker.assembly import Place, Unstored, Worker, echo_engine
from services.worker.metrics import export
from services.worker.registration import Registration
from services.worker.settings import WorkerSettings

log = get_logger(__name__)

SERVICE = "segue.v1.Worker"


@dataclass(slots=True)
class _Bound:
    """Where the server listens, once it does."""

    target: str = ""


async def build(settings: WorkerSettings, service: Service) -> None:
    """What `libs.service.lifecycle.main` runs. Raises StartError."""
    worker_id = settings.worker or socket.gethostname()
    channel = open_channel(settings.catalog, service.transport)
    service.on_close("catalog channel", lambda: channel.close(None))
    registration = Registration(channel, settings.catalog, worker_id)
    bound = _Bound()
    if settings.crash_on:
        log.warning("test hook: prompts with this sequence kill this process", crash_on=settings.crash_on)

    def place() -> Place:
        address = announced(settings.advertise or bound.target)
        return Place(worker_id, settings.zone, address, family(address))

    if settings.echo:
        engine = echo_engine(settings)
        worker = Worker(settings, engine, Unstored(engine.pool), registration, place)
    else:
        # Brings torch and the chunk tiers: an echo worker loads neither.
        from services.worker.engine import model_engine

        made = await model_engine(settings, channel, lambda address: open_channel(address, service.transport))
        worker = Worker(settings, made.engine, made.storage, registration, place)
        made.export(service.metrics)
    export(service.metrics, worker)
    service.add(
        worker.servicer,
        with_attach(worker_pb2_grpc.add_WorkerServicer_to_server, SERVICE, worker.attach.serve),
        SERVICE,
    )

    async def drain(seconds: float) -> None:
        await worker.draining.drain(seconds)
        # Tunnels never end by themselves; their routers have had their results.
        worker.attach.close()

    service.on_drain(drain)
    await service.enter(worker)
    await service.start()
    bound.target = service.target
    await worker.begin()
    service.spawn(worker.run(), "heartbeats and registration")
    log.info(
        "worker", worker=worker_id, epoch=worker.interpreter.machine.epoch, model=worker.engine.name,
        fingerprint=worker.engine.model.fingerprint[:16],
    )  # fmt: skip
    await asyncio.sleep(0)


def announced(target: str) -> str:
    """The address for others: a wildcard means nothing to them, so the host's name stands in for it."""
    host, _, port = target.rpartition(":")
    if host.strip("[]") in ("0.0.0.0", "::", ""):  # noqa: S104 - recognised, not bound
        return f"{socket.gethostname()}:{port}"
    return target


def family(address: str) -> str:
    """Address family of HOST:PORT: a literal's own; ipv4 for names, which are resolved by who dials."""
    try:
        version = ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).version
    except ValueError:
        return "ipv4"
    return f"ipv{version}"
