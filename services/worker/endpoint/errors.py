"""What the worker's calls refuse with: each carries the value and the remedy."""

from __future__ import annotations

import grpc

from libs.controller.protocol import DeclineReason
from libs.service.errors import ServiceError


class DeclinedError(ServiceError):
    """A direct call's offer was declined."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, reason: DeclineReason, detail: str, retry_after_s: float) -> None:
        super().__init__(
            f"declined: {reason.name} ({detail})",
            remedy="try again later, or another worker",
            values={"reason": reason.name, "detail": detail},
            retry_after_s=retry_after_s,
        )


class InvalidRequestError(ServiceError):
    """The request can run nowhere as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class StaleEpochError(ServiceError):
    """The caller means another process of this worker."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, wanted: int, epoch: int) -> None:
        super().__init__(
            f"epoch {wanted} was asked for, this process is {epoch}",
            remedy="read the worker's epoch from the endpoint map again",
            values={"epoch": epoch},
        )


class ChunkMissingError(ServiceError):
    """The object is not here (any more)."""

    code = grpc.StatusCode.NOT_FOUND


class PeersServedError(ServiceError):
    """As many chunk objects are being sent to peers as may be."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"busy: {detail}", remedy="take another source, or try again shortly", values={}, retry_after_s=0.1
        )


class NotReadyError(ServiceError):
    """The worker is still warming up or registering."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self) -> None:
        super().__init__(
            "the worker is not ready yet", remedy="wait until its health is SERVING", values={}, retry_after_s=1.0
        )
