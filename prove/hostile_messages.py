"""Messages on sound frames that nobody may act on: malformed, late, repeated, of the wrong epoch, of a future version.

Each kind says what it must be counted as, entry by entry of the ledger; a message is one unless it says otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from libs.contracts.segue.v1 import worker_pb2
from libs.controller.protocol import (
    AssignmentId,
    Cancel,
    CancelRequest,
    CompletedDelivery,
    DeclineReason,
    Delta,
    ElectTunnel,
    FinishReason,
    GenerationRequest,
    Heartbeat,
    Offer,
    OfferReply,
    Result,
    ResultStatus,
    SnapshotRequest,
    Submission,
    TokenLogprobs,
    Usage,
)
from libs.controller.wire import AttachCodec, TunnelCodec
from libs.controller.wire_fields import to_proto
from prove.hostile_ends import ROUTED_TOKENS, VICTIM, RouterEnd, WorkerEnd
from prove.hostile_ends import ROUTER_EPOCH as EPOCH
from tests.worker.rig import EPOCH as WORKER_EPOCH

_ENCODE = TunnelCodec().encode
_ATTACH = AttachCodec().encode

FUTURE = 1_000
"""A field number, and a version, that no message has yet."""


@dataclass(frozen=True)
class MessageKind:
    """`way`: "live" on the request's own route, "control" on its tunnel's, "route" as the first on one of its own."""

    name: str
    way: str
    make: Callable[[random.Random], bytes]
    counted: tuple[str, ...]


def _future(draw: random.Random) -> bytes:
    """A message whose only field this version does not know: number and length, then bytes."""
    body = draw.randbytes(draw.randrange(1, 60))
    return _varint(FUTURE << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _garbage(draw: random.Random) -> bytes:
    return b"\xff" * 12 + draw.randbytes(draw.randrange(60))


def _cut(data: bytes, draw: random.Random) -> bytes:
    """Inside its last field, so that it is no message any more."""
    return data[: -draw.randrange(1, 8)]


def router_messages(end: RouterEnd) -> tuple[MessageKind, ...]:
    """From the request's worker, and from ingresses."""
    mine = AssignmentId(VICTIM, 1)

    def delta(
        assignment: AssignmentId = mine,
        epoch: int = EPOCH,
        index: int = 2,
        tokens: tuple[int, ...] = (102,),
        logs: int = 0,
    ) -> bytes:
        usage = Usage(prompt_tokens=39, computed_tokens=39, generated_tokens=index + len(tokens))
        logprobs = (TokenLogprobs(-1.0),) * logs
        return _ENCODE(Delta(assignment, epoch, index, tokens, logprobs=logprobs, usage=usage))

    def result(assignment: AssignmentId = mine, epoch: int = EPOCH) -> bytes:
        return _ENCODE(Result(assignment, epoch, ResultStatus.COMPLETED, FinishReason.LENGTH))

    def reply(assignment: AssignmentId, epoch: int, accepted: bool) -> bytes:
        reason = DeclineReason.UNSPECIFIED if accepted else DeclineReason.QUEUE_FULL
        return _ENCODE(OfferReply(assignment, epoch, accepted, reason))

    def beat(**changes: object) -> bytes:
        sound = replace(end.worker.beat, epoch=EPOCH, sequence=end.heard, snapshot=True)
        return _ENCODE(replace(sound, **changes))  # type: ignore[arg-type]

    def late(draw: random.Random) -> AssignmentId:
        return AssignmentId(VICTIM, draw.randrange(2, 1_000))

    def wrong(draw: random.Random) -> int:
        return draw.choice([0, EPOCH - 1, EPOCH + 1, 1 << 60])

    def stranger(draw: random.Random) -> AssignmentId:
        return AssignmentId(f"stranger-{draw.randrange(1 << 30)}", 1)

    def fenced(name: str, fence: str, make: Callable[[random.Random], bytes]) -> MessageKind:
        return MessageKind(name, "live", make, (f"fence/{fence}",))

    def beaten(name: str, rejection: str, make: Callable[[random.Random], bytes]) -> MessageKind:
        return MessageKind(name, "control", make, (f"heartbeat/{rejection}",))

    offer = end.job.offer
    asked = GenerationRequest(VICTIM, "m", (1, 2, 3), 3, 4, tenant="others")
    unnamed = replace(asked, request_id="")
    return (
        # the request's own worker
        fenced("a delta of the wrong epoch", "wrong-epoch", lambda d: delta(epoch=wrong(d))),
        fenced("a delta of another attempt", "stale-attempt", lambda d: delta(late(d))),
        fenced("a delta of no request", "unknown-request", lambda d: delta(stranger(d))),
        fenced("a delta once more", "duplicate-delta", lambda d: delta(index=d.randrange(2))),
        fenced("a delta that overlaps", "overlapping-delta", lambda d: delta(index=1, tokens=(101, 102, 103))),
        fenced("a delta too early", "delta-gap", lambda d: delta(index=d.randrange(3, 300))),
        fenced("a delta without tokens", "malformed-delta", lambda d: delta(tokens=())),
        fenced("a delta with too few logprobs", "malformed-delta", lambda d: delta(tokens=(102, 103), logs=1)),
        fenced("a delta over the budget", "over-budget", lambda d: delta(tokens=(102,) * ROUTED_TOKENS)),
        fenced("a result of the wrong epoch", "wrong-epoch", lambda d: result(epoch=wrong(d))),
        fenced("a result of another attempt", "stale-attempt", lambda d: result(late(d))),
        fenced("a result of no request", "unknown-request", lambda d: result(stranger(d))),
        fenced("a reply of the wrong epoch", "wrong-epoch", lambda d: reply(mine, wrong(d), d.random() < 0.5)),
        fenced("a reply of another attempt", "stale-attempt", lambda d: reply(late(d), wrong(d), d.random() < 0.5)),
        MessageKind("a future message in mid-stream", "live", _future, ("worker/unknown-type", "worker/out-of-place")),
        MessageKind("an offer to the router", "live", lambda d: _ENCODE(offer), ("worker/out-of-place",)),
        # its control route
        MessageKind("a malformed control message", "control", _garbage, ("worker/malformed",)),
        MessageKind("a control message cut off", "control", lambda d: _cut(beat(), d), ("worker/malformed",)),
        MessageKind("a future control message", "control", _future, ("worker/unknown-type", "worker/out-of-place")),
        MessageKind(
            "a cancel to the router", "control", lambda d: _ENCODE(Cancel(mine, EPOCH)), ("worker/out-of-place",)
        ),
        MessageKind("a heartbeat of nobody", "control", lambda d: beat(worker=""), ("worker/no-worker",)),
        beaten("a heartbeat once more", "old-sequence", lambda d: beat(sequence=d.randrange(1, end.heard + 1))),
        beaten("a heartbeat of an old epoch", "old-epoch", lambda d: beat(epoch=d.randrange(EPOCH), sequence=1 << 40)),
        beaten("a heartbeat of another worker", "other-worker", lambda d: beat(worker=f"w{d.randrange(1, 99)}")),
        beaten("a heartbeat of a future version", "unknown-version", lambda d: beat(version=d.randrange(2, FUTURE))),
        # ingresses
        MessageKind("a malformed submission", "route", _garbage, ("ingress/malformed",)),
        MessageKind("a future submission", "route", _future, ("ingress/unknown-type", "ingress/out-of-place")),
        MessageKind(
            "a submission of no id", "route", lambda d: _ATTACH(Submission(unnamed)), ("ingress/no-request-id",)
        ),
        MessageKind(
            "a route that begins with a cancel",
            "route",
            lambda d: _ATTACH(CancelRequest(VICTIM)),
            ("ingress/out-of-place",),
        ),
        MessageKind(
            "a delivery to the router",
            "route",
            lambda d: _ATTACH(CompletedDelivery(VICTIM, FinishReason.STOP)),
            ("ingress/out-of-place",),
        ),
        MessageKind(
            "another tenant's submission of the same id",
            "route",
            lambda d: _ATTACH(Submission(asked)),
            ("fence/duplicate-submission",),
        ),
    )


def worker_messages(end: WorkerEnd) -> tuple[MessageKind, ...]:
    """From the request's router, and from hostile ones."""
    sound = end.exchange.offer
    mine = sound.assignment

    def cancel(assignment: AssignmentId = mine, epoch: int = WORKER_EPOCH) -> bytes:
        return _ENCODE(Cancel(assignment, epoch))

    def wrong(draw: random.Random) -> int:
        return draw.choice([0, WORKER_EPOCH - 1, WORKER_EPOCH + 1, 1 << 60])

    def offered(**changes: object) -> bytes:
        """An offer that lacks something the encoder would not leave out."""
        message = worker_pb2.TunnelMessage()
        message.offer.CopyFrom(to_proto(sound))  # type: ignore[arg-type]
        for name, value in changes.items():
            match name:
                case "tokens":
                    del message.offer.request.tokens[:]
                case "request_id":
                    message.offer.request.request_id = str(value)
                case "output_start":
                    message.offer.request.output_start = int(str(value))
                case "assignment":
                    message.offer.assignment.Clear()
        return message.SerializeToString()

    def of(offer: Offer) -> bytes:
        return _ENCODE(offer)

    def again(draw: random.Random) -> bytes:
        # What has a lower number may be another router's, which knows nothing of this one's attempts.
        return of(sound)

    def elsewhere(draw: random.Random) -> bytes:
        other = AssignmentId(f"stranger-{draw.randrange(1 << 30)}", 1)
        request = replace(sound.request, request_id=other.request_id)
        return of(replace(sound, assignment=other, request=request, epoch=wrong(draw)))

    def over(draw: random.Random) -> bytes:
        return cancel(AssignmentId(VICTIM, draw.randrange(1, mine.attempt)))

    beat = _ENCODE(Heartbeat("w", WORKER_EPOCH, 1))
    delta = _ENCODE(Delta(mine, WORKER_EPOCH, 0, (1,)))
    unknown = ("router/unknown-type", "passed-over")

    def refused(name: str, reason: str, make: Callable[[random.Random], bytes]) -> MessageKind:
        return MessageKind(name, "route", make, (f"router/{reason}",))

    return (
        # the request's own route
        MessageKind("a cancel of the wrong epoch", "live", lambda d: cancel(epoch=wrong(d)), ("fence/wrong-epoch",)),
        MessageKind("a cancel of what is over", "live", over, ("fence/unknown-assignment",)),
        MessageKind("a future message on a live route", "live", _future, unknown),
        MessageKind("a delta to the worker", "live", lambda d: delta, ("passed-over",)),
        # control
        MessageKind("a malformed control message", "control", _garbage, ("router/malformed",)),
        MessageKind("a control message cut off", "control", lambda d: _cut(delta, d), ("router/malformed",)),
        MessageKind("a future control message", "control", _future, unknown),
        MessageKind("a heartbeat to the worker", "control", lambda d: beat, ("passed-over",)),
        MessageKind("an offer that is no route's", "control", lambda d: of(sound), ("passed-over",)),
        # routes of its own
        refused("a malformed offer", "malformed", _garbage),
        refused("an offer cut off", "malformed", lambda d: _cut(of(sound), d)),
        refused("an offer without tokens", "no-tokens", lambda d: offered(tokens=())),
        refused("an offer of another request", "other-request", lambda d: offered(request_id="another")),
        refused("an offer beyond its tokens", "output-start", lambda d: offered(output_start=d.randrange(40, 1 << 20))),
        refused("an offer of no assignment", "no-assignment", lambda d: offered(assignment=None)),
        MessageKind("a future offer", "route", _future, unknown),
        MessageKind("a route that begins with a cancel", "route", lambda d: cancel(), ("passed-over",)),
        MessageKind("a snapshot wanted on a route", "route", lambda d: _ENCODE(SnapshotRequest()), ("passed-over",)),
        MessageKind("an election on a route", "route", lambda d: _ENCODE(ElectTunnel(1 << 40)), ("passed-over",)),
        MessageKind("an offer of the wrong epoch", "route", elsewhere, ("declined/wrong_epoch",)),
        MessageKind("an offer once more", "route", again, ("declined/duplicate",)),
    )
