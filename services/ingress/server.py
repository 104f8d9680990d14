"""The ingress, put together: start in order, serve, leave in order.

At the end: not ready → go on accepting for `shutdown_delay_s` → stop accepting, running requests finish → shortly
before the grace is over what still runs is ended with an error event → links and catalog close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from libs.continuation.errors import IdentityError
from libs.service.channel import open_channel
from libs.service.errors import StartError
from libs.service.lifecycle import Service
from libs.service.logs import get_logger
from libs.tunnel import Registry
from services.ingress.api import Api
from services.ingress.app import build_app
from services.ingress.http_server import HttpServer
from services.ingress.memo import TurnMemo
from services.ingress.metrics import RequestMetrics
from services.ingress.model_directory import ModelDirectory
from services.ingress.model_files import ModelFilesError
from services.ingress.router_links import RouterLinks
from services.ingress.settings import IngressSettings, pairs
from services.ingress.tenants import Tenants, read_keys
from services.ingress.text_model import TextModel
from services.ingress.upstream import Upstream

_SAY_GOODBYE_S = 1.0
_LOOK_EVERY_S = 1.0

log = get_logger(__name__)


@dataclass(frozen=True)
class Ingress:
    """The running parts."""

    api: Api
    links: RouterLinks
    registry: Registry
    server: HttpServer


async def build(settings: IngressSettings, service: Service) -> None:
    """For libs.service.lifecycle.main. Raises StartError."""
    await assemble(settings, service)


async def assemble(settings: IngressSettings, service: Service) -> Ingress:
    """Builds and starts every part. Raises StartError."""
    tenants = _tenants(settings)
    texts = await _load_models(settings)
    registry = await service.enter(Registry())
    links = RouterLinks(settings.routers, service.transport, registry, resolve_every_s=settings.resolve_every_s)
    catalog = open_channel(settings.catalog, service.transport)
    service.on_close("catalog", lambda: catalog.close(None))
    directory = ModelDirectory(catalog, texts, settings.models_refresh_s)
    upstream = Upstream(links, router_wait_s=settings.router_wait_s, router_losses=settings.router_losses)
    memo = TurnMemo(int(settings.memo_bytes), settings.memo_tenants)
    metrics = RequestMetrics(service.metrics.registry)
    api = Api(settings, directory, upstream, memo, tenants, metrics)
    server = HttpServer(build_app(api), settings.listen)
    service.metrics.export("", metrics.counters)
    service.metrics.export("links", links.counters)
    service.metrics.export("upstream", upstream.counters)
    service.metrics.export("models", directory.counters)
    service.spawn(links.run(), "router links")
    await directory.start(settings.catalog_wait_s, settings.catalog)
    service.spawn(directory.run(), "served models")
    service.on_drain(_drain(api, server, settings.shutdown_delay_s))
    service.spawn(server.run(), "http server")
    await server.up()
    service.spawn(_watch_readiness(api, links, service), "readiness")
    log.info("listening", listen=server.target, models=",".join(sorted(texts)))
    return Ingress(api, links, registry, server)


def _tenants(settings: IngressSettings) -> Tenants:
    try:
        return Tenants(settings.secret, read_keys(settings.keys_file) if settings.keys_file else None)
    except IdentityError as error:
        raise StartError(str(error), remedy="correct the settings `tenant_secret` and `keys_file`") from None


async def _load_models(settings: IngressSettings) -> dict[str, TextModel]:
    folders, templates = pairs(settings.models), pairs(settings.chat_template)
    for name in templates.keys() - folders.keys():
        raise StartError(f"chat_template names {name!r}, which `models` does not", remedy="correct either setting")
    texts = {}
    for name, folder in folders.items():
        try:
            texts[name] = await asyncio.to_thread(TextModel.load, name, folder, templates.get(name))
        except ModelFilesError as error:
            raise StartError(f"model {name} cannot be loaded: {error}", remedy="correct the setting `models`") from None
    return texts


def _drain(api: Api, server: HttpServer, delay_s: float) -> Callable[[float], Awaitable[None]]:
    async def drain(seconds: float) -> None:
        api.why_not_ready = "stopping"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        await asyncio.sleep(min(delay_s, seconds / 2))
        server.stop()
        if not await server.ended(max(0.0, deadline - loop.time() - _SAY_GOODBYE_S)):
            log.warning("ending what still runs", requests=api.metrics.counters.running)
            api.closing.set()
            await server.ended(max(0.1, deadline - loop.time()))

    return drain


async def _watch_readiness(api: Api, links: RouterLinks, service: Service) -> None:
    """Ready while a router is connected and a model is served. The memo's size is looked at on the way."""
    told: str | None = "starting"
    while True:
        why = None if links.any_up else "no router is connected"
        if why is None and not api.directory.all():
            why = "no model is served"
        if why != told and api.why_not_ready != "stopping":
            told, api.why_not_ready = why, why or ""
            await service.set_ready(why)
        api.metrics.counters.memo_bytes = api.memo.bytes
        try:
            async with asyncio.timeout(_LOOK_EVERY_S):
                await links.wait_change()
        except TimeoutError:
            continue
