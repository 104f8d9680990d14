"""Server interceptor: no exception escapes a handler.

An escaping exception would reach the caller as UNKNOWN with Python text in it, and leave the call's span without an
error. Here a `ServiceError` becomes its own status with details, anything else INTERNAL with an id that the log line of
the traceback carries too. Aborts and cancellation pass.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from libs.service import telemetry
from libs.service.errors import DETAILS_KEY, ServiceError, status_details, status_message
from libs.service.logs import get_logger

log = get_logger(__name__)

# grpc.aio gives no types for a handler's request or response; they pass through untouched.
_Behavior = Callable[[Any, Any], Any]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, type-arg, unused-ignore]
    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None
        return wrap_handler(handler, lambda behavior: _guarded(behavior, str(handler_call_details.method)))


def wrap_handler(handler: Any, wrap: Callable[[_Behavior], _Behavior]) -> Any:
    """The same handler with its behaviour wrapped, of whichever of the four kinds it is."""
    kind = (
        ("stream" if handler.request_streaming else "unary")
        + "_"
        + ("stream" if handler.response_streaming else "unary")
    )
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(wrap(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer)


def _guarded(behavior: _Behavior, method: str) -> _Behavior:
    # grpc.aio tells the two styles of streaming handler apart by inspection, so the wrapper must be of the same style.
    if inspect.isasyncgenfunction(behavior):

        async def generator(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in behavior(request, context):
                    yield response
            except Exception as error:
                await _abort(error, context, method)

        return generator

    async def coroutine(request: Any, context: Any) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:
            await _abort(error, context, method)

    return coroutine


async def _abort(error: Exception, context: Any, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    # An operation on a call that is over: the peer is gone or the server is stopping, and nobody is left to answer.
    if isinstance(error, grpc.aio.InternalError) or context.cancelled():
        log.debug("call was over before its answer", method=method, error=error)
        raise asyncio.CancelledError from error
    # `context.cancelled()` lags behind the cancellation of the handler's task, so that count is looked at too; but a
    # TaskGroup that failed may leave it raised (Python 3.11), so an answer is tried all the same.
    task = asyncio.current_task()
    cancelling = task is not None and task.cancelling() > 0
    try:
        if isinstance(error, ServiceError):
            log.debug("request refused", method=method, reason=error.reason, code=error.code.name)
            await context.abort(error.code, status_message(error), ((DETAILS_KEY, status_details(error)),))
        error_id = secrets.token_hex(8)
        telemetry.record_error(error, error_id)
        say = log.debug if cancelling else log.error
        say("handler failed", method=method, error_id=error_id, exc_info=error)
        message = f"internal error, id {error_id}: its cause is in this service's log"
        await context.abort(grpc.StatusCode.INTERNAL, message)
    except grpc.aio.InternalError as over:
        raise asyncio.CancelledError from over
    raise AssertionError("abort always raises")
