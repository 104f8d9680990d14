"""What can go wrong between the catalog and etcd, by what a caller can do about it."""

from __future__ import annotations

import grpc
import grpc.aio


class EtcdError(RuntimeError):
    """etcd refused or failed a request in a way that waiting will not mend."""


class EtcdUnavailableError(EtcdError):
    """etcd did not answer in time, or has no leader. Whether a write was committed is unknown: re-read."""

    def __init__(self, endpoint: str, reason: str) -> None:
        self.endpoint, self.reason = endpoint, reason
        super().__init__(f"etcd at {endpoint} is unavailable ({reason}): check that it runs and can be reached")


class EtcdDeniedError(EtcdError):
    """User, password, role or certificate are not accepted."""

    def __init__(self, endpoint: str, reason: str) -> None:
        self.endpoint, self.reason = endpoint, reason
        super().__init__(f"etcd at {endpoint} denies access ({reason}): check the etcd user, password and role")


class EtcdFullError(EtcdError):
    """etcd's space quota is used up; it takes no writes."""

    def __init__(self, endpoint: str, reason: str) -> None:
        self.endpoint, self.reason = endpoint, reason
        super().__init__(
            f"etcd at {endpoint} is full ({reason}): compact, defragment, disarm the alarm or raise its quota"
        )


class EtcdLeaseError(EtcdError):
    """The lease does not exist (any more)."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"lease expired or revoked ({reason}): register again with the epoch")


class EtcdCompactedError(EtcdError):
    """The revision asked for is no longer kept."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"etcd no longer keeps the revision that was being read ({reason}): read the newest")


# etcd answers these texts under INVALID_ARGUMENT (api/v3rpc/rpctypes/error.go of etcd 3.4 and 3.5).
_DENIED_TEXTS = ("user name is empty", "invalid user ID or password", "authentication is not enabled")
# The token, not the user, is at fault: authenticating again helps, and the request was not executed.
_STALE_TOKEN_TEXTS = ("invalid auth token", "revision of auth store is old")


def token_is_stale(error: grpc.aio.AioRpcError) -> bool:
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or any(text in details for text in _STALE_TOKEN_TEXTS)


def typed(error: grpc.aio.AioRpcError, endpoint: str) -> EtcdError:
    """The error of this module that says what `error` means."""
    code, details = error.code(), error.details() or ""
    reason = f"{code.name}: {details}"
    if "space exceeded" in details:
        return EtcdFullError(endpoint, reason)
    if "lease not found" in details:
        return EtcdLeaseError(reason)
    if "has been compacted" in details:
        return EtcdCompactedError(reason)
    denied = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    if code in denied or any(text in details for text in _DENIED_TEXTS):
        return EtcdDeniedError(endpoint, reason)
    # INTERNAL is how HTTP/2 resets of a dying server surface; RESOURCE_EXHAUSTED is `too many requests`.
    passing = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    if code in passing:
        return EtcdUnavailableError(endpoint, reason)
    return EtcdError(f"etcd at {endpoint} failed: {reason}")
