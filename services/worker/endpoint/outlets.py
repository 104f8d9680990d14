"""Where an assignment's reply, deltas and result go: its route on a tunnel, or the stream of a direct call.

An outlet never blocks and never raises: whoever listens slowly pays with merged deltas, whoever has gone hears nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from libs.contracts.segue.v1 import worker_pb2
from libs.controller.merging import extend_delta
from libs.controller.protocol import Delta, OfferReply, Result
from libs.controller.wire import TunnelCodec
from libs.controller.wire_fields import to_proto
from libs.tunnel import CloseReason, PayloadTooLargeError, Route, RouteClosedError


class Outlet(Protocol):
    """One assignment's way back."""

    def send(self, value: OfferReply | Delta | Result) -> None:
        """Queues the value."""
        ...

    def done(self) -> None:
        """Nothing follows. Idempotent."""
        ...


class RouteOutlet:
    """On a tunnel. What one iteration sends for several routes leaves in one frame (the tunnel's writer).

    `beats`: the number of the last heartbeat sent to the router, perhaps on another of its tunnels.
    """

    def __init__(self, route: Route, codec: TunnelCodec, beats: Callable[[], int]) -> None:
        self._route, self._codec, self._beats = route, codec, beats

    def send(self, value: OfferReply | Delta | Result) -> None:
        """See Outlet. A route that cannot take more is dropped by the tunnel, which cancels its assignment."""
        if isinstance(value, Result):
            value = replace(value, heartbeat=self._beats())
        try:
            self._route.post(self._codec.encode(value))
        except RouteClosedError:
            return
        except PayloadTooLargeError:
            self._route.close(CloseReason.PROTOCOL, "a message exceeds the tunnel's frame size")

    def done(self) -> None:
        """See Outlet."""
        self._route.close(CloseReason.DONE)


class DirectOutlet:
    """Of a `Generate` call. What waits is bounded by the request's own budget: deltas that wait are merged."""

    def __init__(self) -> None:
        self._waiting: deque[worker_pb2.WorkerGenerateResponse] = deque()
        self._news = asyncio.Event()
        self.declined: OfferReply | None = None
        self._done = False

    def send(self, value: OfferReply | Delta | Result) -> None:
        """See Outlet. A decline is kept aside: it ends the call with a status."""
        event = worker_pb2.WorkerGenerateResponse()
        message = to_proto(value)
        if isinstance(value, OfferReply):
            if not value.accepted:
                self.declined = value
            assert isinstance(message, worker_pb2.OfferReply)
            event.accepted.CopyFrom(message)
        elif isinstance(value, Delta):
            assert isinstance(message, worker_pb2.Delta)
            last = self._waiting[-1] if self._waiting else None
            if last is not None and last.WhichOneof("event") == "delta" and extend_delta(last.delta, message):
                return
            event.delta.CopyFrom(message)
        else:
            assert isinstance(message, worker_pb2.Result)
            event.result.CopyFrom(message)
        self._waiting.append(event)
        self._news.set()

    def done(self) -> None:
        """See Outlet."""
        self._done = True
        self._news.set()

    async def receive(self) -> worker_pb2.WorkerGenerateResponse | None:
        """The next event; None once nothing follows. The caller bounds the wait by its call's life."""
        while not self._waiting:
            if self._done:
                return None
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()
