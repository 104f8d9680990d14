"""The bucket, through the `minio` client, which is synchronous: call it from worker threads.

Large objects are read in ranges and written in parts, in parallel, from and to one buffer; reads and writes have
threads of their own. Every call has a deadline, which reaches down to the sockets (`DeadlinePool`); retries have jitter
and never outlive it. Errors are typed by what one can do about them. Nothing is trusted: an object of another size is
refused here, any other difference by its content id.

`put` is put-if-absent (If-None-Match: *). The client has no public call for it, so exactly one function uses its
private `_put_object`: ours of that name; and `multipart` its calls for parts. A key names its content, so what lies
under it with another size is no one's: some stores keep an empty object of a writer that died in the middle. It is
written over, never removed first: whoever else does the same writes the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
from minio import Minio

from libs.chunks.cost import CostMeter, Price
from libs.chunks.errors import (
    MissingBucketError,
    MissingObjectError,
    OtherObjectError,
    ServerFailedError,
    SlowTierError,
    TierClosedError,
    TierError,
    UnreachableError,
)
from libs.chunks.multipart import MultipartUpload, Part
from libs.chunks.retry import Deadline, pause_before, with_retries
from libs.chunks.s3_http import DeadlinePool, is_conflict, is_precondition_failed, translate
from libs.chunks.tier import Held, MemoryHeld, Parts, Stored, TierKind, Transfer, size_of
from libs.continuation.errors import ObjectError
from libs.continuation.keys import ObjectKey

T = TypeVar("T")

_GUESS = Price(latency_ms=10.0, bytes_per_ms=100_000)
_PIECE = 1 << 20
_GIVE_UP_S = 2.0
_PROBE_KEY = "probe/{size}"
_PROBE_SIZES = (1, 4 << 20)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the bucket is and who we are there. `endpoint` is HOST:PORT; `secure`: HTTPS."""

    endpoint: str
    bucket: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    secure: bool = False
    region: str = "us-east-1"
    ca_file: str | None = None


def _counter(about: str) -> int:
    found: int = field(default=0, metadata={"help": about})
    return found


@dataclass
class ObjectStoreCounts:
    """Counters of one object store client."""

    gets: int = _counter("Objects read")
    puts: int = _counter("Objects written by this process")
    existed: int = _counter("Objects that were there already when they were to be written")
    replaced: int = _counter("Objects of another size under a key, written over")
    read_bytes: int = _counter("Bytes read")
    written_bytes: int = _counter("Bytes written")
    failed: int = _counter("Calls that failed, retries used up")
    retried: int = _counter("Attempts that failed")
    slow: int = _counter("Calls that ran out of time")
    rejected: int = _counter("Objects whose bytes were damaged")


class ObjectStore:
    """The object-store tier.

    Args:
        connections: most requests at a time.
        range_bytes: objects above this are read in ranges of about this size, in parallel.
        part_bytes: objects above this are written in parts of this size (S3 asks for 5 MiB at least).
        attempts: tries per request, within its deadline.
        stall_s: longest silence on a connection that is read from.
    """

    kind = TierKind.OBJECT

    def __init__(
        self,
        bucket: Bucket,
        *,
        connections: int = 8,
        range_bytes: int = 4 << 20,
        part_bytes: int = 16 << 20,
        attempts: int = 3,
        stall_s: float = 2.0,
    ) -> None:
        self.bucket = bucket.bucket
        self.meter = CostMeter(_GUESS)
        self.counts = ObjectStoreCounts()
        self._endpoint = bucket.endpoint
        self._range_bytes, self._part_bytes, self._attempts = range_bytes, part_bytes, attempts
        self._http = DeadlinePool(connections, stall_s, bucket.ca_file)
        self._client = Minio(
            bucket.endpoint,
            access_key=bucket.access_key,
            secret_key=bucket.secret_key,
            secure=bucket.secure,
            region=bucket.region,
            http_client=self._http,
        )
        self._ranges = ThreadPoolExecutor(connections, thread_name_prefix="s3-range")
        self._parts = ThreadPoolExecutor(max(2, connections // 2), thread_name_prefix="s3-part")
        self._closed = False

    def check(self, within: float = 10.0) -> None:
        """Whether the bucket can be used at all. Raises UnreachableError, AccessRefusedError, MissingBucketError, …"""
        if not self._call("bucket check", within, None, lambda: self._client.bucket_exists(self.bucket)):
            raise MissingBucketError(f"bucket {self.bucket!r} does not exist on {self._endpoint}", remedy="create it")

    def check_until(self, within: float) -> None:
        """`check`, tried again for `within` seconds while the store cannot be reached. Raises as it does."""
        deadline = Deadline(within)
        attempt = 0
        while True:
            try:
                return self.check()
            except (UnreachableError, SlowTierError, ServerFailedError):
                attempt += 1
                pause = pause_before(min(attempt, 6))
                if pause >= deadline.left:
                    raise
                deadline.pause(pause)

    def probe(self, within: float = 5.0) -> None:
        """Measures latency and bandwidth on two small objects of ours, written once per bucket."""
        for size in _PROBE_SIZES:
            key = _PROBE_KEY.format(size=size)
            self._put(key, bytes(size), within)
            deadline = Deadline(within)
            for _ in range(2):
                with self.meter.reading() as read:
                    self._read_all(key, size, deadline, None)
                    read.bytes = size

    # ---------------------------------------------------------------------------------------------------------- reading

    def get(self, key: ObjectKey, size: int, *, within: float, abort: Transfer | None = None) -> Held:
        """See `Tier.get`. Raises OtherObjectError for an object that is not `size` bytes long."""
        data = self._read_all(key.text, size, Deadline(within, abort), abort)
        self.counts.gets += 1
        self.counts.read_bytes += size
        return MemoryHeld(data)

    def _read_all(self, key: str, size: int, deadline: Deadline, abort: Transfer | None) -> memoryview:
        self._check_open()
        target = np.empty(size, np.uint8).data
        # One range more than full ranges would need costs a request and saves nothing: round to even shares.
        shares = max(1, round(size / self._range_bytes))
        bounds = [size * share // shares for share in range(shares + 1)]
        failed = threading.Event()

        def read(low: int, high: int) -> None:
            def once() -> None:
                self._read_range(key, size, low, target[low:high], deadline, failed, abort)

            try:
                self._attempt(f"get of {key}", deadline, once)
            except BaseException:
                failed.set()
                raise

        others = [self._ranges.submit(read, low, high) for low, high in pairwise(bounds[1:])]
        first: BaseException | None = None
        try:
            read(bounds[0], bounds[1])
        except BaseException as error:
            first = error
        _settle(others, first)
        return target

    def _read_range(
        self,
        key: str,
        size: int,
        low: int,
        target: memoryview,
        deadline: Deadline,
        failed: threading.Event,
        abort: Transfer | None,
    ) -> None:
        whole = target.nbytes == size
        response = self._client.get_object(
            self.bucket, key, offset=0 if whole else low, length=0 if whole else target.nbytes
        )
        try:
            total = _total(response.headers, whole)
            if total != size:
                raise OtherObjectError(
                    f"{key} has {total} bytes where {size} were expected", remedy="recompute; `segue cache verify`"
                )
            at = 0
            while at < target.nbytes:
                deadline.check(f"get of {key}")
                if failed.is_set():
                    raise SlowTierError(f"get of {key} ended: another range failed", remedy="see that range's error")
                piece = response.read(min(_PIECE, target.nbytes - at), decode_content=False)
                if not piece:
                    raise UnreachableError(f"{key} was cut off after {low + at} of {size} bytes", remedy="fetch again")
                target[at : at + len(piece)] = piece
                at += len(piece)
                if abort is not None:
                    abort.came(len(piece))
        except BaseException:
            response.close()
            raise
        finally:
            response.release_conn()

    def stat(self, key: ObjectKey, *, within: float) -> Stored | None:
        """See `Tier.stat`."""
        return self._stat(key.text, within)

    def _stat(self, key: str, within: float) -> Stored | None:
        try:
            found = self._call(f"stat of {key}", within, None, lambda: self._client.stat_object(self.bucket, key))
        except MissingObjectError:
            return None
        return Stored(found.size if found.size is not None else -1, str(found.etag))

    # ---------------------------------------------------------------------------------------------------------- writing

    def put(self, key: ObjectKey, parts: Parts, *, within: float) -> Stored:
        """See `Tier.put`. Raises OtherObjectError where something of another size lies under the key and stays."""
        body = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        stored = self._put(key.text, body, within)
        if stored.created:
            self.counts.puts += 1
            self.counts.written_bytes += size_of(parts)
        else:
            self.counts.existed += 1
        return stored

    def _put(self, key: str, body: bytes | memoryview, within: float) -> Stored:
        deadline = Deadline(within)
        etag = self._write(key, body, deadline, over=False)
        if etag is not None:
            return Stored(len(body), etag, created=True)
        found = self._stat(key, max(1.0, deadline.left))
        if found is not None and found.size != len(body):
            self._write(key, body, deadline, over=True)
            self.counts.replaced += 1
            found = self._stat(key, max(1.0, deadline.left))
        if found is None or found.size != len(body):
            raise OtherObjectError(
                f"{key} exists with {found and found.size} bytes where {len(body)} were written",
                remedy="see whether the bucket lets objects be replaced; `segue cache verify` finds such",
            )
        return found

    def _write(self, key: str, body: bytes | memoryview, deadline: Deadline, *, over: bool) -> str | None:
        """The ETag, or None if the key exists and is not to be written `over`."""
        if len(body) > self._part_bytes:
            return self._put_parts(key, memoryview(body), deadline, over=over)
        put = self._put_object if over else self._put_if_absent
        return self._call(f"put of {key}", deadline.left, None, lambda: put(key, body))

    def _put_parts(self, key: str, body: memoryview, deadline: Deadline, *, over: bool) -> str | None:
        """As `_put_if_absent`, in parts. Asks first: the parts of what is there already need not travel."""
        what = f"put of {key}"
        if not over and self._stat(key, deadline.left) is not None:
            return None
        upload = self._call(what, deadline.left, None, lambda: MultipartUpload(self._client, self.bucket, key))
        failed = threading.Event()

        def send(number: int, low: int) -> Part:
            if failed.is_set():
                raise SlowTierError(f"{what} ended: another part failed", remedy="see that part's error")
            try:
                part = body[low : low + self._part_bytes]
                return self._attempt(what, deadline, lambda: upload.part(number, part))
            except BaseException:
                failed.set()
                raise

        def complete(parts: list[Part]) -> str | None:
            try:
                return upload.complete(parts, over=over)
            except Exception as error:
                if is_precondition_failed(error):
                    return None
                if is_conflict(error):
                    raise UnreachableError(f"{key} is being written by another", remedy="try again") from error
                raise

        done = False
        try:
            lows = range(0, len(body), self._part_bytes)
            sent = [self._parts.submit(send, number, low) for number, low in enumerate(lows, start=1)]
            _settle(sent, None)
            parts = [future.result() for future in sent]
            etag = self._attempt(what, deadline, lambda: complete(parts))
            done = etag is not None
            return etag
        finally:
            if not done:
                with suppress(TierError):
                    self._call(what, _GIVE_UP_S, None, upload.give_up)

    def _put_if_absent(self, key: str, body: bytes | memoryview) -> str | None:
        """The ETag, or None if the key exists. A conflict with a write under way is a retryable failure."""
        try:
            return self._put_object(key, body, {"If-None-Match": "*"})
        except Exception as error:
            if is_precondition_failed(error):
                return None
            if is_conflict(error):
                raise UnreachableError(f"{key} is being written by another", remedy="try again") from error
            raise

    def _put_object(
        self, key: str, body: bytes | memoryview, condition: dict[str, str | list[str] | tuple[str]] | None = None
    ) -> str:
        # Typed as bytes; any buffer does.
        return str(self._client._put_object(self.bucket, key, cast("bytes", body), condition or {}).etag)

    def remove(self, key: ObjectKey, *, within: float) -> None:
        """See `Tier.remove`."""
        self._call(f"remove of {key.text}", within, None, lambda: self._client.remove_object(self.bucket, key.text))

    def reject(self, key: ObjectKey, error: ObjectError) -> None:
        """Counted only: durable bytes are removed by the catalog's collection, never by a reader."""
        self.counts.rejected += 1

    # ---------------------------------------------------------------------------------------------------------- calling

    def _call(self, what: str, within: float, abort: Transfer | None, work: Callable[[], T]) -> T:
        self._check_open()
        return self._attempt(what, Deadline(within, abort), work)

    def _attempt(self, what: str, deadline: Deadline, work: Callable[[], T]) -> T:
        def once() -> T:
            with self._http.deadline(deadline):
                try:
                    return work()
                except TierError:
                    self.counts.retried += 1
                    raise
                except Exception as error:
                    self.counts.retried += 1
                    raise translate(error, what, self._endpoint) from error

        try:
            return with_retries(once, deadline, what, self._attempts)
        except TierError as error:
            if isinstance(error, SlowTierError):
                self.counts.slow += 1
            elif not error.absent:
                self.counts.failed += 1
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"object store {self._endpoint} is closed", remedy="open it again")

    def close(self) -> None:
        """Idempotent. Waits for what is under way, which ends at its deadline."""
        self._closed = True
        self._ranges.shutdown(wait=True, cancel_futures=True)
        self._parts.shutdown(wait=True, cancel_futures=True)
        self._http.clear()


def _settle(others: Sequence[Future[Any]], first: BaseException | None) -> None:
    """Waits for every range or part (they use one buffer), then raises the error that caused the others."""
    errors = [] if first is None else [first]
    errors += [error for future in others if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, SlowTierError)]
    if errors:
        raise (causes or errors)[0]


def _total(headers: Any, whole: bool) -> int:
    """Size of the object a response is about; -1 where it does not say."""
    text = headers.get("content-length") if whole else str(headers.get("content-range", "")).rpartition("/")[2]
    return int(text) if text and str(text).isdigit() else -1
