"""The worker's place in the endpoint map: an epoch for its life, and a lease that is kept alive.

The epoch is given once, when the process starts, and lives as long as it does. A lost lease removes discovery only: the
worker re-attaches its endpoint under the same epoch. If the catalog knows a larger one, another process has this
worker's name and this one is the duplicate: it stops admitting, is fenced and exits.

The lease's deadline is kept locally, from the moment a request was *sent*: etcd re-extends leases when it restarts, and
an answer may be old. Past it the worker counts itself as unlisted and re-attaches. No catalog, no fence: while it is
away serving goes on and the worker tries again with jitter, for ever. Only at the first start there must be an answer
within a bounded wait.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from libs.contracts.segue.v1 import catalog_pb2, catalog_pb2_grpc
from libs.controller.catalog_facts import Endpoint, Model
from libs.controller.wire_fields import to_proto
from libs.service.errors import StartError
from libs.service.logs import get_logger

log = get_logger(__name__)

_CALL_S = 3.0
_RETRY_S = 0.5
_RETRY_LIMIT_S = 10.0
_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)


class CatalogAbsentError(StartError):
    """The catalog did not answer at the first start."""


class RegistrationRefusedError(StartError):
    """The catalog answered that it will not have this worker."""


class DuplicateWorkerError(RuntimeError):
    """Another process has registered this worker's name since: this one must not serve on."""

    def __init__(self, worker: str, epoch: int, latest: int) -> None:
        super().__init__(
            f"worker {worker!r} epoch {epoch} is a duplicate: epoch {latest or 'larger'} has registered since; "
            "give each worker its own worker_id, or stop the other process"
        )
        self.worker, self.epoch, self.latest = worker, epoch, latest


@dataclass(frozen=True, slots=True)
class Lease:
    """Where the registration stands. `deadline`: of the local clock, from the time of sending."""

    epoch: int
    lease_id: int
    ttl_s: float
    deadline: float


class Registration:
    """One worker process's dealings with the catalog. `clock`: monotonic seconds."""

    def __init__(
        self, channel: grpc.aio.Channel, target: str, worker: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stub = catalog_pb2_grpc.CatalogStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._target, self._worker, self._clock = target, worker, clock
        self._request: catalog_pb2.RegisterRequest | None = None
        self._lease: Lease | None = None
        self._left = False
        self.reattached = 0
        self.failures = 0

    @property
    def listed(self) -> bool:
        """Whether, as far as this process can know, its endpoint is in the map."""
        return self._lease is not None and self._clock() < self._lease.deadline and not self._left

    async def register(self, endpoint: Endpoint, models: Sequence[Model], names: Sequence[str], within_s: float) -> int:
        """The first registration; returns the epoch.

        Raises:
            CatalogAbsentError: no answer within the time.
            RegistrationRefusedError: an answer that waiting cannot mend.
        """
        self._request = catalog_pb2.RegisterRequest(
            endpoint=_endpoint(endpoint), models=[_model(model) for model in models], names=names
        )
        give_up_at, pause, announced = self._clock() + within_s, _RETRY_S, False
        while True:
            try:
                self._lease = await self._register(0)
                return self._lease.epoch
            except grpc.aio.AioRpcError as error:
                if error.code() not in _TRANSIENT:
                    raise RegistrationRefusedError(
                        f"the catalog at {self._target} refuses worker {self._worker!r} ({_said(error)})",
                        remedy="correct the setting the message names",
                    ) from error
                if self._clock() >= give_up_at:
                    raise CatalogAbsentError(
                        f"the catalog at {self._target} does not answer ({_said(error)}), waited {within_s:g} s",
                        remedy="start it, or correct the setting `catalog`",
                    ) from error
                if not announced:
                    log.warning("waiting for the catalog", target=self._target, error=_said(error))
                    announced = True
            await asyncio.sleep(min(_jittered(pause), max(0.0, give_up_at - self._clock())))
            pause = min(2 * pause, _RETRY_LIMIT_S)

    async def run(self) -> None:
        """Keeps the lease. Raises DuplicateWorkerError; nothing else ends it but a deregistration."""
        pause = _RETRY_S
        while not self._left:
            lease = self._lease
            assert lease is not None, "register first"
            try:
                if self._clock() >= lease.deadline:
                    await self._reattach(lease)
                else:
                    await self._keep_alive(lease)
                pause, wait = _RETRY_S, lease.ttl_s / 3 * random.uniform(0.8, 1.0)  # noqa: S311 - spread
            except grpc.aio.AioRpcError as error:
                self.failures += 1
                log.warning("the catalog is away", target=self._target, error=_said(error), listed=self.listed)
                wait, pause = _jittered(pause), min(2 * pause, _RETRY_LIMIT_S, lease.ttl_s / 2)
            await asyncio.sleep(wait)

    async def deregister(self) -> None:
        """Removes the endpoint now instead of when the lease lapses. Never raises; idempotent."""
        if self._left or self._lease is None:
            return
        self._left = True
        try:
            await self._stub.Deregister(
                catalog_pb2.DeregisterRequest(worker=self._worker, epoch=self._lease.epoch), timeout=_CALL_S
            )
        except grpc.aio.AioRpcError as error:
            log.warning("not deregistered: the lease will lapse", error=_said(error))

    async def _keep_alive(self, lease: Lease) -> None:
        sent = self._clock()
        try:
            answer = await self._stub.KeepAlive(
                catalog_pb2.KeepAliveRequest(worker=self._worker, epoch=lease.epoch, lease_id=lease.lease_id),
                timeout=_CALL_S,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                await self._reattach(lease)
                return
            raise
        if answer.latest_epoch > lease.epoch:
            raise DuplicateWorkerError(self._worker, lease.epoch, answer.latest_epoch)
        ttl_s = answer.ttl_ms / 1e3
        self._lease = Lease(lease.epoch, lease.lease_id, ttl_s, sent + ttl_s)

    async def _reattach(self, lease: Lease) -> None:
        """The endpoint again, under the same epoch. A drain that has begun meanwhile wins."""
        if self._left:
            return
        try:
            self._lease = await self._register(lease.epoch)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise DuplicateWorkerError(self._worker, lease.epoch, 0) from error
            raise
        self.reattached += 1
        log.info("registered again", epoch=lease.epoch)

    async def _register(self, epoch: int) -> Lease:
        assert self._request is not None
        request = catalog_pb2.RegisterRequest()
        request.CopyFrom(self._request)
        request.epoch = epoch
        sent = self._clock()
        answer = await self._stub.Register(request, timeout=_CALL_S)
        ttl_s = answer.ttl_ms / 1e3
        return Lease(answer.epoch, answer.lease_id, ttl_s, sent + ttl_s)


def _jittered(pause: float) -> float:
    return random.uniform(0.0, pause)  # noqa: S311 - spread, so that workers do not come back in step


def _said(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"


def _endpoint(endpoint: Endpoint) -> catalog_pb2.Endpoint:
    message = to_proto(endpoint)
    assert isinstance(message, catalog_pb2.Endpoint)
    return message


def _model(model: Model) -> catalog_pb2.Model:
    message = to_proto(model)
    assert isinstance(message, catalog_pb2.Model)
    return message
