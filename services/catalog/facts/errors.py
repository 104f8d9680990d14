"""What the catalog refuses, with the status code each means."""

from __future__ import annotations

from typing import ClassVar

import grpc

from libs.service.errors import ServiceError


class InvalidRequestError(ServiceError):
    """A field that can never be right, whatever is stored."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, expected: str) -> None:
        shown = f"{value!r}" if len(repr(value)) <= 120 else f"{repr(value)[:117]}..."
        super().__init__(f"{field} is {shown}", remedy=expected, values={"field": field})


class UnknownNameError(ServiceError):
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.NOT_FOUND

    def __init__(self, name: str) -> None:
        super().__init__(f"no model is served as {name!r}", remedy="see ListModels for the names there are")


class UnknownModelError(ServiceError):
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, fingerprints: list[str]) -> None:
        shown = ", ".join(fingerprints)
        super().__init__(f"unknown model {shown}", remedy="a worker that serves it must register first")


class ModelMismatchError(ServiceError):
    """One fingerprint, two descriptions: one of the two computed it wrongly."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, fingerprint: str, field: str) -> None:
        super().__init__(
            f"model {fingerprint} is already registered with another {field}",
            remedy="run one release of the worker per fingerprint, or give the changed recipe another variant",
            values={"field": field},
        )


class DuplicateWorkerError(ServiceError):
    """A newer process has taken this worker id."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, worker: str, epoch: int, latest: int) -> None:
        super().__init__(
            f"worker {worker} epoch {epoch} was succeeded by epoch {latest}",
            remedy="stop admitting, fence and exit: another process runs under this worker id",
            values={"worker": worker, "epoch": epoch, "latest_epoch": latest},
        )


class NotListedError(ServiceError):
    """The lease has expired, or the endpoint under it is gone."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.NOT_FOUND

    def __init__(self, worker: str, epoch: int, why: str) -> None:
        super().__init__(
            f"worker {worker} epoch {epoch} is not listed: {why}",
            remedy="call Register with this epoch to attach again",
        )


class NotDurableError(ServiceError):
    """A chunk was published whose bytes are not in the object store."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, chunk: str, group: str, key: str, why: str) -> None:
        super().__init__(
            f"chunk {chunk} group {group} is not durable: object {key} {why}",
            remedy="upload the object, wait for its receipt, then publish",
            values={"hash": chunk, "group": group},
        )


class BeingCollectedError(ServiceError):
    """The bytes were unnamed for longer than the grace period, and their deletion has begun."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, chunk: str, key: str) -> None:
        super().__init__(
            f"object {key} of chunk {chunk} is being deleted as garbage",
            remedy="upload it again in a while, then publish",
            values={"hash": chunk},
        )


class MissingGroupError(ServiceError):
    """A chunk without its full-attention group can never be restored."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, chunk: str, groups: list[str]) -> None:
        super().__init__(
            f"chunk {chunk} lacks full-attention group {', '.join(groups)}",
            remedy="publish it with that group first; windowed groups may follow",
            values={"hash": chunk},
        )


class MissingParentError(ServiceError):
    """Chains are prefix-closed: a chunk is recorded only after its parent."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, chunk: str, parent: str, start: int) -> None:
        super().__init__(
            f"chunk {chunk} starts at {start} but no chunk {parent} that ends there is known",
            remedy="publish the parent before it, or in the same call ahead of it",
            values={"hash": chunk, "parent": parent},
        )


class ChunkConflictError(ServiceError):
    """Other tokens, or another place in the chain, under a known hash. Something is badly wrong."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, chunk: str, field: str, stands: object, given: object) -> None:
        super().__init__(
            f"chunk {chunk} is known with {field} {stands}, not {given}",
            remedy="do not use this state: its hash or its tokens are wrong at the publisher or in the catalog",
            values={"hash": chunk, "field": field},
        )


class ContendedError(ServiceError):
    """Others kept writing the same keys; nothing was written."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.ABORTED

    def __init__(self, what: str, attempts: int) -> None:
        super().__init__(
            f"{what} lost {attempts} races for the same keys", remedy="send the call again", retry_after_s=0.2
        )


class CatalogUnavailableError(ServiceError):
    """etcd or the object store is away. A write in this call may or may not have been committed: send it again."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNAVAILABLE

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, remedy="retry later; all calls may be repeated", retry_after_s=retry_after_s)


class CatalogFullError(ServiceError):
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, reason: str) -> None:
        super().__init__(reason, remedy="an operator must make room in etcd; reads still work", retry_after_s=30.0)


class CatalogBrokenError(ServiceError):
    """A dependency refuses the catalog for a reason that waiting will not mend."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, reason: str) -> None:
        super().__init__(reason, remedy="see the catalog's log and configuration")


class CollectionRunningError(ServiceError):
    """One collection at a time in the cluster."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.ABORTED

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"{holder} is collecting", remedy="wait for its end, or for its lease's if it died", retry_after_s=15.0
        )


class CollectionLostError(ServiceError):
    """The lock's lease expired: another may be collecting now."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.ABORTED

    def __init__(self, why: str) -> None:
        super().__init__(
            f"collection stopped: {why}", remedy="run it again; it goes on where this one ended", retry_after_s=15.0
        )


class BucketNotProvenError(ServiceError):
    """What is missing from a wrong or empty bucket proves nothing."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, bucket: str) -> None:
        super().__init__(
            f"bucket {bucket!r} does not bear this etcd's mark",
            remedy="check s3_endpoint and s3_bucket; if they are right, let `segue cache rebuild` adopt the bucket",
        )


class UnknownDecisionError(ServiceError):
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.NOT_FOUND

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"no decision of request {request_id!r} is recorded",
            remedy="check the id; decisions arrive with a delay and are kept for a limited time",
        )
