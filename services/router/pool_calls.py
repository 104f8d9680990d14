"""What an operator asks of the tunnel pool: to see it, to take a worker out of use, to make all tunnels anew, to change
its policy.
"""

from __future__ import annotations

import grpc

from libs.contracts.segue.v1 import router_pb2
from libs.service.errors import ServiceError
from libs.service.logs import get_logger
from services.router.observatory import Observatory
from services.router.pool_knobs import KnobError, changed, spelled
from services.router.pool_views import shown
from services.router.uncovered import Uncovered
from services.router.worker_pool import WorkerPool

log = get_logger(__name__)


class UnknownEndpointError(ServiceError):
    """A worker or an address that the pool has not."""

    code = grpc.StatusCode.NOT_FOUND


class NoMapError(ServiceError):
    """There is nothing that could be swapped."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class InvalidPolicyError(ServiceError):
    """A knob that does not exist, or a value that it cannot have."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class PoolCalls:
    """See the module."""

    def __init__(self, workers: WorkerPool, observatory: Observatory, uncovered: Uncovered) -> None:
        self._pool = workers.pool
        self._observatory = observatory
        self._uncovered = uncovered

    def get(self) -> router_pb2.GetPoolResponse:
        """See Router.GetPool."""
        return router_pb2.GetPoolResponse(pool=shown(self._pool.status(), self._pool.policy))

    def drain(self, request: router_pb2.DrainEndpointRequest) -> router_pb2.DrainEndpointResponse:
        """See Router.DrainEndpoint. Raises UnknownEndpointError."""
        worker, address = request.worker, request.address
        keys = {
            one.key
            for one in self._pool.status().pool.endpoints
            if one.key.worker == worker and address in ("", one.key.address)
        }
        if not keys:
            raise UnknownEndpointError(
                f"worker {worker!r} is not in effect here" + (f" at {address}" if address else ""),
                remedy="GetPool shows the endpoints in effect",
                values={"worker": worker, "address": address},
            )
        log.info("an operator changes an endpoint's use", worker=worker, address=address, drained=not request.resume)
        self._pool.drain(worker, address, drained=not request.resume)
        self._observatory.withhold()
        self._uncovered.changed()
        writers = self._pool.status().pool.writers
        routes = sum(one.bound for one in writers if one.worker == worker and address in ("", one.address))
        return router_pb2.DrainEndpointResponse(endpoints=len(keys), routes=routes)

    def swap(self) -> router_pb2.SwapGenerationResponse:
        """See Router.SwapGeneration. Raises NoMapError."""
        if not self._pool.status().pool.generation:
            raise NoMapError(
                "there is no endpoint map with a worker yet", remedy="start a worker, or the catalog", retry_after_s=1.0
            )
        self._pool.swap()
        now = self._pool.status().pool
        log.info("an operator swaps the tunnels", generation=now.pending.generation if now.pending else now.generation)
        return router_pb2.SwapGenerationResponse(
            generation=now.pending.generation if now.pending is not None else now.generation
        )

    def set_policy(self, request: router_pb2.SetPoolPolicyRequest) -> router_pb2.SetPoolPolicyResponse:
        """See Router.SetPoolPolicy. Raises InvalidPolicyError."""
        try:
            policy = changed(self._pool.policy, request.knobs)
        except KnobError as error:
            raise InvalidPolicyError(str(error), remedy=error.remedy, values={"knob": error.knob}) from None
        if request.knobs:
            log.info("an operator changes the pool's policy", **dict(sorted(request.knobs.items())))
            self._pool.set_policy(policy)
            self._observatory.withhold()
            self._uncovered.changed()
        return router_pb2.SetPoolPolicyResponse(policy=spelled(policy))
