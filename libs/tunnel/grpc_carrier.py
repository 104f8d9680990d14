"""gRPC streams as carriers, at either end, carrying serialized frames.

The frame codec serializes and checks bytes itself (size limit and undecodable input become typed ends of the tunnel,
not errors inside the gRPC runtime), so the method is called and served without gRPC's own (de)serializers. On the
wire nothing differs from the generated stubs and servicers; reflection describes the same method.

gRPC traps held here: cancelling an awaited ``read`` cancels the whole call, so a carrier's read is only cancelled at
the end; a server's read reports a broken connection as a plain end of stream; a handler ends with ``context.abort``,
never with an escaping exception.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import grpc
import grpc.aio

from .carrier import Carrier
from .errors import CarrierLostError, CloseReason
from .tunnel import Tunnel

# grpc's stubs type neither the calls nor the contexts of raw methods.
Call = Any
Context = Any
T = TypeVar("T")

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

# A generated add_…Servicer_to_server: (servicer, server).
Register = Callable[[Any, Any], None]
Attach = Callable[[Carrier, Context], Awaitable[None]]

_ABORTS = {
    CloseReason.CORRUPT: grpc.StatusCode.DATA_LOSS,
    CloseReason.PROTOCOL: grpc.StatusCode.INVALID_ARGUMENT,
}


class _Begun(Generic[T]):
    """An operation that runs already, to be awaited later, once; a coroutine alone begins only when it is awaited.

    Its first step is taken here, in the caller's task; the others when ``result`` is awaited. No task of its own: one
    for each message costs more than is gained, and would not begin before its creator next waits.
    """

    __slots__ = ("_awaited", "_ended", "_work")

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._awaited: Any = None
        self._ended: BaseException | None = None
        try:
            self._awaited = work.send(None)
        except BaseException as ended:
            self._ended = ended

    @types.coroutine
    def result(self) -> Generator[Any, Any, T]:
        """What came of it; raises what it raised."""
        if isinstance(self._ended, StopIteration):
            return self._ended.value  # type: ignore[no-any-return]
        if self._ended is not None:
            raise self._ended
        try:
            yield self._awaited
        except BaseException as error:
            # Cancelled while it waits: the operation must hear of it, and may wait on.
            try:
                yield self._work.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        return (yield from self._work)  # type: ignore[no-any-return]

    def drop(self) -> None:
        """Nobody awaits it any more."""
        self._work.close()


class ClientCarrier:
    """The dialing end of an Attach stream; cancelling resets it, and the server may drop what it has not read."""

    cancel_overtakes: ClassVar[bool] = True

    def __init__(self, call: Call, peer: str) -> None:
        self._call = call
        self._peer = peer
        self._ahead: _Begun[Any] | None = None

    @property
    def peer(self) -> str:
        """The dialed target."""
        return self._peer

    async def read(self) -> bytes | None:
        """See Carrier."""
        ahead, self._ahead = self._ahead, None
        try:
            data = await (ahead.result() if ahead is not None else self._call.read())
            if data is not _EOF:
                # The runtime fetches the next one while this one is looked at.
                self._ahead = _Begun(self._call.read())
        except grpc.aio.AioRpcError as error:
            raise CarrierLostError(_describe(error)) from None
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise CarrierLostError(str(error)) from None
        return None if data is _EOF else bytes(data)

    async def write(self, data: bytes) -> None:
        """See Carrier."""
        try:
            await self._call.write(data)
        except grpc.aio.AioRpcError as error:
            raise CarrierLostError(_describe(error)) from None
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise CarrierLostError(str(error)) from None

    async def finish(self) -> None:
        """See Carrier."""
        try:
            await self._call.done_writing()
        except grpc.aio.AioRpcError as error:
            raise CarrierLostError(_describe(error)) from None
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise CarrierLostError(str(error)) from None

    def cancel(self) -> None:
        """See Carrier."""
        self._call.cancel()
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None

    def lost(self) -> bool:
        """A cancelled dialer was cancelled here, not by its peer."""
        return False


class ServerCarrier:
    """The accepting end of an Attach stream, which ends behind all it has written when the handler returns."""

    cancel_overtakes: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def peer(self) -> str:
        """The caller's address as gRPC writes it."""
        return str(self._context.peer())

    async def read(self) -> bytes | None:
        """See Carrier."""
        try:
            data = await self._context.read()
        except grpc.aio.BaseError as error:
            raise CarrierLostError(str(error)) from None
        return None if data is _EOF else bytes(data)

    async def write(self, data: bytes) -> None:
        """See Carrier."""
        try:
            await self._context.write(data)
        except grpc.aio.BaseError as error:
            raise CarrierLostError(str(error)) from None

    async def finish(self) -> None:
        """A server's direction ends with its handler."""

    def cancel(self) -> None:
        """A server's stream ends with its handler."""

    def lost(self) -> bool:
        """gRPC cancels the handler of a call whose client has gone."""
        return bool(self._context.cancelled())


def dial(
    channel: grpc.aio.Channel,
    target: str,
    service: str,
    *,
    method: str = "Attach",
    metadata: Sequence[tuple[str, str]] = (),
) -> ClientCarrier:
    """Start an Attach call on ``service`` (full name); connection errors surface from the carrier's first read.

    ``target`` is what ``Carrier.peer`` reports. The channel stays the caller's to close.
    """
    raw: Any = channel.stream_stream(f"/{service}/{method}", request_serializer=None, response_deserializer=None)
    return ClientCarrier(raw(metadata=tuple(metadata) or None), target)


def with_attach(register: Register, service: str, attach: Attach, *, method: str = "Attach") -> Register:
    """A service's generated ``add_…Servicer_to_server``, with one method of it served raw by ``attach``.

    ``service``: its full name, such as segue.v1.Worker.

    ``attach`` builds a tunnel on the carrier and awaits ``serve_tunnel``; the servicer's own method is never called.
    """

    async def behaviour(_requests: object, context: Context) -> None:
        await attach(ServerCarrier(context), context)

    def register_both(servicer: Any, server: Any) -> None:
        register(servicer, server)
        # Of two registrations of a method the later one holds.
        handler = grpc.stream_stream_rpc_method_handler(behaviour, request_deserializer=None, response_serializer=None)
        server.add_registered_method_handlers(service, {method: handler})

    return register_both


async def serve_tunnel(tunnel: Tunnel, context: Context) -> None:
    """Run an accepted tunnel to its end; a corrupt or misbehaving peer sees it in the status of its call."""
    closed = await tunnel.run()
    code = _ABORTS.get(closed.reason)
    if code is not None and not closed.by_peer:
        await context.abort(code, closed.detail)


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
