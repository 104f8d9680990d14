"""A tunnel pool over echo workers that are processes of their own: started, killed, asked for their books."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from libs.pool.knobs import PoolPolicy
from libs.pool.model import Endpoint
from libs.pool.pool import TunnelPool
from libs.tunnel import Handlers, Registry, Side, Tunnel, TunnelConfig
from prove.processes import started
from tests.fixtures.fault_proxy import FaultProxy
from tests.pool.rig import CALM, Seen, dial_endpoint

LIMIT_S = 60.0
"""Of every wait: for busy machines; nothing here is judged by it."""
ZERO = {"routes": 0, "bindings": 0, "permits": 0}
_ROOT = Path(__file__).resolve().parents[1]
_PAUSE_S = 0.005


async def until(condition: Callable[[], bool]) -> None:
    """Polls; for states that announce themselves nowhere. Raises TimeoutError."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - any condition, not only those with an event
            await asyncio.sleep(_PAUSE_S)


class EchoProcess:
    """One worker. `proxied`: its tunnels go through a proxy that can break them one by one."""

    def __init__(
        self, name: str, host: str = "127.0.0.1", cells: Sequence[str] = ("A",), *, proxied: bool = False
    ) -> None:
        self.name, self.host, self.cells, self.proxied = name, host, tuple(cells), proxied
        self.port, self.incarnation, self.kills = 0, 0, 0
        self.proxy: FaultProxy | None = None
        self.process: asyncio.subprocess.Process | None = None
        self._life = AsyncExitStack()
        self._proxies = AsyncExitStack()

    @property
    def address(self) -> str:
        """Where the pool dials it."""
        return self.proxy.address if self.proxy is not None else self.own_address

    @property
    def own_address(self) -> str:
        """Where it listens."""
        return f"{self.host}:{self.port}"

    def endpoint(self) -> Endpoint:
        """As the map lists it."""
        return Endpoint(self.name, self.address, self.cells, self.incarnation)

    async def start(self) -> None:
        """A new process, on the port that it had before if it had one."""
        argv = [sys.executable, "-m", "prove.echo_worker", "--host", self.host, "--port", str(self.port)]
        process = await self._life.enter_async_context(started(argv, cwd=_ROOT, talk=True))
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"echo worker {self.name} did not start")
        self.port, self.process = int(json.loads(line)["port"]), process
        self.incarnation += 1
        if self.proxied and self.proxy is None:
            self.proxy = await self._proxies.enter_async_context(FaultProxy(self.host, self.port))

    async def kill(self) -> None:
        """SIGKILL, and gone."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        code = await self.process.wait()
        assert code == -signal.SIGKILL
        self.process, self.kills = None, self.kills + 1
        await self._life.aclose()

    def break_one(self, chance: random.Random) -> bool:
        """Resets one of its connections, if there is any."""
        assert self.proxy is not None
        links = list(self.proxy._links)
        if links:
            chance.choice(links).abort()
        return bool(links)

    async def ledger(self) -> dict[str, Any]:
        """Its books, over a tunnel of their own."""
        async with dial_endpoint(Endpoint(self.name, self.own_address)) as carrier, Registry() as registry:
            tunnel = Tunnel(carrier, registry, Side.DIALING, Handlers())
            running = asyncio.create_task(tunnel.run())
            try:
                await tunnel.ready(LIMIT_S)
                route = await tunnel.open(b"ledger")
                found: dict[str, Any] = json.loads(await route.receive(LIMIT_S))
                return found
            finally:
                tunnel.close()
                await asyncio.gather(running, return_exceptions=True)

    async def rest(self, within: float = LIMIT_S) -> dict[str, Any]:
        """Its books once nothing is held, or as they are when the time is over."""
        give_up = asyncio.get_running_loop().time() + within
        while True:
            found = await self.ledger()
            if not (found["assignments"] or found["permits"]) or asyncio.get_running_loop().time() > give_up:
                return found
            await asyncio.sleep(_PAUSE_S)

    async def aclose(self) -> None:
        """Not left behind."""
        await self._life.aclose()
        if self.proxy is not None:
            # What went through it ends by itself.
            await until(lambda: self.proxy is None or not self.proxy._tasks)
        await self._proxies.aclose()


@dataclass
class Pooled:
    """A pool that has the map of its workers."""

    pool: TunnelPool
    registry: Registry
    workers: list[EchoProcess]
    seen: Seen
    revision: int = 0
    listed: tuple[EchoProcess, ...] = field(default=())

    def observe(self, *workers: EchoProcess) -> None:
        """The map as its source has it now; read twice, as a map must be to be taken."""
        self.revision += 1
        self.listed = workers
        for _ in range(self.pool.policy.map_stable_snapshots):
            self.pool.observe([worker.endpoint() for worker in workers], self.revision)

    def observe_all(self) -> None:
        """All of them."""
        self.observe(*self.workers)

    def active(self, worker: EchoProcess) -> int:
        """Its tunnels that take new routes."""
        return sum(view.active for view in self.pool.status().pool.endpoints if view.key.worker == worker.name)

    async def full(self, each: int = 2) -> None:
        """Every listed worker has its tunnels, and no more: where none is left over or none of those is bound."""
        await until(lambda: all(self.active(worker) == each for worker in self.listed))

    async def enough(self, each: int = 2) -> None:
        """Every listed worker has its tunnels; those above the floor go once they are without routes."""
        await until(lambda: all(self.active(worker) >= each for worker in self.listed))

    def held(self) -> dict[str, int]:
        """What must be nothing at rest."""
        status = self.pool.status()
        return {"routes": status.routes, "bindings": status.bindings, "permits": status.permits}

    async def rest(self, within: float = LIMIT_S) -> dict[str, int]:
        """What is held once nothing is, or when the time is over."""
        with suppress(TimeoutError):
            await self.registry.wait_rest(within)
        return self.held()


@asynccontextmanager
async def pooled(
    workers: Sequence[EchoProcess],
    policy: PoolPolicy = CALM,
    *,
    config: TunnelConfig | None = None,
    observed: bool = True,
    seed: int = 7,
    **changes: object,
) -> AsyncIterator[Pooled]:
    """A pool over these, which run already or not yet; whoever started them ends them."""
    registry, seen = Registry(), Seen()
    chosen = replace(policy, **changes)  # type: ignore[arg-type]
    async with (
        registry,
        TunnelPool(
            registry, dial_endpoint, seen.hooks(), chosen, config=config or TunnelConfig(), chance=random.Random(seed)
        ) as pool,
    ):
        made = Pooled(pool, registry, list(workers), seen)
        if observed:
            made.observe_all()
        yield made
    assert not seen.crashes, seen.crashes


@asynccontextmanager
async def echoing(
    count: int, hosts: Sequence[str] = ("127.0.0.1",), *, proxied: bool = False
) -> AsyncIterator[list[EchoProcess]]:
    """Running workers, `count` on each host."""
    workers = [EchoProcess(f"w{i}-{j}", host, proxied=proxied) for i in range(count) for j, host in enumerate(hosts)]
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        yield workers
    finally:
        for worker in workers:
            await worker.aclose()
