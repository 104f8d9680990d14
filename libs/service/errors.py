"""Typed errors of a service and their way over gRPC.

A `ServiceError` carries what a caller needs to act: a status code by its meaning, a stable reason, the offending values
and the remedy. It travels as the call's status plus a google.rpc.Status in the trailing metadata (ErrorInfo, and
RetryInfo where a time to retry is known), which grpcurl and every gRPC library can print. A `StartError` ends a service
that cannot start: one line for the operator, no traceback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped, unused-ignore]

DOMAIN = "segue"
DETAILS_KEY = "grpc-status-details-bin"
# HTTP/2 peers commonly refuse more than 8 KiB of metadata in all.
_MESSAGE_LIMIT = 2_000
_VALUE_LIMIT = 500


class ServiceError(Exception):
    """Base of errors a caller may see. A subclass sets `code`; its name is the reason a caller can match on."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        remedy: str,
        values: Mapping[str, object] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.values = {key: str(value) for key, value in (values or {}).items()}
        self.retry_after_s = retry_after_s

    @property
    def reason(self) -> str:
        """UnknownModelError → UNKNOWN_MODEL."""
        bare = type(self).__name__.removesuffix("Error")
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).upper()

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}"


class StartError(RuntimeError):
    """A service cannot start. `remedy` says what to change."""

    def __init__(self, message: str, *, remedy: str) -> None:
        self.message, self.remedy = message, remedy
        super().__init__(f"{message}: {remedy}")


@dataclass(frozen=True)
class ErrorDetails:
    """What a caller reads back of a ServiceError (or of any other gRPC failure, then with an empty reason)."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    remedy: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None


def status_details(error: ServiceError) -> bytes:
    """The google.rpc.Status of the error, serialized for the trailing metadata key `grpc-status-details-bin`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    info.metadata["remedy"] = error.remedy[:_VALUE_LIMIT]
    for key, value in error.values.items():
        info.metadata[key] = value[:_VALUE_LIMIT]
    # grpcio's own readers insist that code and message equal the call's.
    status = status_pb2.Status(code=error.code.value[0], message=status_message(error))
    packed = any_pb2.Any()
    packed.Pack(info)
    status.details.append(packed)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(0, round(error.retry_after_s * 1_000)))
        packed = any_pb2.Any()
        packed.Pack(retry)
        status.details.append(packed)
    serialized: bytes = status.SerializeToString()
    return serialized


def status_message(error: ServiceError) -> str:
    return str(error)[:_MESSAGE_LIMIT]


def read_error(error: grpc.aio.AioRpcError) -> ErrorDetails:
    """The typed content of a failed call. Never raises: a peer's malformed details count as none."""
    plain = ErrorDetails(error.code(), error.details() or "")
    # grpc-stubs types the metadata as one pair; it is a sequence of them.
    trailing = cast("Sequence[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    raw = next((value for key, value in trailing if key == DETAILS_KEY), None)
    if not isinstance(raw, bytes):
        return plain
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    try:
        for packed in status_pb2.Status.FromString(raw).details:
            packed.Unpack(info)
            if packed.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1_000
    except Exception:
        return plain
    values = {key: value for key, value in info.metadata.items() if key != "remedy"}
    return ErrorDetails(plain.code, plain.message, info.reason, info.metadata.get("remedy", ""), values, retry_after_s)
