"""Round the tunnel pool: one assignment over a `Generate` call of its own to its worker, where policy says so.

The worker's answers are the same values as on a tunnel. The call lives as long as the assignment: giving it up cancels
the call, and with it the work at the worker.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc

from libs.contracts.segue.v1 import catalog_pb2, common_pb2, worker_pb2, worker_pb2_grpc
from libs.controller.protocol import DeclineReason, Delta, Offer, OfferReply, Result
from libs.controller.wire_fields import from_proto, to_proto
from libs.service.channel import open_channel
from libs.service.errors import read_error
from libs.service.transport import Transport

Answer = OfferReply | Delta | Result

_SHAPES: dict[str, type[Answer]] = {"accepted": OfferReply, "delta": Delta, "result": Result}


class DirectCallError(Exception):
    """The call could not be made, or broke; says why."""


class DirectCalls:
    """`addresses`: where a worker listens and may be called. Each attempt of a request takes the next one."""

    def __init__(self, transport: Transport, addresses: Callable[[str], Sequence[str]]) -> None:
        self.made = 0
        self._transport = transport
        self._addresses = addresses

    async def run(self, offer: Offer) -> AsyncGenerator[Answer, None]:
        """The worker's answers, a decline included, to the end. Raises DirectCallError. Close it to give up."""
        worker = offer.candidate.worker
        addresses = self._addresses(worker)
        if not addresses:
            raise DirectCallError(f"worker {worker} is not in the endpoint map, or taken out of use")
        address = addresses[offer.assignment.attempt % len(addresses)]
        self.made += 1
        name = worker if self._transport.mutual else ""
        channel = open_channel(address, self._transport, server_name=name)
        try:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
            async for event in stub.Generate(_asked(offer), timeout=offer.request.deadline_ms / 1_000):
                kind = event.WhichOneof("event")
                if kind in _SHAPES:
                    yield from_proto(_SHAPES[kind], getattr(event, kind))
        except grpc.aio.AioRpcError as error:
            declined = _declined(offer, error)
            if declined is None:
                raise DirectCallError(f"{error.code().name}: {error.details()}") from None
            yield declined
        finally:
            await channel.close(None)


def _asked(offer: Offer) -> worker_pb2.WorkerGenerateRequest:
    request = to_proto(offer.request)
    assert isinstance(request, common_pb2.GenerationRequest)
    asked = worker_pb2.WorkerGenerateRequest(
        request=request, fingerprint=offer.fingerprint, attempt=offer.assignment.attempt
    )
    for node in offer.chain:
        shown = to_proto(node)
        assert isinstance(shown, catalog_pb2.Node)
        asked.chain.append(shown)
    return asked


def _declined(offer: Offer, error: grpc.aio.AioRpcError) -> OfferReply | None:
    """What a tunnel would have carried as a decline comes as a status."""
    known = read_error(error)
    reason = DeclineReason.__members__.get(known.values.get("reason", ""))
    if known.reason != "DECLINED" or reason is None:
        return None
    return OfferReply(offer.assignment, offer.epoch, False, reason, known.values.get("detail", ""))
