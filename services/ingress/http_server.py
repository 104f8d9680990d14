"""uvicorn inside the service's own life: it binds before anything is promised, handles no signals and ends when
told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from libs.service.errors import StartError

_BACKLOG = 2_048
_SEND_BUFFER_BYTES = 256 << 10
_KEEP_ALIVE_S = 75
_UP_WITHIN_S = 10.0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's."""
        yield


class HttpServer:
    """One listening socket. `run` serves until `stop`."""

    def __init__(self, app: ASGIApp, listen: str) -> None:
        """Binds. Raises StartError."""
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        try:
            self._socket = socket.create_server(
                (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
            )
        except OSError as error:
            raise StartError(
                f"cannot listen on {listen} ({error.strerror})",
                remedy="stop what holds the port, or choose another with the setting `listen`",
            ) from None
        # Inherited by connections: what the kernel holds for a client that reads slowly, instead of megabytes each.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.port = int(self._socket.getsockname()[1])
        self.target = f"{listen.rpartition(':')[0]}:{self.port}"
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                backlog=_BACKLOG,
            )
        )
        self._ended = asyncio.Event()

    async def run(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._ended.set()

    async def up(self) -> None:
        """Returns once connections are accepted."""
        async with asyncio.timeout(_UP_WITHIN_S):
            await self._server.up.wait()

    def stop(self) -> None:
        """Stops accepting; `run` returns when the running requests have ended."""
        self._server.should_exit = True

    async def ended(self, within_s: float) -> bool:
        """Whether `run` has returned by then."""
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True
