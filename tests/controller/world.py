"""A small random world for planning: one model with a windowed group, a few workers, facts and residency."""

from __future__ import annotations

import random
from dataclasses import dataclass

from libs.continuation import chain as chains
from libs.controller.candidates import Variant, variant
from libs.controller.catalog_facts import Chunk, LayerGroup, Model, Node, Receipt, Replica, ReplicaState
from libs.controller.discovery import Observed
from libs.controller.fixed import _Model
from libs.controller.fleet import Fleet
from libs.controller.knobs import PolicyKnobs
from libs.controller.protocol import (
    DecodeCost,
    GenerationRequest,
    Heartbeat,
    Load,
    Pages,
    PrefillCost,
    Resident,
    Tier,
    TierCost,
)

FULL = LayerGroup("full-kv1-d64-float32", (1, 3), 0, 1, 64, "float32")
WINDOW = LayerGroup("w300-kv1-d64-float32", (0, 2), 300, 1, 64, "float32")
MODEL = Model("ab" * 32, (WINDOW, FULL), 256, max_context=8_192)
SALT = "cd" * 32


@dataclass
class World:
    request: GenerationRequest
    variant: Variant
    fleet: Fleet
    heartbeats: list[Heartbeat]
    resident: dict[str, dict[str, set[Tier]]]  # worker -> hash -> tiers


def a_request(length: int, budget: int = 16, name: str = "r") -> GenerationRequest:
    return GenerationRequest(name, "m", tuple(range(length)), length, budget, tenant_salt=SALT, deadline_ms=1_000)


def heartbeat(worker: str, **changes: object) -> Heartbeat:
    values: dict[str, object] = {
        "worker": worker,
        "epoch": 1,
        "sequence": 1,
        "node": f"node-{worker}",
        "load": Load(0.0, pages=Pages(1_000, 1_000)),
        "lanes": 8,
        "page_tokens": 16,
        "max_context": 8_192,
        "models": (MODEL.fingerprint,),
        "prefill": (PrefillCost(8_192, 1.0),),
        "decode": (DecodeCost(8, 20.0),),
        "bytes_per_token": 2_048,
        "snapshot": True,
    }
    return Heartbeat(**{**values, **changes})  # type: ignore[arg-type]


def observe(fleet: Fleet, *heartbeats: Heartbeat, now_ms: float = 0.0) -> Fleet:
    for one in heartbeats:
        fleet.observe(Observed(one, True, True), now_ms)
    return fleet


def nodes_of(
    request: GenerationRequest, groups: list[set[str]], replicas: list[list[tuple[str, str]]], tail: bool = False
) -> tuple[tuple[Node, ...], Node | None]:
    """Catalog nodes over the first len(groups) chunks; `groups` the durable ones, `replicas` (worker, group) pairs."""
    chain = chains.plan(chains.root(MODEL.fingerprint, SALT), request.tokens[: request.processed])
    links = [*chain.chunks[: len(groups)]]
    out = []
    for link, durable, held in zip(links, groups, replicas, strict=True):
        receipts = tuple(Receipt(name, "b", "k", "e", 0, "c") for name in sorted(durable))
        disks = tuple(Replica(f"node-{worker}", name, ReplicaState.READY, "c") for worker, name in held)
        out.append(Node(Chunk(link.hash, link.parent, link.start, link.end, receipts=receipts), disks))
    if tail and len(groups) == len(chain.chunks) and chain.tail is not None:
        link = chain.tail
        receipts = tuple(Receipt(group.name, "b", "k", "e", 0, "c") for group in MODEL.groups)
        return tuple(out), Node(Chunk(link.hash, link.parent, link.start, link.end, receipts=receipts, tail=True))
    return tuple(out), None


def fixed_ms(fleet: Fleet, by_tier: dict[Tier, float]) -> None:
    """As if it had been learned."""
    fleet.fixed._models[MODEL.fingerprint] = _Model(of=tuple([by_tier.get(tier, 0.0) for tier in Tier]))


def with_fixed(fleet: Fleet, rng: random.Random) -> None:
    """As after a while: a fixed time, which may be negative, of each tier."""
    fixed_ms(fleet, {tier: rng.choice([0.0, rng.uniform(-25, 25)]) for tier in Tier})


def random_world(seed: int, knobs: PolicyKnobs | None = None) -> World:
    rng = random.Random(seed)
    request = a_request(rng.randint(20, 1_600), rng.randint(1, 64))
    names = [group.name for group in MODEL.groups]
    workers = [f"w{index}" for index in range(rng.randint(1, 5))]
    chain = chains.plan(chains.root(MODEL.fingerprint, SALT), request.tokens[: request.processed])
    known = rng.randint(0, len(chain.chunks))
    groups: list[set[str]] = []
    replicas: list[list[tuple[str, str]]] = []
    for _ in range(known):
        groups.append({FULL.name} | ({WINDOW.name} if rng.random() < 0.7 else set()))
        replicas.append([(w, name) for w in workers for name in names if rng.random() < 0.4])
    nodes, tail = nodes_of(request, groups, replicas, tail=rng.random() < 0.5)
    fleet = Fleet(knobs) if knobs else Fleet()
    heartbeats = []
    resident: dict[str, dict[str, set[Tier]]] = {}
    for worker in workers:
        held: dict[str, set[Tier]] = {}
        run = rng.randint(0, len(chain.chunks)) if rng.random() < 0.6 else 0
        for link in chain.chunks[:run]:
            held.setdefault(link.hash, set()).add(Tier.GPU)
        for link in chain.chunks:
            if rng.random() < 0.3:
                held.setdefault(link.hash, set()).add(Tier.RAM)
        resident[worker] = held
        ends = {link.hash: link.end for link in chain.chunks}
        total = rng.choice([60, 1_000])
        free = rng.randint(0, total)
        heartbeats.append(
            heartbeat(
                worker,
                load=Load(
                    rng.choice([0.0, 5.0, 400.0]),
                    active=rng.randint(0, 3),
                    pages=Pages(total, free, 0, 0, total - free, 0, rng.randint(0, total - free)),
                ),
                draining=rng.random() < 0.1,
                prefill=(PrefillCost(512, rng.uniform(0.2, 2)), PrefillCost(8_192, rng.uniform(0.2, 3))),
                decode=(DecodeCost(1, 10.0), DecodeCost(8, 30.0)),
                tiers=tuple(
                    TierCost(tier, rng.uniform(0, 60), rng.uniform(500, 1e6), rng.choice([0, 0, 300]))
                    for tier in (Tier.GPU, Tier.RAM, Tier.SSD, Tier.PEER, Tier.OBJECT)
                    if rng.random() < 0.8
                ),
                resident=tuple(
                    Resident(name, ends[name], tier, MODEL.fingerprint)
                    for name, tiers in held.items()
                    for tier in sorted(tiers)
                ),
            )
        )
    observe(fleet, *heartbeats)
    with_fixed(fleet, rng)
    return World(request, variant(MODEL, request, nodes, tail), fleet, heartbeats, resident)
