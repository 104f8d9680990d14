"""Leaving in order: no new offers, running assignments end, what only this worker holds is published, the endpoint
goes.

One drain per process: whoever asks again joins it. It begins with telling routers (a heartbeat) and ends with the
catalog. The grace period covers everything; past it what runs is cancelled and what is staged is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from libs.service.logs import get_logger
from services.worker.endpoint.interpreter import Interpreter
from services.worker.handlers import Checkpointer

log = get_logger(__name__)

_QUIESCE_S = 10.0
"""After the grace period: how long cancelled assignments may take to reach their boundary."""
_PUBLISH_SHARE = 0.25
"""Of the grace period, kept for publishing where assignments take all the rest."""


@dataclass(frozen=True, slots=True)
class DrainEnd:
    """`clean`: all ended by itself and was published."""

    clean: bool
    cancelled: int
    unpublished: int


class Draining:
    """`deregister` removes the endpoint from the map; `grace_s` is the worker's own grace period."""

    def __init__(
        self,
        interpreter: Interpreter,
        checkpointer: Checkpointer,
        deregister: Callable[[], Awaitable[None]],
        grace_s: float,
    ) -> None:
        self._interpreter, self._checkpointer, self._deregister = interpreter, checkpointer, deregister
        self._grace_s = grace_s
        self._drain: asyncio.Task[DrainEnd] | None = None

    async def drain(self, grace_s: float | None = None) -> DrainEnd:
        """Begins the drain, or joins the one under way; the first one's grace period holds."""
        if self._drain is None:
            grace = self._grace_s if grace_s is None else grace_s
            self._drain = asyncio.get_running_loop().create_task(self._run(grace), name="drain")
        return await asyncio.shield(self._drain)

    async def aclose(self) -> None:
        """Ends a drain under way."""
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.wait({self._drain})

    async def _run(self, grace_s: float) -> DrainEnd:
        ends_at = time.monotonic() + grace_s
        log.info("draining", grace_s=grace_s, assignments=len(self._interpreter.machine))
        self._interpreter.drain()
        try:
            async with asyncio.timeout(grace_s * (1 - _PUBLISH_SHARE)):
                await self._interpreter.drained.wait()
        except TimeoutError:
            self._interpreter.expire_drain()
            try:
                async with asyncio.timeout(_QUIESCE_S):
                    await self._interpreter.drained.wait()
            except TimeoutError:
                log.error("assignments do not quiesce", assignments=len(self._interpreter.machine))
        unpublished = await self._checkpointer.drain(max(0.0, ends_at - time.monotonic()))
        await self._deregister()
        cancelled = self._interpreter.cut
        log.info("drained", cancelled=cancelled, unpublished=unpublished)
        return DrainEnd(not cancelled and not unpublished, cancelled, unpublished)
