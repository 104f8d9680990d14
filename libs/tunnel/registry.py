"""Routes, bindings and permits of one process's end: which route is bound to which tunnel, and nothing left behind.

Each tunnel has an entry with its own conn_id → route map, which its reader looks up directly: conn_ids are unique per
dialing process, so at an accepting end two peers may use the same one. ``bindings`` holds (tunnel id, conn_id) →
route.

The end of a route has two halves. ``drop`` is synchronous: the hot route is gone, the consumer woken. The rest
(removing the binding under the binding lock, telling the owner, giving the permit back) is handed to the one cleanup
task. Its queue needs no bound of its own: every entry holds a permit, reserved when the route was leased.

The binding lock linearizes binding with whoever else publishes or retires tunnels; nothing is awaited while this
module holds it. Dropping a route and losing a tunnel do not wait for it: they only ever remove.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import ParamSpec, Self

from .counters import Counters
from .errors import Closed, TooManyRoutesError
from .route import Permit, Route

P = ParamSpec("P")
_LOG = logging.getLogger(__name__)
_BATCH = 256


class TunnelEntry:
    """The registry's view of one live tunnel: its send route, its bindings, its activity."""

    __slots__ = ("idle_since", "last_activity", "opened_at", "routes", "tunnel_id")

    def __init__(self, tunnel_id: int, now: float) -> None:
        self.tunnel_id = tunnel_id
        self.routes: dict[int, Route] = {}
        self.opened_at = now
        # Monotonic seconds: last inbound frame; and since when no route is bound (None while any is).
        self.last_activity = now
        self.idle_since: float | None = now


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is held now; all zero at rest but ``tunnels``."""

    tunnels: int
    routes: int
    bindings: int
    permits: int
    cleanups: int


class Registry:
    """An async context manager: routes can be leased between enter and exit.

    ``max_connections``: ceiling on open routes, 0 for none; routes that are closed but not yet cleaned up may exceed it
    by ``cleanup_headroom``.
    """

    def __init__(
        self, *, max_connections: int = 0, cleanup_headroom: int = 64, counters: Counters | None = None
    ) -> None:
        if max_connections < 0 or cleanup_headroom < 1:
            raise ValueError(
                f"max_connections must be >= 0 and cleanup_headroom >= 1: {max_connections}, {cleanup_headroom}"
            )
        self.max_connections = max_connections
        self.cleanup_headroom = cleanup_headroom
        self.counters = counters if counters is not None else Counters()
        self.binding_lock = asyncio.Lock()
        self.tunnels: dict[int, TunnelEntry] = {}
        self.bindings: dict[tuple[int, int], Route] = {}
        self._conn_ids = count(1)
        self._tunnel_ids = count(1)
        self._permits = 0
        self._routes = 0
        self._cleanups: deque[tuple[Route, Closed]] = deque()
        self._wake = asyncio.Event()
        self._cleaner: asyncio.Task[None] | None = None
        self._rest = asyncio.Event()
        self._rest.set()

    async def __aenter__(self) -> Self:
        self._cleaner = asyncio.create_task(self._clean(), name="tunnel-registry-cleanup")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cleaner, self._cleaner = self._cleaner, None
        assert cleaner is not None
        cleaner.cancel()
        await asyncio.gather(cleaner, return_exceptions=True)
        # Nothing runs beside this any more: what the task has left is finished here, without the lock.
        while self._cleanups:
            self._clean_one(*self._cleanups.popleft())

    def snapshot(self) -> Snapshot:
        """What is held now."""
        return Snapshot(len(self.tunnels), self._routes, len(self.bindings), self._permits, len(self._cleanups))

    async def wait_rest(self, timeout_s: float) -> None:
        """Wait until no route, binding or permit is held. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._rest.wait()

    def new_entry(self, now: float) -> TunnelEntry:
        """An entry for a tunnel to be, with an id never used before in this process; holds nothing until attached."""
        return TunnelEntry(next(self._tunnel_ids), now)

    def attach(self, entry: TunnelEntry) -> None:
        """The tunnel came up: routes may be bound to it."""
        self.tunnels[entry.tunnel_id] = entry

    def next_conn_id(self) -> int:
        """Dialing side: a conn_id never used before in this process."""
        return next(self._conn_ids)

    def lease(self) -> Permit:
        """Reserve the cleanup of one route. Raises TooManyRoutesError."""
        if self._cleaner is None:
            raise RuntimeError("the registry is not entered: use it as an async context manager")
        limit = self.max_connections
        if limit and (self._routes >= limit or self._permits >= limit + self.cleanup_headroom):
            self.counters.too_many_routes += 1
            raise TooManyRoutesError(limit)
        self._permits += 1
        self._rest.clear()
        return Permit(self._return_permit)

    def bind(self, entry: TunnelEntry, route: Route) -> None:
        """Make ``route`` the one active route of its conn_id on this tunnel.

        Raises KeyError if the tunnel is gone or the conn_id has a route already.
        """
        if self.tunnels.get(entry.tunnel_id) is not entry:
            raise KeyError(f"tunnel {entry.tunnel_id} is gone")
        key = (entry.tunnel_id, route.conn_id)
        if key in self.bindings:
            raise KeyError(f"conn_id {route.conn_id} is bound on tunnel {entry.tunnel_id}")
        self.bindings[key] = route
        entry.routes[route.conn_id] = route
        entry.idle_since = None
        self._routes += 1
        self.counters.routes_opened += 1

    def drop(self, entry: TunnelEntry, route: Route, closed: Closed, keep: bool, now: float) -> bool:
        """End a route; false if it had ended already. ``keep``: the consumer may still take what waits."""
        if not route.finish(closed, keep):
            return False
        if entry.routes.pop(route.conn_id, None) is not None:
            self._routes -= 1
            if not entry.routes:
                entry.idle_since = now
        self.counters.routes_closed[closed.reason.label] += 1
        self.counters.merged += route.inbound.merged + route.outbound.merged
        self._cleanups.append((route, closed))
        self._wake.set()
        return True

    def detach(self, entry: TunnelEntry, closed: Closed, now: float) -> None:
        """A tunnel is gone: every route bound to it ends with ``closed``; idempotent."""
        self.tunnels.pop(entry.tunnel_id, None)
        for route in list(entry.routes.values()):
            self.drop(entry, route, closed, True, now)

    async def _clean(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._cleanups:
                async with self.binding_lock:
                    batch = [self._cleanups[i] for i in range(min(_BATCH, len(self._cleanups)))]
                    for route, _ in batch:
                        self.bindings.pop((route.tunnel_id, route.conn_id), None)
                for _ in batch:
                    self._clean_one(*self._cleanups.popleft())
                await asyncio.sleep(0)

    def _clean_one(self, route: Route, closed: Closed) -> None:
        self.bindings.pop((route.tunnel_id, route.conn_id), None)
        if route.on_closed is not None:
            call_user(self.counters, route.on_closed, route, closed)
        route.permit.release()

    def _return_permit(self) -> None:
        self._permits -= 1
        if not self._permits:
            self._rest.set()


def call_user(counters: Counters, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
    """Run a callback of the user; its exception is logged and counted, never a tunnel's end. True if it returned."""
    try:
        function(*args, **kwargs)
    except Exception:
        counters.handler_errors += 1
        _LOG.exception("a tunnel callback failed: %r", function)
        return False
    return True
