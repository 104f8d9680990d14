"""Requests by `Router/Generate`: any tenant, token ids in and out, the time to the first one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from libs.continuation.tenancy import salt
from libs.contracts.segue.v1 import common_pb2, router_pb2, router_pb2_grpc

_CALL_S = 120.0


@dataclass(frozen=True)
class Tenant:
    """Somebody the ingress would have known by a key. `secret`: the cluster's, hex."""

    name: str
    secret: str

    @property
    def salt(self) -> str:
        return salt(self.name, bytes.fromhex(self.secret))


@dataclass(frozen=True)
class Answer:
    """A completed request. `ttft_ms`: from the call to the first delivery; `fingerprint`: of who generated."""

    fingerprint: str
    tokens: list[int]
    usage: common_pb2.Usage
    served: router_pb2.Served
    ttft_ms: float


class NotCompletedError(RuntimeError):
    """The terminal delivery was another one than completion."""


def wanted(
    model: str, tenant: Tenant, tokens: Sequence[int], new: int = 1, deadline_ms: int = 0
) -> router_pb2.GenerateRequest:
    """One greedy request with an id of its own. deadline_ms 0 = the router's default."""
    request = common_pb2.GenerationRequest(
        request_id=secrets.token_hex(8), tenant=tenant.name, tenant_salt=tenant.salt, model=model, tokens=tokens,
        output_start=len(tokens), max_new_tokens=new, deadline_ms=deadline_ms,
    )  # fmt: skip
    return router_pb2.GenerateRequest(request=request)


async def generate(
    router: router_pb2_grpc.RouterStub, model: str, tenant: Tenant, tokens: Sequence[int], new: int = 1
) -> Answer:
    """One request, greedy. Raises NotCompletedError, grpc.aio.AioRpcError."""
    asked = wanted(model, tenant, tokens, new)
    began = time.perf_counter()
    ttft, found, fingerprint = 0.0, list[int](), ""
    async for delivery in router.Generate(asked, timeout=_CALL_S):
        match delivery.WhichOneof("event"):
            case "tokens":
                ttft = ttft or (time.perf_counter() - began) * 1e3
                found += delivery.tokens.tokens
                fingerprint = delivery.tokens.fingerprint
            case "completed":
                return Answer(fingerprint, found, delivery.completed.usage, delivery.completed.served, ttft)
            case other:
                raise NotCompletedError(f"{asked.request.request_id}: {other}: {delivery}")
    raise NotCompletedError(f"{asked.request.request_id}: the stream ended without a terminal delivery")
