"""The sending end of the frames' bench: `python -m prove.frame_server`, one process, on the services' event loop.

It serves the bare bidirectional stream and Attach beside it, says its port as JSON, and ends with its stdin. Both send
when told to: `COUNT PACE_US BYTES` messages on the stream; on a tunnel, as a control message, `TURNS PACE_US LANES
MOST`: a payload to each of so many routes, a turn, and no more than MOST of them in a frame. Everything begins with the
monotonic nanoseconds of when it was handed over.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from dataclasses import replace
from itertools import cycle

import grpc
import grpc.aio
import uvloop

from libs.tunnel import Carrier, Handlers, Registry, Route, Side, Tunnel, TunnelConfig
from libs.tunnel.grpc_carrier import Context, serve_tunnel
from tests.fixtures.attach_server import attach_server

STREAM = "segue.Bench"
STAMP = struct.Struct("<Q")
PAYLOAD_BYTES = 100
CONFIG = TunnelConfig(command_items=1_024)
_LIMIT_S = 60.0
_PAD = b"x" * (PAYLOAD_BYTES - STAMP.size)


class _Pace:
    """Nothing, or so many microseconds between two."""

    def __init__(self, pace_us: int) -> None:
        self._step_s = pace_us / 1e6
        self._next = asyncio.get_running_loop().time()

    async def wait(self) -> None:
        if not self._step_s:
            # The end of a turn all the same.
            return await asyncio.sleep(0)
        self._next += self._step_s
        return await asyncio.sleep(max(0.0, self._next - asyncio.get_running_loop().time()))


async def bare(_requests: object, context: Context) -> None:
    """The stream: writes what each request asks for."""
    while (request := await context.read()) is not grpc.aio.EOF:
        count, pace_us, size = map(int, request.split())
        pace, pad = _Pace(pace_us), b"x" * (size - STAMP.size)
        for _ in range(count):
            await context.write(STAMP.pack(time.monotonic_ns()) + pad)
            await pace.wait()


class Sender:
    """The accepting end of the tunnels."""

    def __init__(self) -> None:
        self._routes: dict[int, list[Route]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def handlers(self) -> Handlers:
        return Handlers(accept=self._accept, on_control=self._go)

    def _accept(self, route: Route, _payload: bytes) -> None:
        self._routes.setdefault(route.tunnel_id, []).append(route)

    def _go(self, tunnel: Tunnel, payload: bytes) -> None:
        turns, pace_us, lanes, most = map(int, payload.split())
        # Of this end alone, for this bench: frames that are no larger than wanted.
        tunnel.writer.reconfigure(replace(CONFIG, max_items=most))
        task = asyncio.create_task(self._send(self._routes[tunnel.tunnel_id], turns, pace_us, lanes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, routes: list[Route], turns: int, pace_us: int, lanes: int) -> None:
        pace, each = _Pace(pace_us), cycle(routes)
        for _ in range(turns):
            for _ in range(lanes):
                await next(each).send(STAMP.pack(time.monotonic_ns()) + _PAD, _LIMIT_S)
            await pace.wait()


async def serve() -> None:
    """Until stdin ends."""
    sender = Sender()
    async with Registry() as registry:

        async def attach(carrier: Carrier, context: Context) -> None:
            await serve_tunnel(Tunnel(carrier, registry, Side.ACCEPTING, sender.handlers(), CONFIG), context)

        server = attach_server(attach)
        server.add_registered_method_handlers(STREAM, {"Echo": grpc.stream_stream_rpc_method_handler(bare)})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(json.dumps({"port": port}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(None)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
