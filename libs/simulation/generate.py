"""A random schedule from a seed: small clusters, prompts that share prefixes, faults of every kind."""

from __future__ import annotations

import random
from dataclasses import replace

from libs.simulation import forgeries
from libs.simulation.planning import Misplan
from libs.simulation.schedule import Ask, Do, Fault, Schedule, Settings, WorkerSpec

_SPAN_MS = 1_500.0  # asks arrive within it

# How often a kind is drawn, of the sum.
_WEIGHTS: dict[Do, int] = {
    Do.PARTITION: 5,
    Do.JITTER: 7,
    Do.REPEAT: 5,
    Do.LOSE_TUNNEL: 6,
    Do.LOSE_ATTACH: 3,
    Do.RETIRE: 4,
    Do.CRASH: 6,
    Do.DRAIN: 4,
    Do.MUTE: 3,
    Do.STALE: 3,
    Do.SLOW: 4,
    Do.VANISH: 2,
    Do.CORRUPT: 2,
    Do.COLLECT: 2,
    Do.CATALOG_AWAY: 2,
    Do.CANCEL: 6,
    Do.CANCEL_BY_ID: 1,
    Do.RESUBMIT: 1,
    Do.DEVICE_ERROR: 5,
    Do.PRESSURE: 6,
    Do.RELABEL: 2,
    Do.MISPLAN: 5,
    Do.WAKE: 1,
}
_MOMENTS = (Do.STRAY_TIMER, Do.STRAY_PLAN, Do.STRAY_PLAN, Do.STRAY_CANCEL, Do.FORGE, Do.FORGE, Do.FORGE, Do.FORGE_OFFER)
_KINDS = [kind for kind, weight in _WEIGHTS.items() for _ in range(weight)]


def generate(seed: int) -> Schedule:
    """The seed's schedule."""
    draw = random.Random(seed)
    herd = draw.random() < 0.2
    settings = _settings(draw, herd)
    asks = _asks(draw, settings)
    if herd:
        asks = _together(draw, asks)
    drawn = [_fault(draw, settings, asks) for _ in range(draw.randint(4, 10))]
    # What is stray or forged is harmless and short: a handful at a time, while something is going on.
    drawn += [replace(_moment(draw, settings), at_ms=_soon(draw, asks)) for _ in range(draw.randint(6, 14))]
    faults = tuple(sorted(drawn, key=lambda fault: fault.at_ms))
    return Schedule(f"seed-{seed}", settings, asks, faults, seed=seed)


def _settings(draw: random.Random, roomy: bool) -> Settings:
    page_tokens = draw.choice((16, 16, 32))
    tight = draw.random() < 0.5
    workers = []
    for index in range(draw.randint(2, 4)):
        pages = draw.randint(8, 14) if tight else draw.randint(16, 30)
        context = draw.choice((128, 256, 512))
        if roomy:
            pages, context = draw.randint(40, 80), 512
        workers.append(
            WorkerSpec(
                name=f"w{index}",
                lanes=draw.randint(1, 3),
                pages=max(6, pages * 16 // page_tokens),
                page_tokens=page_tokens,
                context=context,
                claims_context=512 if draw.random() < 0.15 else 0,
                control_tasks=draw.choice((2, 3, 6)),
                prefill_ms=draw.choice((0.3, 1.0, 2.0)),
                decode_ms=draw.choice((5.0, 10.0, 20.0)),
                ram_ms=draw.choice((0.02, 0.8)),
                ssd_ms=draw.choice((0.1, 0.9)),
                peer_ms=draw.choice((0.15, 0.5)),
                object_ms=draw.choice((0.3, 1.2)),
                evict_ms=draw.choice((0.0, 2.0, 10.0)),
                reserve_ms=draw.choice((0.5, 1.0, 15.0)),
                queue_margin_ms=draw.choice((10.0, 50.0, 200.0)),
                tells_lane=draw.random() < 0.9,
            )
        )
    return Settings(
        workers=tuple(workers),
        routers=draw.choice((1, 2, 2, 3)),
        tunnels=draw.choice((1, 1, 2)),
        burst=draw.choice((1, 1, 2, 3, 0)),
        offer_timeout_ms=draw.choice((40.0, 100.0, 200.0)),
        offers_unanswered=draw.choice((1, 1, 2, 8)),
        prefix_copies=draw.choice((1, 1, 2)),
        hold_least_ms=draw.choice((20.0, 60.0, 300.0)),
        queue=draw.choice((2, 8, 64)),
        queue_per_tenant=draw.choice((1, 4, 16)),
        attempts=draw.choice((3, 6)),
        heartbeat_ms=300.0,
        expiry_ms=900.0,
        settle_ms=900.0,
    )


def _asks(draw: random.Random, settings: Settings) -> tuple[Ask, ...]:
    asks = []
    for index in range(draw.randint(7, 13)):
        budget = draw.randint(1, 9)
        long = draw.random() < 0.06
        asks.append(
            Ask(
                name=f"a{index}",
                at_ms=round(draw.uniform(0, _SPAN_MS), 1),
                prefix=draw.choice(("p", "q")),
                shared=draw.choice((0, 16, 48, 64, 100)) if not long else draw.choice((256, 272)),
                own=draw.randint(1, 30),
                budget=budget,
                length=draw.choice((-1, -1, -1, -1, -1, -1, 0, draw.randint(0, budget), draw.randint(0, budget))),
                deadline_ms=round(
                    draw.choice((60.0, 150.0, 400.0, 2_000.0, 4_000.0, 4_000.0)) * draw.uniform(0.8, 1.2)
                ),
                tenant=draw.choice(("t", "u")),
                priority=draw.randint(0, 1),
                model="m" if draw.random() > 0.01 else "unheard-of",
                router=draw.randrange(settings.routers),
                deadly=draw.random() < 0.03,
            )
        )
    return tuple(asks)


def _together(draw: random.Random, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """Some of them begin alike, with a chunk nobody has seen, and come at once."""
    at_ms, shared = draw.uniform(50, _SPAN_MS / 2), draw.choice((256, 272))
    herd = [
        replace(
            ask,
            at_ms=round(at_ms + draw.choice((0.0, 0.1, 1.0, 5.0, 40.0)), 1),
            prefix="h",
            shared=shared,
            deadline_ms=draw.choice((400.0, 4_000.0, 4_000.0)),
            deadly=ask.deadly and draw.random() < 0.3,
        )
        for ask in asks[: draw.randint(3, 6)]
    ]
    return (*herd, *asks[len(herd) :])


def _fault(draw: random.Random, settings: Settings, asks: tuple[Ask, ...]) -> Fault:
    kind = draw.choice(_KINDS)
    at_ms = round(draw.uniform(0, _SPAN_MS + 500), 1)
    router = f"r{draw.randrange(settings.routers)}"
    worker = draw.choice(settings.workers).name
    ask = draw.choice(asks)
    pair = (router, worker) if draw.random() < 0.5 else (worker, router)
    number = draw.randrange(1_000)
    match kind:
        case Do.PARTITION:
            return Fault(at_ms, kind, *pair, ms=round(draw.uniform(20, 1_500)))
        case Do.JITTER:
            pattern = tuple(draw.choice((0.0, 0.0, 1.5, 4.0, 12.0, 60.0, 250.0)) for _ in range(draw.randint(2, 7)))
            return Fault(at_ms, kind, *pair, ms=round(draw.uniform(100, 1_500)), pattern=pattern)
        case Do.REPEAT:
            return Fault(at_ms, kind, *pair, ms=round(draw.uniform(100, 1_500)), n=draw.randint(1, 3))
        case Do.LOSE_TUNNEL:
            return Fault(at_ms, kind, router, worker, ms=draw.choice((0.0, 5.0, 200.0)), n=number)
        case Do.CRASH:
            who = router if draw.random() < 0.3 else worker
            return Fault(at_ms, kind, who, ms=round(draw.uniform(10, 800)))
        case Do.RETIRE:
            return Fault(_soon(draw, asks), kind, router, worker)
        case Do.DRAIN:
            return Fault(_soon(draw, asks), kind, worker, ms=draw.choice((0.0, 40.0, 1_000.0)))
        case Do.MUTE | Do.STALE:
            return Fault(at_ms, kind, worker, router, ms=draw.choice((500.0, 1_300.0)))
        case Do.SLOW:
            part = draw.choice(("prefill", "decode", "ram", "ssd", "peer", "object"))
            return Fault(at_ms, kind, worker, part, ms=800.0, n=draw.choice((3, 30)))
        case Do.VANISH | Do.CORRUPT:
            return Fault(at_ms, kind, draw.choice((worker, "object")), n=number)
        case Do.CATALOG_AWAY:
            return Fault(draw.choice((0.0, at_ms)), kind, ms=round(draw.uniform(100, 1_000)))
        case Do.CANCEL:
            return Fault(round(ask.at_ms + draw.uniform(0, 150), 1), kind, ask.name)
        case Do.CANCEL_BY_ID:
            return Fault(round(ask.at_ms + draw.uniform(0, 150), 1), kind, ask.name, router)
        case Do.RESUBMIT:
            return Fault(round(ask.at_ms + draw.uniform(1, 100), 1), kind, ask.name)
        case Do.DEVICE_ERROR | Do.PRESSURE | Do.RELABEL:
            return Fault(at_ms if kind is Do.RELABEL else _soon(draw, asks), kind, worker, n=number)
        case Do.MISPLAN:
            return Fault(at_ms, kind, router, n=draw.randrange(len(Misplan)))
        case Do.WAKE:
            return Fault(at_ms, kind, router, n=draw.randint(1, 3))
        case Do.COLLECT:
            return Fault(at_ms, kind, n=number)
        case _:
            return Fault(at_ms, kind, router, n=number)


def _soon(draw: random.Random, asks: tuple[Ask, ...]) -> float:
    """A moment at which some ask is probably being planned, offered or served."""
    return round(draw.choice(asks).at_ms + draw.choice((12.0, 60.0, 200.0)) * draw.random(), 1)


def _moment(draw: random.Random, settings: Settings) -> Fault:
    """Something stray or forged."""
    kind = draw.choice(_MOMENTS)
    router = f"r{draw.randrange(settings.routers)}"
    if kind is Do.FORGE:
        return Fault(0.0, kind, router, n=draw.randrange(4 * forgeries.TO_ROUTER))
    if kind is Do.FORGE_OFFER:
        return Fault(0.0, kind, draw.choice(settings.workers).name, n=draw.randrange(forgeries.TO_WORKER))
    return Fault(0.0, kind, router, n=draw.randrange(1_000))
