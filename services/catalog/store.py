"""The object store as the catalog needs it: is this object there, how big is it, what does its header say; listing and
removal for collection; sealed batches of decisions. Whole chunks never pass through the catalog.

The `minio` client is synchronous, so requests run on a pool of threads, which bounds them; the HTTP pool has as many
connections as there are threads. Every request has connect and read timeouts and no retries: the publisher repeats its
call, and knows better than a hidden loop when it is worth it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar

import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

T = TypeVar("T")

LIST_PAGE = 1_000

# HEAD replies have no body, so the client derives these codes from the status.
_ABSENT = frozenset({"NoSuchKey", "NoSuchObject", "ResourceNotFound"})
_DENIED = frozenset(
    {
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "AllAccessDisabled",
        "AccountProblem",
        "RequestTimeTooSkewed",
    }
)


class StoreError(RuntimeError):
    """Base of this module's errors."""


class StoreUnavailableError(StoreError):
    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(f"object store at {endpoint} is unavailable ({reason}): check that it runs and can be reached")


class StoreDeniedError(StoreError):
    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(
            f"object store at {endpoint} denies access ({reason}): check access key, secret key and policy"
        )


class BucketMissingError(StoreError):
    def __init__(self, endpoint: str, bucket: str) -> None:
        super().__init__(
            f"object store at {endpoint} has no bucket {bucket!r}: create it, or allow it with s3_create_bucket"
        )


@dataclass(frozen=True)
class StoreTarget:
    """Where the objects are. endpoint: host:port; secure: HTTPS."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str = field(repr=False)
    secure: bool = False
    region: str = "us-east-1"
    threads: int = 16
    timeout_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Stat:
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing. modified_ms: unix milliseconds, by the store's clock."""

    key: str
    size: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload neither completed nor given up. begun_ms: unix milliseconds, by the store's clock; 0 = not
    said."""

    key: str
    upload_id: str
    begun_ms: int


class Observer(Protocol):
    """Told about every request: (operation, seconds, whether the store answered)."""

    def __call__(self, operation: str, seconds: float, answered: bool) -> None: ...


class ObjectStore:
    """One bucket. Close with `close()`."""

    def __init__(self, target: StoreTarget, observe: Observer | None = None) -> None:
        self.target = target
        self._observe: Observer = observe or (lambda operation, seconds, answered: None)
        self._threads = ThreadPoolExecutor(target.threads, thread_name_prefix="object-store")
        self._http = urllib3.PoolManager(
            maxsize=target.threads, timeout=urllib3.Timeout(target.timeout_s), retries=False, cert_reqs="CERT_REQUIRED"
        )
        self._client = Minio(
            target.endpoint,
            access_key=target.access_key,
            secret_key=target.secret_key,
            secure=target.secure,
            region=target.region,
            http_client=self._http,
        )

    async def close(self) -> None:
        """Requests that run end within their timeouts; nobody waits for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.clear()

    async def stat(self, key: str) -> Stat | None:
        """None: there is no such object. Raises StoreError."""

        def head() -> Stat | None:
            try:
                found = self._client.stat_object(self.target.bucket, key)
            except S3Error as error:
                if error.code in _ABSENT:
                    return None
                raise
            return Stat(int(found.size or 0), str(found.etag or "").strip('"'))

        return await self._run("stat", head)

    async def read(self, key: str, offset: int = 0, length: int = 0) -> bytes | None:
        """At most `length` bytes from `offset` on; length 0 = to the end. None: no such object. Raises StoreError."""

        def get() -> bytes | None:
            try:
                response = self._client.get_object(self.target.bucket, key, offset=offset, length=length)
            except S3Error as error:
                if error.code in _ABSENT:
                    return None
                raise
            try:
                return bytes(response.read())
            finally:
                response.close()
                response.release_conn()

        return await self._run("read", get)

    async def list(self, prefix: str) -> AsyncGenerator[tuple[Listed, ...]]:
        """Every object under `prefix` by key, in pages of at most LIST_PAGE, none of them empty. Raises StoreError."""
        after: str | None = None

        def page() -> tuple[Listed, ...]:
            # One page is one request: the client asks for as many as are taken here.
            found = self._client.list_objects(self.target.bucket, prefix, recursive=True, start_after=after)
            return tuple(_listed(item) for item in islice(found, LIST_PAGE))

        while True:
            objects = await self._run("list", page)
            if objects:
                yield objects
            if len(objects) < LIST_PAGE:
                return
            after = objects[-1].key

    async def uploads(self, prefix: str) -> AsyncGenerator[tuple[Upload, ...]]:
        """Every unfinished multipart upload under `prefix` by key, in pages, none of them empty. Raises StoreError."""
        last: Upload | None = None

        def page() -> tuple[tuple[Upload, ...], bool]:
            # The client lists them only by a private call, and loses the marker of the next page: the last one's names.
            found = self._client._list_multipart_uploads(
                self.target.bucket,
                prefix=prefix,
                key_marker=last.key if last else None,
                upload_id_marker=last.upload_id if last else None,
                max_uploads=LIST_PAGE,
            )
            return tuple(_upload(item) for item in found.uploads), bool(found.is_truncated)

        while True:
            uploads, more = await self._run("uploads", page)
            if uploads:
                yield uploads
            if not more or not uploads or uploads[-1] == last:
                return
            last = uploads[-1]

    async def abort(self, upload: Upload) -> None:
        """Whether it was still there or not. Raises StoreError."""

        def give_up() -> None:
            try:
                self._client._abort_multipart_upload(self.target.bucket, upload.key, upload.upload_id)
            except S3Error as error:
                if error.code != "NoSuchUpload":
                    raise

        await self._run("abort", give_up)

    async def remove(self, key: str) -> None:
        """Whether it was there or not. Raises StoreError."""
        await self._run("remove", lambda: self._client.remove_object(self.target.bucket, key))

    async def put(self, key: str, body: bytes) -> None:
        """For keys that name their content: anything else there was left by a writer that died. Raises StoreError."""
        await self._run("put", lambda: self._client._put_object(self.target.bucket, key, body, {}))

    async def put_if_absent(self, key: str, body: bytes) -> None:
        """Leaves what is there alone. Raises StoreError."""
        await self._run("put", lambda: self._put_if_absent(key, body))

    def _put_if_absent(self, key: str, body: bytes) -> None:
        # The client has no public conditional write.
        try:
            self._client._put_object(self.target.bucket, key, body, {"If-None-Match": "*"})
        except S3Error as error:
            if error.code != "PreconditionFailed" and error.response.status != 412:
                raise

    async def ensure_bucket(self, create: bool) -> None:
        """Returns when the bucket is there. Raises BucketMissingError if it is not and may not be created."""
        bucket = self.target.bucket
        if await self._run("bucket", lambda: self._client.bucket_exists(bucket)):
            return
        if not create:
            raise BucketMissingError(self.target.endpoint, bucket)

        def make() -> None:
            try:
                self._client.make_bucket(bucket)
            except S3Error as error:  # another replica was faster
                if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise

        await self._run("bucket", make)

    async def _run(self, operation: str, work: Callable[[], T]) -> T:
        target, began, answered = self.target, time.monotonic(), False
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            answered = True
            return result
        except S3Error as error:
            answered = True
            if error.code in _DENIED:
                raise StoreDeniedError(target.endpoint, str(error.code)) from None
            raise StoreUnavailableError(target.endpoint, f"{error.code}: {error.message}") from None
        except (urllib3.exceptions.HTTPError, OSError, ServerError, InvalidResponseError, MinioException) as error:
            raise StoreUnavailableError(target.endpoint, f"{type(error).__name__}: {error}"[:300]) from None
        finally:
            self._observe(operation, time.monotonic() - began, answered)


def _listed(item: Any) -> Listed:
    modified = int(item.last_modified.timestamp() * 1_000) if item.last_modified is not None else 0
    return Listed(str(item.object_name), int(item.size or 0), modified)


def _upload(item: Any) -> Upload:
    begun = int(item.initiated_time.timestamp() * 1_000) if item.initiated_time is not None else 0
    return Upload(str(item.object_name), str(item.upload_id), begun)
