"""Tunnels to every router of a name: found, kept, redialled, spread over."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any

import grpc
import pytest

from libs.service.channel import open_channel
from libs.service.transport import Transport
from libs.tunnel import Registry
from services.ingress.router_links import NoRouterError, RouterLinks
from tests.ingress.fake_router import answering, fake_router
from tests.ingress.rig import eventually


class Names:
    """A name service under the test's control, in place of the loop's getaddrinfo."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[tuple[str, int]] = []
        self.broken = False
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._look_up)

    async def _look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("routers.test", 7_000)
        if self.broken:
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in self.addresses]


def address_of(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port)


async def test_every_address_of_a_name_gets_a_link_and_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_router(answering([])) as one, fake_router(answering([])) as two, Registry() as registry:
        names = Names(monkeypatch)
        names.addresses = [address_of(one.address), address_of(two.address)]
        links = RouterLinks(["routers.test:7000"], Transport(), registry, resolve_every_s=0.05)
        running = asyncio.create_task(links.run())
        try:
            await eventually(lambda: links.counters.up == 2, "both up")
            picked = Counter([(await links.pick(1)).peer for _ in range(10)])
            assert set(picked.values()) == {5}
            first = await links.pick(1)
            assert first not in [await links.pick(1, avoid=first) for _ in range(4)]

            # An address that leaves the name keeps its healthy tunnel; a name that fails keeps everything.
            names.addresses = [address_of(two.address)]
            await eventually(lambda: links.counters.known == 1, "name looked up again")
            names.broken = True
            await eventually(lambda: links.counters.resolve_failures > 1, "name broken")
            assert links.counters.up == 2

            # Once lost, the address that left is not dialled again; the other one is.
            await one.kill()
            await eventually(lambda: links.counters.up == 1, "one lost")
            await two.kill()
            await eventually(lambda: not links.any_up, "both lost")
            with pytest.raises(NoRouterError):
                await links.pick(0.05)
            waiting = asyncio.create_task(links.pick(10))
            await two.start(address_of(two.address)[1])
            await one.start(address_of(one.address)[1])
            assert (await waiting).peer == two.address
            names.broken = False
            names.addresses = [address_of(one.address), address_of(two.address)]
            await eventually(lambda: links.counters.up == 2, "back in the name, back in use")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert registry.snapshot().tunnels == 0


async def test_a_router_must_show_a_certificate_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def opened(target: str, transport: Transport, *, server_name: str = "") -> grpc.aio.Channel:
        asked[target] = server_name
        return open_channel(target, transport, server_name=server_name)

    monkeypatch.setattr("services.ingress.router_links.open_channel", opened)
    async with fake_router(answering([])) as one, fake_router(answering([])) as two, Registry() as registry:
        port = address_of(two.address)[1]
        links = RouterLinks([one.address, f"localhost:{port}"], Transport(), registry, resolve_every_s=60)
        running = asyncio.create_task(links.run())
        try:
            await eventually(lambda: links.counters.up == 2, "both up")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert asked[one.address] == ""
    assert asked[f"127.0.0.1:{port}"] == "localhost"


async def test_redials_do_not_come_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def uniform(low: float, high: float) -> float:
        waits.append(high)
        return low if high != 1.2 else 1.0

    monkeypatch.setattr("services.ingress.router_links.random.uniform", uniform)
    async with Registry() as registry:
        links = RouterLinks(["127.0.0.1:1"], Transport(), registry, resolve_every_s=60)
        running = asyncio.create_task(links.run())
        await eventually(lambda: len(waits) >= 9, "dialled again and again")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    backoff = [wait for wait in waits if wait != 1.2]
    # Full jitter: from nothing to a bound that doubles up to a limit.
    assert backoff[:7] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
