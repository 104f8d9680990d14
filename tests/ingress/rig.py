"""A whole ingress in this process, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from libs.service.lifecycle import Service
from services.ingress.server import Ingress, assemble
from services.ingress.settings import IngressSettings
from tests.ingress.fake_router import FakeCatalog, FakeRouter, Script, fake_catalog, fake_router

SECRET = "5e" * 32
WITHIN_S = 10.0


async def eventually(holds: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110  (any condition, of objects that signal nothing)
            await asyncio.sleep(0.005)
    assert holds(), what


@dataclass
class Rig:
    ingress: Ingress
    service: Service
    routers: list[FakeRouter]
    catalog: FakeCatalog
    http: httpx.AsyncClient
    drain: Callable[[float], Any]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.ingress.server.port}"

    @property
    def router(self) -> FakeRouter:
        return self.routers[0]

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def at_rest(self) -> None:
        """Nothing is held for any request, at either end."""
        api, registry = self.ingress.api, self.ingress.registry
        await eventually(lambda: api.metrics.counters.running == 0, "requests running")
        assert api.upstream.counters.active == 0
        await registry.wait_rest(WITHIN_S)
        assert registry.snapshot().routes == registry.snapshot().permits == 0
        for router in self.routers:
            await router.registry.wait_rest(WITHIN_S)


def events(text: str) -> list[Any]:
    """The data of each event, parsed but for [DONE]."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def text_of_events(parsed: Sequence[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for event in parsed
        if event != "[DONE]"
        for choice in event.get("choices", [])
        if choice["index"] == index
    )


@asynccontextmanager
async def running(folder: Path, *scripts: Script, **changes: Any) -> AsyncIterator[Rig]:
    """An ingress of model `m` in `folder`, with one router per script."""
    from contextlib import AsyncExitStack

    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(fake_catalog())
        routers = [await stack.enter_async_context(fake_router(script)) for script in scripts]
        settings = IngressSettings(
            **{
                "listen": "127.0.0.1:0",
                "routers": tuple(router.address for router in routers) or ("127.0.0.1:9",),
                "catalog": catalog.address,
                "models": (f"m={folder}",),
                "tenant_secret": SECRET,
                "models_refresh_s": 0.1,
                "resolve_every_s": 0.2,
                "router_wait_s": 2.0,
                **changes,
            }
        )
        async with asyncio.TaskGroup() as tasks:
            service = Service(settings, tasks)
            ingress = await assemble(settings, service)
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{ingress.server.port}", timeout=WITHIN_S)
            try:
                await eventually(lambda: ingress.links.counters.up == len(routers), "routers connected")
                yield Rig(ingress, service, routers, catalog, client, service._drains[0])
            finally:
                await client.aclose()
                await service._drains[0](2.0)
                await service._cancel_background()
                for _, close in reversed(service._closers):
                    await close()
