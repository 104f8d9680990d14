"""Whether traffic should come: the tunnel pool's readiness, told to the service as it changes."""

from __future__ import annotations

import asyncio

from libs.pool.readiness import Readiness as PoolReadiness
from libs.pool.readiness import State
from libs.service.lifecycle import Service

_WHY = {
    State.NO_MAP: "no endpoint map was received",
    State.EMPTY_MAP: "no worker is in the endpoint map",
    State.STARTING: "no tunnel to the workers of every cell yet",
    State.LOST: "the tunnels to the workers are lost",
    State.CLOSING: "stopping",
}


class Readiness:
    """See the module."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._now = PoolReadiness(State.NO_MAP)
        self._changed = asyncio.Event()
        self._told = asyncio.Event()

    def changed(self, now: PoolReadiness) -> None:
        """The pool's word."""
        self._now = now
        self._changed.set()

    async def told(self) -> None:
        """Once the service has heard of it."""
        await self._told.wait()

    async def run(self) -> None:
        """Tells the service, until cancelled."""
        while True:
            self._changed.clear()
            await self._service.set_ready(why_not_ready(self._now))
            self._told.set()
            await self._changed.wait()


def why_not_ready(now: PoolReadiness) -> str | None:
    """For people; None: ready."""
    if now.ready:
        return None
    missing = f": {', '.join(now.missing)}" if now.missing else ""
    return f"{_WHY[now.state]}{missing}"
