"""A grpc.aio server with everything a Segue service offers beside its own API: health, reflection, typed errors, TLS.

Health follows grpc.health.v1: the server as a whole ("") and each service by its full name, all NOT_SERVING from the
first moment until `set_serving(True)`, and NOT_SERVING for good from `leave()` on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from libs.service import telemetry
from libs.service.errors import StartError
from libs.service.interceptors import ErrorInterceptor
from libs.service.transport import Transport

_STATUS = health_pb2.HealthCheckResponse


class BindError(StartError):
    """The server's address cannot be listened on."""


class _Health(health.aio.HealthServicer):  # type: ignore[misc, name-defined, unused-ignore]
    """As the library's, but its endless Watch streams end when the server stops: they must not use up the grace."""

    def __init__(self) -> None:
        super().__init__()
        self._stopping = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        watching, stopping = (
            asyncio.ensure_future(super().Watch(request, context)),
            asyncio.ensure_future(self._stopping.wait()),
        )
        try:
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
                return
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        finally:
            watching.cancel()
            stopping.cancel()

    def end_watches(self) -> None:
        self._stopping.set()


class GrpcServer:
    """Add servicers, then `start`. Not reusable after `stop`."""

    def __init__(self, listen: str, transport: Transport) -> None:
        """listen: HOST:PORT, port 0 for any free one."""
        self._listen = listen
        self._transport = transport
        # OpenTelemetry outermost: it sees the status the error interceptor makes of an exception.
        self._server = grpc.aio.server(
            interceptors=[*telemetry.server_interceptors(), ErrorInterceptor()], options=transport.server_options()
        )
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []
        self.port = 0
        """The bound port, once started."""

    @property
    def target(self) -> str:
        """HOST:PORT as bound."""
        return f"{self._listen.rpartition(':')[0]}:{self.port}"

    def add(self, servicer: Any, register: Callable[[Any, Any], None], full_name: str) -> None:
        """register: the generated add_XServicer_to_server; full_name: such as segue.v1.Router."""
        register(servicer, self._server)
        self._names.append(full_name)

    @property
    def has_services(self) -> bool:
        return bool(self._names)

    async def start(self, listen: str | None = None) -> int:
        """Binds (`listen` overrides the constructor's) and answers from now on, NOT_SERVING by its health.

        Returns the port. Raises BindError, TlsFileError.
        """
        self._listen = listen or self._listen
        await self.set_serving(False)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        credentials = self._transport.server_credentials()
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(self._listen)
            else:
                self.port = self._server.add_secure_port(self._listen, credentials)
        except RuntimeError as error:
            self.port = 0
            cause = str(error)
        else:
            cause = "the address cannot be bound"
        if self.port == 0:
            raise BindError(
                f"cannot listen on {self._listen} ({cause})",
                remedy="another process may hold the port: stop it, or choose another with the setting `listen`",
            )
        await self._server.start()
        return self.port

    async def set_serving(self, serving: bool) -> None:
        for name in ("", *self._names):
            await self._health.set(name, _STATUS.SERVING if serving else _STATUS.NOT_SERVING)

    async def leave(self) -> None:
        """NOT_SERVING for good, while running and even new requests are still served."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests; running ones may finish within grace_s seconds, then are cancelled."""
        self._health.end_watches()
        await self._server.stop(grace_s)
