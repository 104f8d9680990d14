"""Client channels, all with the same options; see `transport` for what they are and why."""

from __future__ import annotations

import grpc

from libs.service import telemetry
from libs.service.transport import Transport


def open_channel(target: str, transport: Transport, *, server_name: str = "") -> grpc.aio.Channel:
    """A channel to HOST:PORT (or any gRPC target), with TLS as `transport` has it; it connects at first use.

    server_name: what the server's certificate must be for, where `target` is an address that a name stood for; empty =
    the target's own host.

    Its own TCP connection, however many channels the process has. With tracing on, unary calls carry the current
    span's context and make a client span each. Close it with `await channel.close()`. Raises TlsFileError.
    """
    options, interceptors = transport.client_options(), telemetry.client_interceptors()
    credentials = transport.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    if server_name:
        options = [*options, ("grpc.ssl_target_name_override", server_name)]
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=interceptors)
