"""A worker that echoes, as a process of its own: `python -m prove.echo_worker [--host HOST] [--port PORT]`.

It serves Attach, prints its port as JSON on one line, and ends when its stdin does, so nobody leaves it behind. What a
route wants is its first payload:

- `stream N`: N numbered tokens (u32, big-endian), one an iteration, then DONE;
- `paced N TICKS`: N deltas (u32 number, u64 monotonic nanoseconds), one every TICKS ticks, then DONE;
- `hold`: nothing, as if queued or in a long prefill, until somebody ends it; `end` ends it here;
- `echo`: every payload comes back, `bye` ends it;
- `ledger`: what is held and what has happened, as JSON, then DONE. It is no assignment.

Every route but the ledger's is an assignment that holds a reservation until it ends, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from libs.tunnel import Carrier, Closed, CloseReason, Handlers, Registry, Route, RouteClosedError, Side, Tunnel
from libs.tunnel.grpc_carrier import Context, serve_tunnel
from tests.fixtures.attach_server import attach_server

TOKEN = struct.Struct(">I")
DELTA = struct.Struct(">IQ")
TICK_S = 0.01
_PAGES = 4
"""What an assignment reserves."""


def joined(first: bytes, second: bytes) -> bytes | None:
    """Payloads are runs of fixed-size records."""
    return first + second


@dataclass
class Ledger:
    """What this process holds and has seen."""

    assignments: int = 0
    pages: int = 0
    accepted: int = 0
    twice: int = 0
    """Routes accepted under a conn_id that had one already: a conn_id is never used again by its dialer."""
    ended: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)

    def open(self, conn_id: int) -> None:
        self.assignments, self.pages, self.accepted = self.assignments + 1, self.pages + _PAGES, self.accepted + 1
        self.twice += conn_id in self.seen
        self.seen.add(conn_id)

    def close(self, reason: CloseReason) -> None:
        self.assignments, self.pages = self.assignments - 1, self.pages - _PAGES
        self.ended[reason.label] += 1

    def document(self, registry: Registry) -> bytes:
        held = registry.snapshot()
        found = {
            "assignments": self.assignments,
            "pages": self.pages,
            "accepted": self.accepted,
            "twice": self.twice,
            "ended": dict(self.ended),
            # Without the route that asks.
            "routes": held.routes - 1,
            "bindings": held.bindings - 1,
            "permits": held.permits - 1,
        }
        return json.dumps(found).encode()


@dataclass
class _Paced:
    route: Route
    left: int
    ticks: int
    number: int = 0


class Echo:
    """Everything that happens on this worker's routes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._tasks: set[asyncio.Task[None]] = set()
        self._paced: dict[int, list[_Paced]] = {}
        self._born = 0
        self.ledger = Ledger()

    def accept(self, route: Route, payload: bytes) -> None:
        """A new route and what it wants."""
        command, *numbers = payload.split()
        if command == b"ledger":
            route.post(self.ledger.document(self._registry))
            route.close(CloseReason.DONE)
            return
        self.ledger.open(route.conn_id)
        route.on_closed = lambda _route, closed: self._closed(closed)
        if command == b"paced":
            count, ticks = int(numbers[0]), int(numbers[1])
            self._born += 1
            # Spread over the ticks, in the order of arrival.
            self._paced.setdefault(self._born % ticks, []).append(_Paced(route, count, ticks))
            return
        work = {b"stream": self._stream, b"hold": self._hold, b"echo": self._echo}[command]
        task = asyncio.create_task(work(route, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _closed(self, closed: Closed) -> None:
        self.ledger.close(closed.reason)

    async def tick(self) -> None:
        """An iteration every tick, for as long as the process lives: a delta for each lane that is due."""
        loop = asyncio.get_running_loop()
        began, number = loop.time(), 0
        while True:
            number += 1
            for phase, lanes in self._paced.items():
                self._paced[phase] = [
                    lane for lane in lanes if number % lane.ticks != phase % lane.ticks or _step(lane)
                ]
            late = loop.time() - began - number * TICK_S
            await asyncio.sleep(max(0.0, -late))

    async def _stream(self, route: Route, payload: bytes) -> None:
        try:
            for number in range(int(payload.split()[1])):
                route.post(TOKEN.pack(number))
                await asyncio.sleep(0)
            route.close(CloseReason.DONE)
        except RouteClosedError:
            return

    async def _hold(self, route: Route, _payload: bytes) -> None:
        try:
            async for more in route:
                if more == b"end":
                    route.close(CloseReason.DONE)
                    return
        except RouteClosedError:
            return

    async def _echo(self, route: Route, payload: bytes) -> None:
        try:
            route.post(payload)
            async for more in route:
                if more == b"bye":
                    route.close(CloseReason.DONE)
                    return
                route.post(more)
        except RouteClosedError:
            return


def _step(lane: _Paced) -> bool:
    """One delta; whether more are due."""
    try:
        lane.route.post(DELTA.pack(lane.number, time.monotonic_ns()))
        lane.number += 1
        if lane.number < lane.left:
            return True
        lane.route.close(CloseReason.DONE)
    except RouteClosedError:
        pass
    return False


async def serve(host: str, port: int) -> None:
    """Until stdin ends."""
    async with Registry() as registry:
        echo = Echo(registry)

        async def attach(carrier: Carrier, context: Context) -> None:
            handlers = Handlers(merge=joined, accept=echo.accept)
            await serve_tunnel(Tunnel(carrier, registry, Side.ACCEPTING, handlers), context)

        server = attach_server(attach)
        bound = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        ticking = asyncio.create_task(echo.tick())
        print(json.dumps({"port": bound}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        ticking.cancel()
        await server.stop(None)


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args(arguments)
    asyncio.run(serve(given.host, given.port))


if __name__ == "__main__":
    main(sys.argv[1:])
