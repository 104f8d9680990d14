"""Frames that nobody may act on, at the router and at the worker, over real sockets: refused, counted, nothing moved.

Each end has a request in mid-stream. What it counts is compared entry by entry with what was sent: one refusal is one
count under its own reason, and no other entry may grow. What refused frames must not change is compared before and
after, and the request then goes on to exact tokens. The same judge is shown ends that forgot one check each, and must
notice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from pydantic import JsonValue

from libs.controller.fences import Fence, FenceName
from libs.tunnel import CarrierLostError, Handlers, Registry, RouteClosedError, Side, Tunnel, reader, sequence
from libs.tunnel.frames import Frame, Verify, decode
from libs.tunnel.grpc_carrier import dial
from prove.checks import Checks
from prove.hostile_ends import End, RouterEnd, WorkerEnd, differences, router_end, worker_end
from prove.hostile_frames import FRAMES, FrameKindOf
from prove.hostile_messages import MessageKind, router_messages, worker_messages
from prove.report import Claim, Outcome, Size
from prove.stage import Stage

CLAIM = Claim(
    "5-frames",
    "100,000 malformed, oversized, out-of-order, replayed, wrong-epoch and future-version frames at both ends: no "
    "crash, no state change, each counted by reason",
    seed=55,
)
FULL, SLICE = 50_000, 300
"""Of each end."""
_AT_ONCE = 16
"""Tunnels that die at once; messages between two looks at the ledger are as many times four."""
_REFUSED_S = 30.0
_PLANTED_S = 2.0


@dataclass
class Attack:
    """What has been sent: by kind, and what it must have been counted as."""

    sent: Counter[str]
    due: Counter[str]
    unanswered: Counter[str]
    """Tunnels that nobody ended, by kind."""
    lost: str = ""
    """What the request's own route was found closed at."""


async def run(size: Size, stage: Stage | None) -> Outcome:
    """See the module."""
    del stage
    count = FULL if size is Size.FULL else SLICE
    checks = Checks()
    details: dict[str, JsonValue] = {}
    with quiet():
        async with router_end(within_s=7_200.0) as router:
            details["router"] = await attacked(checks, router, count, CLAIM.seed)
        async with worker_end(decode_ms=1_000.0 if size is Size.FULL else 150.0) as worker:
            details["worker"] = await attacked(checks, worker, count, CLAIM.seed + 1)
        for name in PLANTED if size is Size.FULL else ("the sequence", "the epoch"):
            found = await planted(name)
            checks.check(f"an end that forgot {name} is noticed", found[:3], "something", bool(found))
    return checks.outcome(details)


async def attacked(checks: Checks, end: End, count: int, seed: int, patience_s: float = _REFUSED_S) -> JsonValue:
    """Attacks one end with `count` frames of all kinds mixed, and judges it; what was sent, by kind."""
    before, counted = end.state(), end.ledger()
    attack = await assault(end, count, random.Random(seed), patience_s)
    if not attack.unanswered and not attack.lost:
        await settled(end, counted, attack.due, patience_s, before)
    judge(checks, end.name, attack, counted, end.ledger(), before, end.state())
    checks.equal(f"{end.name}: frames", sum(attack.sent.values()), count)
    if not checks.failed:
        await end.unharmed(checks)
    return dict(sorted(attack.sent.items()))


def judge(
    checks: Checks,
    name: str,
    attack: Attack,
    counted: Counter[str],
    counts: Counter[str],
    before: dict[str, object],
    after: dict[str, object],
) -> None:
    """Nothing left unanswered, every refusal counted once as what it was, nothing else counted, nothing moved."""
    grown = Counter({key: counts[key] - counted[key] for key in counts if counts[key] != counted[key]})
    wrong = {key: [grown[key], attack.due[key]] for key in grown | attack.due if grown[key] != attack.due[key]}
    checks.equal(f"{name}: tunnels left standing by a frame they must refuse", dict(attack.unanswered), {})
    checks.equal(f"{name}: the request's route was lost at", attack.lost, "")
    checks.equal(f"{name}: entries counted otherwise than sent [counted, sent]", dict(sorted(wrong.items())), {})
    checks.equal(f"{name}: what has changed", differences(before, after), {})


async def assault(end: End, count: int, draw: random.Random, patience_s: float) -> Attack:
    """Sends them, in any order."""
    messages = router_messages(end) if isinstance(end, RouterEnd) else worker_messages(_worker(end))
    kinds: list[FrameKindOf | MessageKind] = [*FRAMES, *messages]
    weights = [kind.share if isinstance(kind, FrameKindOf) else 1.0 for kind in kinds]
    # Each kind at least once, however few there are.
    plan = [*kinds, *draw.choices(kinds, weights, k=max(0, count - len(kinds)))][:count]
    draw.shuffle(plan)
    attack = Attack(Counter(), Counter(), Counter())
    counted = end.ledger()
    async with hostile(end) as enemy:
        for i in range(0, len(plan), 4 * _AT_ONCE):
            await _wave(end, enemy, plan[i : i + 4 * _AT_ONCE], draw, attack, patience_s)
            if attack.unanswered or attack.lost or not await settled(end, counted, attack.due, patience_s):
                break
    # The enemy's own tunnel ended in order.
    attack.due["tunnel/shutdown"] += 1
    if isinstance(end, WorkerEnd):
        attack.due["fence/no-tunnel"] += 1
    return attack


def _worker(end: End) -> WorkerEnd:
    assert isinstance(end, WorkerEnd)
    return end


async def _wave(
    end: End,
    enemy: Tunnel,
    plan: Sequence[FrameKindOf | MessageKind],
    draw: random.Random,
    attack: Attack,
    patience_s: float,
) -> None:
    frames = [kind for kind in plan if isinstance(kind, FrameKindOf)]
    for kind in plan:
        attack.sent[kind.name] += 1
        attack.due.update(kind.counted)
        if isinstance(kind, FrameKindOf) and isinstance(end, WorkerEnd):
            attack.due["fence/no-tunnel"] += 1
        if isinstance(kind, MessageKind) and not await _send(end, enemy, kind, kind.make(draw)):
            attack.lost = attack.lost or kind.name
    for i in range(0, len(frames), _AT_ONCE):
        streams = [(kind, kind.make(draw)) for kind in frames[i : i + _AT_ONCE]]
        ended = await asyncio.gather(*(_ends(end, stream, patience_s) for _, stream in streams))
        for (kind, _), did in zip(streams, ended, strict=True):
            if not did:
                attack.unanswered[kind.name] += 1
        if attack.unanswered:
            return


async def _send(end: End, enemy: Tunnel, kind: MessageKind, payload: bytes) -> bool:
    """One message its way; false if the request's route is gone. A route of its own must be closed there."""
    match kind.way, end:
        case "live", RouterEnd() | WorkerEnd():
            route = end.job.route if isinstance(end, RouterEnd) else end.exchange.route
            try:
                await route.send(payload, _REFUSED_S)
            except RouteClosedError:
                return False
        case "control", RouterEnd():
            # The worker's side of the tunnel that carries its heartbeats.
            end.worker.tunnels[-1].try_control(payload)
        case "control", _:
            enemy.try_control(payload)
        case _:
            route = await enemy.open(payload)
            with suppress(RouteClosedError):
                async with asyncio.timeout(_REFUSED_S):
                    while True:
                        await route.receive()
    return True


async def _ends(end: End, frames: Sequence[bytes], patience_s: float) -> bool:
    """Whether a tunnel of these frames is ended by the other side."""
    carrier = dial(end.channel, "enemy", end.service)
    try:
        async with asyncio.timeout(patience_s):
            for frame in frames:
                await carrier.write(frame)
            while await carrier.read() is not None:
                pass
    except CarrierLostError:  # the status of a refusal, or a write that came after it
        return True
    except TimeoutError:
        return False
    finally:
        carrier.cancel()
    return True


@asynccontextmanager
async def hostile(end: End) -> AsyncIterator[Tunnel]:
    """A sound tunnel of somebody hostile."""
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(Registry())
        tunnel = Tunnel(dial(end.channel, end.name, end.service), registry, Side.DIALING, Handlers())
        life = asyncio.create_task(tunnel.run())
        try:
            await tunnel.ready(_REFUSED_S)
            yield tunnel
        finally:
            tunnel.close()
            await asyncio.gather(life, return_exceptions=True)


async def settled(
    end: End,
    counted: Counter[str],
    due: Counter[str],
    within_s: float,
    state: dict[str, object] | None = None,
) -> bool:
    """Until all that is due is counted (and the end is as it was), at most so long; whether it is."""

    def done() -> bool:
        counts = end.ledger()
        if any(counts[key] - counted[key] < number for key, number in due.items()):
            return False
        return state is None or not differences(state, end.state())

    loop = asyncio.get_running_loop()
    give_up = loop.time() + within_s
    while not done() and loop.time() < give_up:  # noqa: ASYNC110 - counters announce nothing
        await asyncio.sleep(0.002)
    return done()


# --- ends that forgot a check ---


def _any_number(self: sequence.ReceiveSequence, seq: int) -> None:
    self.last = seq


class _Forgetful:
    """Fences that let one name pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.honest = Fence.stops

    def stops(self, fence: Fence, name: FenceName, condition: bool, event: object) -> bool:
        return False if name.value == self.name else self.honest(fence, name, condition, event)


def _no_fence(name: str) -> tuple[object, str, object]:
    forgetful = _Forgetful(name)
    return Fence, "stops", lambda self, fence, condition, event: forgetful.stops(self, fence, condition, event)


def _unchecked(data: bytes, max_frame_bytes: int, max_items: int, verify: Verify) -> Frame:
    return decode(data, max_frame_bytes, max_items, lambda items, crc32: None)


def _unlimited(data: bytes, max_frame_bytes: int, max_items: int, verify: Verify) -> Frame:
    return decode(data, 1 << 30, 1 << 30, verify)


PLANTED: dict[str, tuple[str, tuple[object, str, object]]] = {
    "the sequence": ("router", (sequence.ReceiveSequence, "accept", _any_number)),
    "the checksum": ("worker", (reader, "decode", _unchecked)),
    "the limits": ("worker", (reader, "decode", _unlimited)),
    "the delta's index": ("router", _no_fence("duplicate-delta")),
    "the epoch": ("worker", _no_fence("wrong-epoch")),
}


async def planted(name: str, count: int = 120) -> list[str]:
    """The checks that fail, or how it broke, at an end that forgot that check."""
    which, (owner, attribute, changed) = PLANTED[name]
    checks = Checks()
    try:
        async with AsyncExitStack() as stack:
            end: End = (
                await stack.enter_async_context(router_end(within_s=120.0))
                if which == "router"
                else await stack.enter_async_context(worker_end(decode_ms=100.0))
            )
            with replaced(owner, attribute, changed):
                await attacked(checks, end, count, CLAIM.seed, _PLANTED_S)
    except (AssertionError, TimeoutError, RouteClosedError, BaseExceptionGroup) as error:
        return [*(str(one["name"]) for one in checks.failed), type(error).__name__]
    return [str(one["name"]) for one in checks.failed]


@contextmanager
def replaced(owner: object, attribute: str, changed: object) -> Iterator[None]:
    """The attribute, changed for a while."""
    honest = getattr(owner, attribute)
    setattr(owner, attribute, changed)
    try:
        yield
    finally:
        setattr(owner, attribute, honest)


@contextmanager
def quiet() -> Iterator[None]:
    """A warning for every refusal is right, and unreadable."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
