"""One task for each dial the core asks for: from the dial through publication to the tunnel's end.

The task holds the reservation of the writer it replaces, if any: leaving it before the commit, by failure or by
cancellation, restores that writer. It ends only when the tunnel has ended and the carrier is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from libs.tunnel import Carrier, Closed, CloseReason, Handlers, Registry, Side, Tunnel, TunnelClosedError, TunnelConfig

from .effects import Dial as DialEffect
from .events import DialAbandoned, DialFailed, PoolEvent, ProbeEnded
from .guard import PublicationGuard
from .hooks import Dial
from .model import Endpoint, PoolBugError, WriterId
from .replacement import Reservation

_LOG = logging.getLogger(__name__)


class Owner(Protocol):
    """What a dial asks of its pool."""

    def reservation(self, writer: WriterId) -> Reservation: ...

    def feed(self, event: PoolEvent) -> None: ...

    def publish(self, dial: DialEffect, tunnel: Tunnel) -> bool:
        """Under the guard: hand it to the core; whether it was taken."""
        ...

    def handlers(self) -> Handlers: ...

    def tunnel_config(self) -> TunnelConfig: ...

    def connect_s(self) -> float: ...


class Dialler:
    """See the module."""

    def __init__(
        self, dial: Dial, registry: Registry, guard: PublicationGuard, owner: Owner, clock: Callable[[], float]
    ) -> None:
        self._dial = dial
        self._registry = registry
        self._guard = guard
        self._owner = owner
        self._clock = clock

    async def hold(self, effect: DialEffect) -> None:
        """From the dial to the end of the tunnel."""
        owner = self._owner
        published = False
        outcome: PoolEvent = DialAbandoned(effect.writer)
        try:
            with owner.reservation(effect.writer):
                async with asyncio.timeout(owner.connect_s()) as limit, self._dial(effect.endpoint) as carrier:
                    tunnel = self._tunnel(carrier, owner.handlers())
                    running = asyncio.create_task(tunnel.run(), name=f"tunnel of writer {effect.writer}")
                    try:
                        await tunnel.ready(owner.connect_s())
                        limit.reschedule(None)
                        async with self._guard:
                            published = owner.publish(effect, tunnel)
                        if not published:
                            tunnel.close(CloseReason.RETIRED, "its generation or its endpoint is no more")
                        await running
                    finally:
                        await _end(running)
        except PoolBugError:
            raise
        except (TimeoutError, TunnelClosedError) as error:
            _LOG.debug("worker %s cannot be reached: %s", effect.endpoint.worker, str(error) or "timed out")
            outcome = DialFailed(effect.writer)
        except Exception:  # whatever the user's dial raises: the endpoint could not be reached
            level = logging.ERROR if published else logging.DEBUG
            _LOG.log(level, "tunnel to worker %s failed", effect.endpoint.worker, exc_info=True)
            outcome = DialFailed(effect.writer)
        finally:
            # The core knows of the end of a published writer from its tunnel, and of a refused one already.
            if not published:
                owner.feed(outcome)

    async def probe(self, endpoint: Endpoint) -> None:
        """Dial, await one pong, close; tell the core."""
        succeeded = False
        try:
            async with asyncio.timeout(self._owner.connect_s()), self._dial(endpoint) as carrier:
                tunnel = self._tunnel(carrier, Handlers())
                running = asyncio.create_task(tunnel.run(), name=f"probe of {endpoint.worker}")
                try:
                    await tunnel.ready(self._owner.connect_s())
                    succeeded = True
                    tunnel.close(CloseReason.DONE, "a probe")
                    await running
                finally:
                    await _end(running)
        except Exception:  # noqa: S110 - a probe that fails is an answer
            pass
        finally:
            self._owner.feed(ProbeEnded(endpoint.key, succeeded))

    def _tunnel(self, carrier: Carrier, handlers: Handlers) -> Tunnel:
        config = self._owner.tunnel_config()
        return Tunnel(carrier, self._registry, Side.DIALING, handlers, config, clock=self._clock)


async def _end(running: asyncio.Task[Closed]) -> None:
    """A tunnel never outlives its dial. Cancelled while it ends, it still ends: nothing of it is waited for then."""
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
