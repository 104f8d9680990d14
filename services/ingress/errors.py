"""Errors as the OpenAI API shapes them: `{"error": {"message", "type", "param", "code"}}`.

The same object is the body of a refused request and the data of an error event in a stream whose HTTP status is sent
already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc


@dataclass
class ApiError(Exception):
    """A request cannot be served; what the client is told."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Whole seconds, at least one: clients retry at once on 0."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, why: str = "does not exist") -> ApiError:
    return ApiError(
        404, f"The model `{name}` {why}: GET /v1/models lists what is served.", param="model", code="model_not_found"
    )


def context_exceeded(limit: int, prompt: int, budget: int, param: str) -> ApiError:
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + budget} tokens "
        f"({prompt} in the prompt, {budget} for the completion). Please reduce the length of either one.",
        param,
        "context_length_exceeded",
    )


def overloaded(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="overloaded", retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(503, message, "service_unavailable_error", code="service_unavailable", retry_after_s=retry_after_s)


def deadline_exceeded(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"The request was not finished within {seconds:g} s: ask for fewer tokens, or raise the deadline.",
        "timeout_error",
        code="deadline_exceeded",
    )


def internal(request_id: str) -> ApiError:
    return ApiError(500, f"The request failed (request id {request_id}).", "server_error", code="internal_error")


def slow_client() -> ApiError:
    return ApiError(
        429,
        "The stream was dropped because its client reads more slowly than the model writes: read faster.",
        "rate_limit_error",
        code="slow_client",
    )


_OK, _INVALID, _DEADLINE, _NOT_FOUND, _EXHAUSTED, _PRECONDITION, _OUT_OF_RANGE, _UNAVAILABLE = (
    code.value[0]
    for code in (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
    )
)


def from_router(code: int, message: str, retry_after_ms: int, request_id: str, model: str) -> ApiError:
    """An ErrorDelivery, by the meaning of its status code. Anything that is no client's doing is told by its request
    id."""
    retry_after_s = retry_after_ms / 1_000 if retry_after_ms else 1.0
    if code in (_INVALID, _PRECONDITION):
        return bad_request(message)
    if code == _OUT_OF_RANGE:
        return bad_request(message, code="context_length_exceeded")
    if code == _NOT_FOUND:
        return model_not_found(model, "is not served now")
    if code == _EXHAUSTED:
        return overloaded(message, retry_after_s)
    if code == _UNAVAILABLE:
        return unavailable(message, retry_after_s)
    if code == _DEADLINE:
        return ApiError(504, message, "timeout_error", code="deadline_exceeded")
    error = internal(request_id)
    error.message = f"{error.message[:-1]}: {message}" if message else error.message
    return error
