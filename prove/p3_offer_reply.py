"""How soon a worker answers an offer while all its lanes decode, as a router sees it: over a tunnel, from elsewhere.

Eight direct calls keep the lanes decoding. Offers of prompts of several lengths then come at random intervals, each
timed from its encoding to its decoded reply, and are cancelled at once, so that they never get a lane.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc

from cli.demo.facts import describe
from libs.contracts.segue.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    Candidate,
    GenerationRequest,
    Offer,
    OfferReply,
    Tier,
)
from libs.controller.wire import TunnelCodec
from libs.service.channel import open_channel
from libs.service.transport import Transport
from libs.tunnel import Handlers, Registry, RouteClosedError, Side, Tunnel
from libs.tunnel.grpc_carrier import dial
from prove.checks import Checks
from prove.report import Claim, Outcome, Size
from prove.stage import Stage, staged

CLAIM = Claim("3-offer-reply", "under full decode a worker replies to an offer within 25 ms at p99", seed=37)
LIMIT_MS = 25.0
_LANES = 8
_SERVICE = "segue.v1.Worker"
_LENGTHS = (16, 300, 1_000, 3_000)
_REPLY_S = 10.0


@dataclass
class Found:
    """Milliseconds per offer, by prompt length; `tokens`: decoded meanwhile; `decoding`: lanes, asked now and then."""

    ms: dict[int, list[float]] = field(default_factory=dict)
    tokens: int = 0
    decoding: list[int] = field(default_factory=list)
    declined: int = 0

    @property
    def all(self) -> list[float]:
        return [one for ms in self.ms.values() for one in ms]


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    async with AsyncExitStack() as stack:
        if stage is None:
            settings = {"heartbeat_s": "1", "kv_bytes": "4GiB"}
            stage = await stack.enter_async_context(
                staged("gemma3-270m", workers=1, threads=1, worker_settings=settings)
            )
        target = next(iter(stage.cluster.workers.values())).target
        offers, new = (2_000, 2_000) if size is Size.FULL else (150, 1_200)
        found = await measure(target, offers, new)
    return judged(found, LIMIT_MS if size is Size.FULL else 10 * LIMIT_MS)


def judged(found: Found, limit_ms: float) -> Outcome:
    """p99 over all offers."""
    checks, ms = Checks(), sorted(found.all)
    p99 = quantile(ms, 0.99)
    checks.check("p99, ms", round(p99, 2), f"<= {limit_ms}", p99 <= limit_ms)
    checks.check(
        "lanes decoding", [*found.decoding], f"{_LANES}", bool(found.decoding) and min(found.decoding) == _LANES
    )
    checks.check("tokens decoded meanwhile", found.tokens, "> 0", found.tokens > 0)
    checks.equal("offers declined", found.declined, 0)
    details = {
        "offers": len(ms),
        "p50_ms": round(statistics.median(ms), 2),
        "max_ms": round(ms[-1], 2),
        "by_length": {
            str(length): {"p50_ms": round(statistics.median(one), 2), "p99_ms": round(quantile(sorted(one), 0.99), 2)}
            for length, one in sorted(found.ms.items())
        },
    }
    return checks.outcome(dict(details))


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed."""
    return ascending[max(0, math.ceil(len(ascending) * share) - 1)]


async def measure(target: str, offers: int, new: int) -> Found:
    """All of it, against one worker that has nothing else to do."""
    found, draw = Found(), random.Random(CLAIM.seed)
    known = await describe(target)
    vocab = known.models[0].vocab_size
    async with grpc.aio.insecure_channel(target) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        lanes = [asyncio.create_task(_lane(stub, draw.randrange(6, vocab), new, found)) for _ in range(_LANES)]
        try:
            await _decoding(target, _LANES)
            async with _tunnel(target) as tunnel:
                for number in range(offers):
                    length = _LENGTHS[number % len(_LENGTHS)]
                    tokens = tuple(draw.randrange(6, vocab) for _ in range(length))
                    await _offer(tunnel, known, tokens, found)
                    await asyncio.sleep(draw.uniform(0, 0.02))
                    if number % 50 == 0:
                        found.decoding.append((await describe(target)).observation.load.decoding)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
    return found


async def _lane(stub: worker_pb2_grpc.WorkerStub, token: int, new: int, found: Found) -> None:
    """Keeps one lane decoding: a generation, and then the next."""
    while True:
        request = common_pb2.GenerationRequest(
            request_id=secrets.token_hex(8), tokens=[2, token, token + 1], max_new_tokens=new
        )
        call = stub.Generate(worker_pb2.WorkerGenerateRequest(request=request), timeout=900)
        try:
            async for event in call:
                found.tokens += len(event.delta.tokens)
        finally:
            call.cancel()


async def _decoding(target: str, lanes: int) -> None:
    async with asyncio.timeout(60):
        while (await describe(target)).observation.load.decoding < lanes:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _tunnel(target: str) -> AsyncIterator[Tunnel]:
    channel = open_channel(target, Transport())
    async with Registry() as registry:
        handlers = Handlers(merge=lambda _one, _two: None, on_control=lambda _tunnel, _payload: None)
        tunnel = Tunnel(dial(channel, target, _SERVICE), registry, Side.DIALING, handlers)
        life = asyncio.create_task(tunnel.run())
        await tunnel.ready(10.0)
        try:
            yield tunnel
        finally:
            tunnel.close()
            await asyncio.gather(life, return_exceptions=True)
            await channel.close(None)


async def _offer(tunnel: Tunnel, known: worker_pb2.DescribeResponse, tokens: tuple[int, ...], found: Found) -> None:
    codec = TunnelCodec()
    epoch, fingerprint = known.endpoint.epoch, known.models[0].fingerprint
    assignment = AssignmentId(secrets.token_hex(8), 1)
    request = GenerationRequest(
        assignment.request_id, "m", tokens, len(tokens), 16, tenant_salt="cd" * 32, deadline_ms=600_000
    )
    candidate = Candidate(known.endpoint.worker, epoch, fingerprint, Tier.NONE, queue_ms=1e9)
    began = time.perf_counter()
    route = await tunnel.open(codec.encode(Offer(assignment, epoch, request, fingerprint, candidate)))
    reply = codec.decode(await route.receive(_REPLY_S))
    found.ms.setdefault(len(tokens), []).append((time.perf_counter() - began) * 1e3)
    assert isinstance(reply, OfferReply)
    found.declined += not reply.accepted
    route.try_send(codec.encode(Cancel(assignment, epoch)))
    try:
        while True:
            await route.receive(_REPLY_S)
    except RouteClosedError:
        return
