"""HTTP in and out: bounded bodies, clients that leave, clients that stall, event streams.

A request's work runs beside a watcher of its connection. Whoever ends first decides: if the client leaves (or the
process is about to end) the work is cancelled, which releases everything it holds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from services.ingress.errors import ApiError, unavailable

T = TypeVar("T")

_BODY_WITHIN_S = 60.0


class ClientGoneError(Exception):
    """The client has closed its connection, or takes nothing any more: there is nobody to answer."""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError (413, 408), ClientGoneError."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {_BODY_WITHIN_S:g} s.", code="timeout") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")


async def while_connected(receive: Receive, closing: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves or `closing` is set.

    To be called once the request's body is read. Raises ClientGoneError, ApiError (503) on closing, and what `work`
    raises.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    ending = asyncio.create_task(closing.wait())
    tasks: set[asyncio.Task[Any]] = {working, leaving, ending}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise ClientGoneError
        raise unavailable("The server is shutting down; the request may be tried again.")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events. The status is sent with the first event, so that an error before it can still
    have a status of its own."""

    def __init__(self, send: Send, headers: Mapping[str, str], stall_s: float) -> None:
        """`stall_s`: how long a client may take nothing."""
        self._send = send
        self._headers = dict(headers) | {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # proxies must not collect events
        }
        self._stall_s = stall_s
        self.started = False

    async def data(self, content: object) -> None:
        """One event. Raises ClientGoneError."""
        await self.text(json.dumps(content, ensure_ascii=False, separators=(",", ":")))

    async def text(self, content: str) -> None:
        """One event of literal text, e.g. `[DONE]`. Raises ClientGoneError."""
        if not self.started:
            self.started = True
            await self._pass({"type": "http.response.start", "status": 200, "headers": raw_headers(self._headers)})
        await self._pass({"type": "http.response.body", "body": f"data: {content}\n\n".encode(), "more_body": True})

    async def close(self) -> None:
        """The end of the response. Raises ClientGoneError."""
        await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGoneError from None


class JsonAnswer:
    """A whole JSON response."""

    def __init__(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self._body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        self._headers = dict(headers or {}) | {
            "content-type": "application/json",
            "content-length": str(len(self._body)),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": raw_headers(self._headers)})
        await send({"type": "http.response.body", "body": self._body})


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
