"""What lies between the S3 client and the network: deadlines that reach the sockets, and errors by their meaning.

The client takes timeouts only when it is built. `DeadlinePool` gives each request what is left of its caller's
deadline (per thread, since a call is made on one thread), and reads never more than `stall_s` of silence. It never
retries: that is the tier's business, which knows the deadline.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import urllib3
from minio.error import InvalidResponseError, S3Error, ServerError
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError, SSLError
from urllib3.exceptions import TimeoutError as HttpTimeoutError

from libs.chunks.errors import (
    AccessRefusedError,
    MissingBucketError,
    MissingObjectError,
    ServerFailedError,
    SlowTierError,
    TierError,
    UnreachableError,
)
from libs.chunks.retry import Deadline

_REFUSED = frozenset(
    {
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "AccountProblem",
        "AuthorizationHeaderMalformed",
        "RequestTimeTooSkewed",
    }
)
_MISSING = frozenset({"NoSuchKey", "NoSuchObject", "ResourceNotFound"})
_CONFLICTS = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_PRECONDITION = "PreconditionFailed"


class DeadlinePool(urllib3.PoolManager):
    """A connection pool whose requests end with their thread's deadline."""

    def __init__(self, connections: int, stall_s: float, ca_file: str | None) -> None:
        extra: dict[str, Any] = {"ca_certs": ca_file} if ca_file else {}
        super().__init__(maxsize=connections, block=False, retries=False, cert_reqs="CERT_REQUIRED", **extra)
        self._stall_s = stall_s
        self._local = threading.local()

    @contextmanager
    def deadline(self, deadline: Deadline) -> Iterator[None]:
        """Requests made by this thread within the block end with `deadline`."""
        self._local.deadline = deadline
        try:
            yield
        finally:
            self._local.deadline = None

    def urlopen(  # type: ignore[override]  # as PoolManager has it, whose signature is not its base's either
        self, method: str, url: str, redirect: bool = True, **kw: Any
    ) -> urllib3.BaseHTTPResponse:
        deadline: Deadline | None = getattr(self._local, "deadline", None)
        left = max(0.001, self._stall_s if deadline is None else deadline.left)
        stall = min(self._stall_s, left)
        # A write is answered when it is durable, which may take long and is no sign of a dead connection.
        kw["timeout"] = urllib3.Timeout(connect=stall, read=left if method == "PUT" else stall)
        return super().urlopen(method, url, redirect, **kw)


def is_precondition_failed(error: Exception) -> bool:
    """If-None-Match: * met an object."""
    return isinstance(error, S3Error) and (error.code == _PRECONDITION or error.response.status == 412)


def is_conflict(error: Exception) -> bool:
    """Two conditional writes met."""
    return isinstance(error, S3Error) and error.code in _CONFLICTS


def translate(error: Exception, what: str, endpoint: str) -> TierError:
    """The typed error for whatever client, pool or socket raised."""
    where = f"{what} on {endpoint}"
    if isinstance(error, NewConnectionError):
        return UnreachableError(f"{where}: connection refused ({_plain(error)})", remedy="check the store's address")
    if isinstance(error, HttpTimeoutError | TimeoutError):
        return SlowTierError(f"{where}: no answer in time", remedy="check the store's load and the network")
    if isinstance(error, SSLError):
        return UnreachableError(f"{where}: TLS failed ({_plain(error)})", remedy="check certificate and CA file")
    if isinstance(error, ProtocolError | HTTPError | http.client.HTTPException | OSError):
        return UnreachableError(f"{where}: connection lost ({_plain(error)})", remedy="check store and network")
    if isinstance(error, S3Error):
        return _translate_s3(error, where)
    if isinstance(error, ServerError | InvalidResponseError):
        return ServerFailedError(f"{where}: {_plain(error)}", remedy="check the store's log")
    return ServerFailedError(f"{where}: {type(error).__name__}: {_plain(error)}", remedy="check the store's log")


def _translate_s3(error: S3Error, where: str) -> TierError:
    if error.code in _MISSING:
        return MissingObjectError(f"{where}: not there", remedy="take another source")
    if error.code == "NoSuchBucket":
        return MissingBucketError(f"{where}: no bucket {error.bucket_name!r}", remedy="create the bucket")
    if error.code in _REFUSED or error.response.status == 403:
        return AccessRefusedError(f"{where}: refused ({error.code})", remedy="check access key, secret key and policy")
    if error.response.status == 404:
        return MissingObjectError(f"{where}: not there", remedy="take another source")
    return ServerFailedError(f"{where}: {error.code}: {error.message}", remedy="check the store's log")


def _plain(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
